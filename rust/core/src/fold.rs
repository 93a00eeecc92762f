//! Alike instructions that take the same values: the layers of a model, a few of them at a time.
//!
//! The variables of a group become one, whose values cost what they cost all of them; its edges are those of all. So
//! the model has one part for the layers that are folded, and each of its programs is one of the whole problem, at
//! the same cost. Programs in which alike layers differ are not among them: the bound is of folded programs.

use rustc_hash::FxHashSet;

use crate::build::{Built, Meaning};
use crate::model::{Edge, HALF, Model};
use crate::problem::{Instruction, Problem};
use crate::validate::ProblemError;

/// An edge between two variables of a folded model: their numbers, the classes of their values, its table.
type Table<'a> = ([u32; 2], &'a [Vec<u16>; 2], &'a [i64]);

/// Which variables of a model as built are one.
#[derive(Clone, Debug)]
pub struct Fold {
    /// For each variable the one that stands for it.
    of: Vec<u32>,
    /// For each variable those that it stands for.
    members: Vec<Vec<u32>>,
}

impl Fold {
    /// `groups`: for each instruction the one that stands for it.
    ///
    /// # Errors
    /// Another number of them, an instruction that does not stand for itself, or two that are not alike.
    pub fn new(problem: &Problem, built: &Built, groups: &[usize]) -> Result<Self, ProblemError> {
        let count = problem.instructions.len();
        if groups.len() != count {
            return Err(ProblemError(format!(
                "alike: {} given, there are {count} instructions",
                groups.len()
            )));
        }
        for (id, &first) in groups.iter().enumerate() {
            if groups.get(first) != Some(&first) {
                return Err(ProblemError(format!("alike: {first} stands for {id}, but not for itself")));
            }
            if !alike(problem, &problem.instructions[id], &problem.instructions[first]) {
                return Err(ProblemError(format!(
                    "alike: instruction {id} ({}) is not like {first} ({})",
                    problem.instructions[id].name, problem.instructions[first].name
                )));
            }
        }
        let mut of_instruction = vec![0; count];
        let mut of_tensor = vec![0; problem.tensors.len()];
        for (var, meaning) in (0..).zip(&built.meaning) {
            match meaning {
                Meaning::Instruction { instruction, .. } => of_instruction[*instruction] = var,
                Meaning::Output { tensor, .. } => of_tensor[*tensor] = var,
            }
        }
        let mut of: Vec<u32> = (0..built.meaning.len() as u32).collect();
        for (instruction, &first) in problem.instructions.iter().zip(groups) {
            for (&own, &other) in instruction.outputs.iter().zip(&problem.instructions[first].outputs) {
                of[of_tensor[own] as usize] = of_tensor[other];
            }
        }
        for (id, &first) in groups.iter().enumerate() {
            of[of_instruction[id] as usize] = of_instruction[first];
        }
        let mut members = vec![Vec::new(); of.len()];
        for (var, &first) in (0..).zip(&of) {
            members[first as usize].push(var);
        }
        Ok(Self { of, members })
    }

    /// The folded model of `model`, the one as built.
    pub fn model(&self, model: &Model) -> Model {
        let mut position = vec![u32::MAX; model.vars.len()];
        let mut folded = Model { constant: model.constant, ..Model::default() };
        for (s, members) in self.members.iter().enumerate().filter(|(_, members)| !members.is_empty()) {
            position[s] = folded.vars.len() as u32;
            let mut var = model.vars[s].clone();
            for &member in members {
                for (theta, &other) in var.theta.iter_mut().zip(&model.vars[member as usize].theta) {
                    *theta = (*theta).max(other);
                }
            }
            folded.vars.push(var);
        }
        let mut seen: FxHashSet<Table<'_>> = FxHashSet::default();
        for edge in &model.edges {
            let ends = edge.ends.map(|end| position[self.of[end as usize] as usize]);
            if ends[0] == ends[1] {
                let classes = edge.class[0].iter().zip(&edge.class[1]);
                let impossible = |(&a, &b): (&u16, &u16)| edge.cost(0, a.into(), b.into()) >= HALF;
                let lost: Vec<usize> =
                    classes.map(impossible).enumerate().filter(|x| x.1).map(|x| x.0).collect();
                for x in lost {
                    folded.kill(ends[0] as usize, x);
                }
            } else if seen.insert((ends, &edge.class, &edge.w[0])) {
                folded.edges.push(Edge { ends, ..edge.clone() });
            }
        }
        folded.index();
        for s in 0..folded.vars.len() {
            folded.refresh(s, |_| {});
        }
        folded
    }

    /// The variables that `var` stands for.
    pub fn members(&self, var: usize) -> &[u32] {
        &self.members[var]
    }

    /// Gives each variable the label of the one that stands for it. `labels` may have those of joined variables too.
    pub fn expand(&self, labels: &mut [u32]) {
        for (var, &first) in self.of.iter().enumerate() {
            labels[var] = labels[first as usize];
        }
    }
}

/// Whether two instructions have the same values: rows, and moves of their outputs, but for costs.
fn alike(problem: &Problem, one: &Instruction, other: &Instruction) -> bool {
    let same_tensor = |(&own, &its): (&usize, &usize)| {
        let (own, its) = (&problem.tensors[own], &problem.tensors[its]);
        let moves = own.moves.iter().map(|mv| (mv.0, mv.1)).eq(its.moves.iter().map(|mv| (mv.0, mv.1)));
        moves && own.keep.iter().map(|keep| keep.0).eq(its.keep.iter().map(|keep| keep.0))
    };
    let rows = one.rows.iter().map(|row| (&row.pre, &row.post, row.direct));
    one.outputs.len() == other.outputs.len()
        && rows.eq(other.rows.iter().map(|row| (&row.pre, &row.post, row.direct)))
        && one.outputs.iter().zip(&other.outputs).all(same_tensor)
}
