//! Problem to pairwise model.
//!
//! One variable per instruction with one output: a value is a row and at most one move that starts
//! from the row's post form, `θ = 2^shift (row cost + move cost)`. An instruction with several outputs
//! has a row variable and, to avoid the product, one variable per output whose values are
//! `(post form, move)`; an edge ties the post forms. Further edges: a consumer's required mask must lie
//! in the producer's availability mask; a tied gradient's availability must contain the parameter's
//! post form. Requirements are unary and only remove values.
//!
//! Costs are multiplied by `2^shift` so that message passing, which divides integers, loses less than
//! a picosecond in all.

use std::collections::BTreeSet;

use crate::model::{DEAD, Edge, Model, Var};
use crate::problem::{Problem, availability};
use crate::solution::Assignment;
use crate::validate::{ProblemError, Validated};

/// Scaled costs sum to less than this.
const SCALED_BITS: u32 = 54;

/// Where a tensor's or instruction's decision lives.
#[derive(Clone, Debug)]
pub enum Meaning {
    /// One output (or none): a value is `(row, move or -1)`.
    Instruction {
        /// Instruction id.
        instruction: usize,
        /// Per value.
        values: Vec<(usize, i64)>,
    },
    /// One output of several: a value is a move (or -1) from a form.
    Output {
        /// Tensor id.
        tensor: usize,
        /// Move per value.
        moves: Vec<i64>,
    },
}

/// Why an edge exists; used in messages.
#[derive(Clone, Copy, Debug)]
pub enum Reason {
    /// The instruction reads the tensor.
    Consumes(usize, usize),
    /// The gradient (second) follows the parameter (first).
    Tied(usize, usize),
    /// The tensor is one of several outputs of the instruction.
    Produces(usize, usize),
}

/// The model of a problem and how to read its assignments.
#[derive(Clone, Debug)]
pub struct Built {
    /// The model.
    pub model: Model,
    /// Per variable.
    pub meaning: Vec<Meaning>,
    /// Per edge.
    pub reasons: Vec<Reason>,
    /// Costs in the model are multiplied by `2^shift`.
    pub shift: u32,
    /// The first variable that a requirement leaves empty, and the tensor.
    pub unmet: Option<usize>,
}

/// Per tensor: its variable, and for each value the availability mask and the post form's bit.
struct Produced {
    var: usize,
    available: Vec<u32>,
    post: Vec<u32>,
}

/// Builds the model.
///
/// # Errors
/// When a variable would have more than 65,535 values.
pub fn build(checked: &Validated<'_>) -> Result<Built, ProblemError> {
    let problem = checked.problem;
    let shift = SCALED_BITS.saturating_sub(64 - checked.total_cost.leading_zeros());
    let mut built =
        Built { model: Model::default(), meaning: Vec::new(), reasons: Vec::new(), shift, unmet: None };
    let mut tensors: Vec<Option<Produced>> = (0..problem.tensors.len()).map(|_| None).collect();
    let mut home = Vec::with_capacity(problem.instructions.len());
    for id in 0..problem.instructions.len() {
        home.push(built.add_instruction(problem, id, &mut tensors));
    }
    let tensors: Vec<Produced> = tensors.into_iter().flatten().collect();
    if let Some(big) = built.model.vars.iter().position(|var| var.theta.len() > usize::from(u16::MAX)) {
        return Err(ProblemError(format!("{} has more than 65,535 values", built.name(problem, big))));
    }
    built.add_consumers(problem, &tensors, &home);
    for tie in &problem.ties {
        let (parameter, gradient) = (&tensors[tie.parameter], &tensors[tie.gradient]);
        let reason = Reason::Tied(tie.parameter, tie.gradient);
        if parameter.var == gradient.var {
            for x in 0..parameter.post.len() {
                if parameter.post[x] & !gradient.available[x] != 0 {
                    built.model.kill(parameter.var, x);
                }
            }
        } else {
            let keys = [&gradient.available[..], &parameter.post[..]];
            built.add_edge([gradient.var, parameter.var], keys, &covers, reason);
        }
    }
    for requirement in &problem.requirements {
        let tensor = &tensors[requirement.tensor];
        let wanted = requirement.any_of.iter().fold(0u32, |mask, &form| mask | 1 << form);
        for x in 0..tensor.available.len() {
            if tensor.available[x] & wanted == 0 {
                built.model.kill(tensor.var, x);
            }
        }
        if built.unmet.is_none() && built.model.vars[tensor.var].living().next().is_none() {
            built.unmet = Some(requirement.tensor);
        }
    }
    built.model.index();
    for var in 0..built.model.vars.len() {
        built.model.refresh(var, |_| {});
    }
    Ok(built)
}

fn covers(available: u32, required: u32) -> bool {
    required & !available == 0
}

impl Built {
    fn add_var(&mut self, costs: Vec<i64>, meaning: Meaning) -> usize {
        let origin = self.model.vars.len();
        let labels = (0..costs.len() as u32).collect();
        let theta = costs.into_iter().map(|cost| cost << self.shift).collect();
        self.model.vars.push(Var { origin: origin as u32, labels, theta });
        self.meaning.push(meaning);
        origin
    }

    /// Adds the variables of one instruction; returns the one that holds its row.
    fn add_instruction(&mut self, problem: &Problem, id: usize, tensors: &mut [Option<Produced>]) -> usize {
        let instruction = &problem.instructions[id];
        if let [tensor] = instruction.outputs[..] {
            let (mut values, mut costs) = (Vec::new(), Vec::new());
            let (mut available, mut post) = (Vec::new(), Vec::new());
            for (index, row) in instruction.rows.iter().enumerate() {
                for (mv, moved, cost) in options(problem, tensor, row.post[0]) {
                    values.push((index, mv));
                    costs.push(row.cost + cost);
                    available.push(availability(row.post[0], moved));
                    post.push(1 << row.post[0]);
                }
            }
            let var = self.add_var(costs, Meaning::Instruction { instruction: id, values });
            tensors[tensor] = Some(Produced { var, available, post });
            return var;
        }
        let values = (0..instruction.rows.len()).map(|row| (row, -1)).collect();
        let costs = instruction.rows.iter().map(|row| row.cost).collect();
        let home = self.add_var(costs, Meaning::Instruction { instruction: id, values });
        for (position, &tensor) in instruction.outputs.iter().enumerate() {
            let forms: BTreeSet<u8> = instruction.rows.iter().map(|row| row.post[position]).collect();
            let (mut moves, mut costs) = (Vec::new(), Vec::new());
            let (mut available, mut post) = (Vec::new(), Vec::new());
            for &form in &forms {
                for (mv, moved, cost) in options(problem, tensor, form) {
                    moves.push(mv);
                    costs.push(cost);
                    available.push(availability(form, moved));
                    post.push(1 << form);
                }
            }
            let var = self.add_var(costs, Meaning::Output { tensor, moves });
            let rows: Vec<u32> = instruction.rows.iter().map(|row| 1 << row.post[position]).collect();
            self.add_edge([home, var], [&rows, &post], &|a, b| a == b, Reason::Produces(id, tensor));
            tensors[tensor] = Some(Produced { var, available, post });
        }
        home
    }

    fn add_consumers(&mut self, problem: &Problem, tensors: &[Produced], home: &[usize]) {
        for (id, instruction) in problem.instructions.iter().enumerate() {
            let Meaning::Instruction { values, .. } = &self.meaning[home[id]] else { continue };
            let row_of: Vec<usize> = values.iter().map(|&(row, _)| row).collect();
            let distinct: BTreeSet<usize> = instruction.inputs.iter().copied().collect();
            for &tensor in &distinct {
                let needs = |row: usize| {
                    let pairs = instruction.inputs.iter().zip(&instruction.rows[row].pre);
                    pairs
                        .filter(|&(&input, _)| input == tensor)
                        .fold(0u32, |mask, (_, &form)| mask | 1 << form)
                };
                let by_row: Vec<u32> = (0..instruction.rows.len()).map(needs).collect();
                let required: Vec<u32> = row_of.iter().map(|&row| by_row[row]).collect();
                let producer = &tensors[tensor];
                let keys = [&producer.available[..], &required[..]];
                self.add_edge([producer.var, home[id]], keys, &covers, Reason::Consumes(id, tensor));
            }
        }
    }

    /// Adds the edge `w(x, y) = 0 if relation(keys0[x], keys1[y]) else DEAD`, one class per key.
    fn add_edge(
        &mut self,
        ends: [usize; 2],
        keys: [&[u32]; 2],
        relation: &dyn Fn(u32, u32) -> bool,
        reason: Reason,
    ) {
        let (class, distinct): (Vec<_>, Vec<_>) = keys.iter().map(|keys| classes(keys)).unzip();
        let pairs = distinct[0].iter().flat_map(|&a| distinct[1].iter().map(move |&b| (a, b)));
        let table = pairs.map(|(a, b)| if relation(a, b) { 0 } else { DEAD }).collect();
        let f = [vec![0; distinct[0].len()], vec![0; distinct[1].len()]];
        let Ok(class) = <[Vec<u16>; 2]>::try_from(class) else { return };
        self.model.edges.push(Edge::new(ends.map(|end| end as u32), class, f, table));
        self.reasons.push(reason);
    }

    /// Reads an assignment (label per variable).
    pub fn decode(&self, problem: &Problem, labels: &[u32]) -> Assignment {
        let mut rows = vec![0; problem.instructions.len()];
        let mut moves = vec![-1; problem.tensors.len()];
        for (meaning, &label) in self.meaning.iter().zip(labels) {
            match meaning {
                Meaning::Instruction { instruction, values } => {
                    let (row, mv) = values[label as usize];
                    rows[*instruction] = row;
                    if let [tensor] = problem.instructions[*instruction].outputs[..] {
                        moves[tensor] = mv;
                    }
                }
                Meaning::Output { tensor, moves: choices } => moves[*tensor] = choices[label as usize],
            }
        }
        Assignment { rows, moves }
    }

    /// The name of a variable for messages.
    pub fn name(&self, problem: &Problem, var: usize) -> String {
        match &self.meaning[var] {
            Meaning::Instruction { instruction, .. } => {
                format!("instruction {instruction} ({})", problem.instructions[*instruction].name)
            }
            Meaning::Output { tensor, .. } => format!("tensor {tensor} ({})", problem.tensors[*tensor].name),
        }
    }

    /// The reason of an edge in words.
    pub fn explain(&self, problem: &Problem, edge: usize) -> String {
        let (instruction, tensor) =
            (|id: usize| &problem.instructions[id].name, |id: usize| &problem.tensors[id].name);
        match self.reasons[edge] {
            Reason::Consumes(i, t) => {
                format!("instruction {i} ({}) reads tensor {t} ({})", instruction(i), tensor(t))
            }
            Reason::Tied(p, g) => format!(
                "gradient {g} ({}) must be available in the stored form of parameter {p} ({})",
                tensor(g),
                tensor(p)
            ),
            Reason::Produces(i, t) => {
                format!("instruction {i} ({}) produces tensor {t} ({})", instruction(i), tensor(t))
            }
        }
    }
}

/// The ways to leave a tensor produced as `form`: `(move or -1, destination, cost)`.
fn options(problem: &Problem, tensor: usize, form: u8) -> Vec<(i64, Option<u8>, i64)> {
    let moves = problem.tensors[tensor].moves.iter().enumerate().filter(|(_, mv)| mv.0 == form);
    let moves = moves.map(|(index, mv)| (index as i64, Some(mv.1), mv.3));
    std::iter::once((-1, None, 0)).chain(moves).collect()
}

/// Numbers the distinct keys in ascending order: class per value, key per class.
fn classes(keys: &[u32]) -> (Vec<u16>, Vec<u32>) {
    let mut distinct = keys.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let class = keys.iter().map(|key| distinct.partition_point(|other| other < key) as u16).collect();
    (class, distinct)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::validate;

    const TEXT: &str = r#"{"version":1,
      "tensors":[{"name":"x","moves":[[2,0,"all_gather",5],[3,0,"all_gather",6]]},
                 {"name":"y","moves":[]},{"name":"z","moves":[[2,3,"all_to_all",2]]}],
      "instructions":[{"name":"x","inputs":[],"outputs":[0],
                       "rows":[{"pre":[],"post":[2],"cost":1},{"pre":[],"post":[0],"cost":4}]},
                      {"name":"split","inputs":[0,0],"outputs":[1,2],
                       "rows":[{"pre":[0,2],"post":[0,2],"cost":3},{"pre":[2,2],"post":[2,2],"cost":1}]}],
      "requirements":[{"tensor":2,"any_of":[3]}]}"#;

    #[test]
    fn values_are_rows_times_moves_and_outputs_their_own_variables() {
        let problem: Problem = serde_json::from_str(TEXT).unwrap();
        let checked = validate(&problem).unwrap();
        let built = build(&checked).unwrap();
        let sizes: Vec<usize> = built.model.vars.iter().map(|var| var.theta.len()).collect();
        // x: (row 0, none), (row 0, gather), (row 1, none); split: rows; y: two forms; z: none, moved.
        assert_eq!(sizes, [3, 2, 2, 2]);
        assert_eq!(built.model.vars[0].theta, [1, 6, 4].map(|cost: i64| cost << built.shift));
        assert_eq!(built.model.vars[3].living().collect::<Vec<_>>(), [1]);
        let assignment = built.decode(&problem, &[1, 1, 1, 1]);
        assert_eq!(assignment, Assignment { rows: vec![0, 1], moves: vec![0, -1, 0] });
        assert!(built.name(&problem, 2).contains("tensor 1 (y)"));
        assert!(built.explain(&problem, built.reasons.len() - 1).contains("reads tensor 0 (x)"));
    }

    #[test]
    fn an_unmet_requirement_is_remembered() {
        let problem: Problem = serde_json::from_str(&TEXT.replace("[3]}", "[1]}")).unwrap();
        let checked = validate(&problem).unwrap();
        assert_eq!(build(&checked).unwrap().unmet, Some(2));
    }
}
