//! Problem to pairwise model.
//!
//! One variable per instruction with one output: a value is a row and at most one move that starts
//! from the row's post form, `θ = 2^shift (row cost + move cost + price of holding the output)`. An instruction with several outputs
//! has a row variable and, to avoid the product, one variable per output whose values are
//! `(post form, move)`; an edge ties the post forms. Further edges: a consumer's required mask must lie
//! in the producer's availability mask; a tied gradient's availability must contain the parameter's
//! post form. Requirements are unary and only remove values.
//!
//! Costs are multiplied by `2^shift` so that message passing, which divides integers, loses less than
//! a picosecond in all.

use std::collections::BTreeSet;

use crate::model::{DEAD, Edge, HALF, Model, Var, Wipeout};
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
        /// Post form and move per value.
        values: Vec<(u8, i64)>,
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

/// Per tensor: its variable, and for each value the availability mask (as it is without a communication in the
/// upper half) and the post form's bit.
struct Produced {
    var: usize,
    available: Vec<u64>,
    post: Vec<u64>,
}

/// Of a direct row's needs in a mask of availability.
const DIRECT: u32 = 32;

fn offered(form: u8, moved: Option<u8>) -> u64 {
    u64::from(availability(form, moved)) | u64::from(availability(form, None)) << DIRECT
}

/// Builds the model, without costs (see [`Built::priced`]).
///
/// # Errors
/// When a variable would have more than 65,535 values.
pub fn build(checked: &Validated<'_>) -> Result<Built, ProblemError> {
    let problem = checked.problem;
    let mut built =
        Built { model: Model::default(), meaning: Vec::new(), reasons: Vec::new(), shift: 0, unmet: None };
    built.price(checked.total_cost);
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
        let wanted = requirement.any_of.iter().fold(0u64, |mask, &form| mask | 1 << form);
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

fn covers(available: u64, required: u64) -> bool {
    required & !available == 0
}

impl Built {
    fn add_var(&mut self, count: usize, meaning: Meaning) -> usize {
        let origin = self.model.vars.len();
        let labels = (0..count as u32).collect();
        self.model.vars.push(Var { origin: origin as u32, labels, theta: vec![0; count], settled: None });
        self.meaning.push(meaning);
        origin
    }

    /// Adds the variables of one instruction; returns the one that holds its row.
    fn add_instruction(&mut self, problem: &Problem, id: usize, tensors: &mut [Option<Produced>]) -> usize {
        let instruction = &problem.instructions[id];
        if let [tensor] = instruction.outputs[..] {
            let mut values = Vec::new();
            let (mut available, mut post) = (Vec::new(), Vec::new());
            for (index, row) in instruction.rows.iter().enumerate() {
                for (mv, moved) in options(problem, tensor, row.post[0]) {
                    values.push((index, mv));
                    available.push(offered(row.post[0], moved));
                    post.push(1 << row.post[0]);
                }
            }
            let var = self.add_var(values.len(), Meaning::Instruction { instruction: id, values });
            tensors[tensor] = Some(Produced { var, available, post });
            return var;
        }
        let values = (0..instruction.rows.len()).map(|row| (row, -1)).collect();
        let home = self.add_var(instruction.rows.len(), Meaning::Instruction { instruction: id, values });
        for (position, &tensor) in instruction.outputs.iter().enumerate() {
            let forms: BTreeSet<u8> = instruction.rows.iter().map(|row| row.post[position]).collect();
            let mut values = Vec::new();
            let (mut available, mut post) = (Vec::new(), Vec::new());
            for &form in &forms {
                for (mv, moved) in options(problem, tensor, form) {
                    values.push((form, mv));
                    available.push(offered(form, moved));
                    post.push(1 << form);
                }
            }
            let var = self.add_var(values.len(), Meaning::Output { tensor, values });
            let rows: Vec<u64> = instruction.rows.iter().map(|row| 1 << row.post[position]).collect();
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
                    let mask = pairs
                        .filter(|&(&input, _)| input == tensor)
                        .fold(0u64, |mask, (_, &form)| mask | 1 << form);
                    if instruction.rows[row].direct { mask << DIRECT } else { mask }
                };
                let by_row: Vec<u64> = (0..instruction.rows.len()).map(needs).collect();
                let required: Vec<u64> = row_of.iter().map(|&row| by_row[row]).collect();
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
        keys: [&[u64]; 2],
        relation: &dyn Fn(u64, u64) -> bool,
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

    /// Sets the scale for costs that sum to at most `total`.
    pub fn price(&mut self, total: i64) {
        self.shift = SCALED_BITS.saturating_sub(64 - total.leading_zeros());
    }

    /// Scaled cost of each value of a variable at the costs of `problem`, which differs from the one built only
    /// in costs.
    pub fn costs<'a>(&'a self, problem: &'a Problem, var: usize) -> Box<dyn Iterator<Item = i64> + 'a> {
        let shift = self.shift;
        let leave = |tensor: usize, form: u8, index: i64| {
            let tensor = &problem.tensors[tensor];
            match usize::try_from(index) {
                Ok(index) => {
                    let mv = &tensor.moves[index];
                    mv.3 + tensor.kept(form, Some(mv.1))
                }
                Err(_) => tensor.kept(form, None),
            }
        };
        match &self.meaning[var] {
            Meaning::Instruction { instruction, values } => {
                let instruction = &problem.instructions[*instruction];
                Box::new(values.iter().map(move |&(row, mv)| {
                    let row = &instruction.rows[row];
                    let left = match instruction.outputs[..] {
                        [tensor] => leave(tensor, row.post[0], mv),
                        _ => 0,
                    };
                    (row.cost + left) << shift
                }))
            }
            Meaning::Output { tensor, values } => {
                Box::new(values.iter().map(move |&(form, mv)| leave(*tensor, form, mv) << shift))
            }
        }
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
                Meaning::Output { tensor, values } => moves[*tensor] = values[label as usize].1,
            }
        }
        Assignment { rows, moves }
    }

    /// The model at the costs of `problem`.
    pub fn priced(&self, problem: &Problem) -> Model {
        let mut model = self.model.clone();
        for (s, var) in model.vars.iter_mut().enumerate() {
            for (theta, cost) in var.theta.iter_mut().zip(self.costs(problem, s)) {
                *theta = if *theta < HALF { cost } else { *theta };
            }
        }
        model
    }

    /// Whether a value of a variable uses a row that is marked (per instruction and row).
    pub fn forbids(&self, rows: &[Vec<bool>], var: usize, label: usize) -> bool {
        match &self.meaning[var] {
            Meaning::Instruction { instruction, values } => rows[*instruction][values[label].0],
            Meaning::Output { .. } => false,
        }
    }

    /// Why a variable of the model as built has no value left.
    pub fn conflict(&self, problem: &Problem, wipeout: Wipeout) -> String {
        let name = self.name(problem, wipeout.var);
        if let Some(edge) = wipeout.edge {
            return format!("nothing is left for {name}: {}", self.explain(problem, edge));
        }
        let required = self.unmet.map(|t| (t, &problem.tensors[t].name));
        required.map_or_else(
            || format!("nothing is left for {name}"),
            |(t, tensor)| format!("nothing is left for {name}: requirement on tensor {t} ({tensor})"),
        )
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

/// The ways to leave a tensor produced as `form`: `(move or -1, destination)`.
fn options(problem: &Problem, tensor: usize, form: u8) -> Vec<(i64, Option<u8>)> {
    let moves = problem.tensors[tensor].moves.iter().enumerate().filter(|(_, mv)| mv.0 == form);
    let moves = moves.map(|(index, mv)| (index as i64, Some(mv.1)));
    std::iter::once((-1, None)).chain(moves).collect()
}

/// Numbers the distinct keys in ascending order: class per value, key per class.
fn classes(keys: &[u64]) -> (Vec<u16>, Vec<u64>) {
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
        let costs: Vec<i64> = built.costs(&problem, 0).collect();
        assert_eq!(costs, [1, 6, 4].map(|cost: i64| cost << built.shift));
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
