//! Checks a [`Problem`] where it enters, so that the search may index without fear.
//!
//! Every rule of the format that the search relies on is checked here, and every message names the
//! culprit and what was expected.

use std::fmt;

use crate::problem::{FORM_COUNT, Form, MAX_TOTAL_COST, Problem};

/// A malformed problem (or incumbent): what is wrong and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProblemError(pub String);

impl fmt::Display for ProblemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ProblemError {}

type Checked<T = ()> = Result<T, ProblemError>;

fn fail<T>(message: String) -> Checked<T> {
    Err(ProblemError(message))
}

/// A problem that passed every check, with the producer of each tensor.
#[derive(Clone, Debug)]
pub struct Validated<'a> {
    /// The problem itself.
    pub problem: &'a Problem,
    /// For each tensor: its producing instruction and the output position there.
    pub producer: Vec<(usize, usize)>,
    /// Sum of the dearest rows and moves: no program costs more.
    pub total_cost: i64,
}

/// Checks `problem`.
///
/// # Errors
/// The first rule of the format that the problem breaks.
pub fn validate(problem: &Problem) -> Checked<Validated<'_>> {
    if problem.version != 1 {
        return fail(format!("problem version {} is not supported; this is version 1", problem.version));
    }
    check_forms(problem)?;
    let total_cost = total_cost(problem)?;
    let producer = find_producers(problem)?;
    check_acyclic(problem, &producer)?;
    let count = problem.tensors.len();
    for (index, requirement) in problem.requirements.iter().enumerate() {
        let place = || format!("requirement {index}");
        check_tensor(requirement.tensor, count, place)?;
        for &form in &requirement.any_of {
            check_form(form, place)?;
        }
    }
    for (index, tie) in problem.ties.iter().enumerate() {
        check_tensor(tie.parameter, count, || format!("tie {index} (parameter)"))?;
        check_tensor(tie.gradient, count, || format!("tie {index} (gradient)"))?;
    }
    Ok(Validated { problem, producer, total_cost })
}

fn check_form(form: Form, place: impl Fn() -> String) -> Checked {
    if form < FORM_COUNT {
        return Ok(());
    }
    fail(format!("{}: form {form} is out of range, forms are 0..{FORM_COUNT}", place()))
}

fn check_tensor(id: usize, count: usize, place: impl Fn() -> String) -> Checked {
    if id < count {
        return Ok(());
    }
    fail(format!("{}: tensor id {id} does not exist, there are {count} tensors", place()))
}

fn check_cost(cost: i64, place: impl Fn() -> String) -> Checked {
    if cost < 0 {
        return fail(format!("{}: cost {cost} is negative", place()));
    }
    Ok(())
}

fn check_forms(problem: &Problem) -> Checked {
    for (id, tensor) in problem.tensors.iter().enumerate() {
        for (index, mv) in tensor.moves.iter().enumerate() {
            let place = || move_place(problem, id, index);
            check_form(mv.0, place)?;
            check_form(mv.1, place)?;
        }
        for (index, keep) in tensor.keep.iter().enumerate() {
            let place = || keep_place(problem, id, index);
            check_form(keep.0, place)?;
            if tensor.keep[..index].iter().any(|other| other.0 == keep.0) {
                return fail(format!("{}: form {} has a price already", place(), keep.0));
            }
        }
    }
    for (id, instruction) in problem.instructions.iter().enumerate() {
        if instruction.rows.is_empty() {
            return fail(format!(
                "{}: has no rows; an instruction without a rule runs replicated",
                instruction_place(problem, id)
            ));
        }
        for (index, row) in instruction.rows.iter().enumerate() {
            let place = || row_place(problem, id, index);
            for (what, given, wanted) in [
                ("pre", row.pre.len(), instruction.inputs.len()),
                ("post", row.post.len(), instruction.outputs.len()),
            ] {
                if given != wanted {
                    return fail(format!("{}: {what} has {given} forms, expected {wanted}", place()));
                }
            }
            for &form in row.pre.iter().chain(&row.post) {
                check_form(form, place)?;
            }
        }
    }
    Ok(())
}

/// The sum of the dearest row of every instruction and the dearest move and price of every tensor: no program
/// costs more.
///
/// # Errors
/// A negative cost, or a sum beyond the arithmetic.
pub fn total_cost(problem: &Problem) -> Checked<i64> {
    let mut total = 0i64;
    let mut most = 0i64;
    for (id, tensor) in problem.tensors.iter().enumerate() {
        for (index, mv) in tensor.moves.iter().enumerate() {
            check_cost(mv.3, || move_place(problem, id, index))?;
            most = most.max(mv.3);
        }
        total = total.saturating_add(std::mem::take(&mut most));
        for (index, keep) in tensor.keep.iter().enumerate() {
            check_cost(keep.1, || keep_place(problem, id, index))?;
            most = most.max(keep.1);
        }
        total = total.saturating_add(std::mem::take(&mut most));
    }
    for (id, instruction) in problem.instructions.iter().enumerate() {
        for (index, row) in instruction.rows.iter().enumerate() {
            check_cost(row.cost, || row_place(problem, id, index))?;
            most = most.max(row.cost);
        }
        total = total.saturating_add(std::mem::take(&mut most));
    }
    if total >= MAX_TOTAL_COST {
        return fail(format!(
            "costs sum to {total} or more, the limit is {MAX_TOTAL_COST}; use a coarser unit"
        ));
    }
    Ok(total)
}

fn move_place(problem: &Problem, id: usize, index: usize) -> String {
    let tensor = &problem.tensors[id];
    format!("tensor {id} ({}), move {index} ({})", tensor.name, tensor.moves[index].2)
}

fn keep_place(problem: &Problem, id: usize, index: usize) -> String {
    format!("tensor {id} ({}), keep {index}", problem.tensors[id].name)
}

fn instruction_place(problem: &Problem, id: usize) -> String {
    format!("instruction {id} ({})", problem.instructions[id].name)
}

fn row_place(problem: &Problem, id: usize, index: usize) -> String {
    format!("{}, row {index}", instruction_place(problem, id))
}

fn find_producers(problem: &Problem) -> Checked<Vec<(usize, usize)>> {
    let count = problem.tensors.len();
    let mut producer: Vec<Option<(usize, usize)>> = vec![None; count];
    for (id, instruction) in problem.instructions.iter().enumerate() {
        let name = || instruction_place(problem, id);
        for &tensor in &instruction.inputs {
            check_tensor(tensor, count, || format!("{}, inputs", name()))?;
        }
        for (position, &tensor) in instruction.outputs.iter().enumerate() {
            check_tensor(tensor, count, || format!("{}, outputs", name()))?;
            if let Some((other, _)) = producer[tensor] {
                return fail(format!(
                    "tensor {tensor} ({}) has two producers: {} and {}",
                    problem.tensors[tensor].name,
                    instruction_place(problem, other),
                    name()
                ));
            }
            producer[tensor] = Some((id, position));
        }
    }
    let named = |(id, found): (usize, &Option<(usize, usize)>)| {
        found.ok_or_else(|| {
            ProblemError(format!("tensor {id} ({}) has no producing instruction", problem.tensors[id].name))
        })
    };
    producer.iter().enumerate().map(named).collect()
}

/// Kahn's algorithm: what never becomes ready lies on (or behind) a cycle.
fn check_acyclic(problem: &Problem, producer: &[(usize, usize)]) -> Checked {
    let count = problem.instructions.len();
    let mut waiting = vec![0usize; count];
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); count];
    for (id, instruction) in problem.instructions.iter().enumerate() {
        for &tensor in &instruction.inputs {
            waiting[id] += 1;
            users[producer[tensor].0].push(id);
        }
    }
    let mut ready: Vec<usize> = (0..count).filter(|&id| waiting[id] == 0).collect();
    let mut done = 0;
    while let Some(id) = ready.pop() {
        done += 1;
        for &user in &users[id] {
            waiting[user] -= 1;
            if waiting[user] == 0 {
                ready.push(user);
            }
        }
    }
    if done == count {
        return Ok(());
    }
    let id = waiting.iter().position(|&left| left > 0).unwrap_or(0);
    fail(format!(
        "instructions form a cycle through or before instruction {id} ({})",
        problem.instructions[id].name
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    fn problem(text: &str) -> Problem {
        serde_json::from_str(text).unwrap()
    }

    const GOOD: &str = r#"{"version":1,
      "tensors":[{"name":"x","moves":[[2,0,"all_gather",5]]},{"name":"y","moves":[]}],
      "instructions":[{"name":"x","inputs":[],"outputs":[0],"rows":[{"pre":[],"post":[2],"cost":1}]},
                      {"name":"f","inputs":[0],"outputs":[1],"rows":[{"pre":[0],"post":[0],"cost":3}]}],
      "requirements":[{"tensor":1,"any_of":[0]}],"ties":[{"parameter":0,"gradient":1}]}"#;

    #[test]
    fn a_good_problem_passes() {
        let problem = problem(GOOD);
        let checked = validate(&problem).unwrap();
        assert_eq!(checked.producer, [(0, 0), (1, 0)]);
        assert_eq!(checked.total_cost, 9);
    }

    #[test]
    fn every_defect_is_named() {
        for (old, new, expected) in [
            ("\"version\":1", "\"version\":2", "version 2"),
            ("[2,0,", "[30,0,", "form 30 is out of range"),
            ("\"inputs\":[0]", "\"inputs\":[7]", "tensor id 7 does not exist"),
            ("\"inputs\":[0]", "\"inputs\":[1]", "cycle"),
            ("\"inputs\":[0]", "\"inputs\":[0,0]", "pre has 1 forms, expected 2"),
            ("\"outputs\":[1]", "\"outputs\":[0]", "two producers"),
            (
                "\"outputs\":[1],\"rows\":[{\"pre\":[0],\"post\":[0]",
                "\"outputs\":[],\"rows\":[{\"pre\":[0],\"post\":[]",
                "no producing instruction",
            ),
            ("\"rows\":[{\"pre\":[],\"post\":[2],\"cost\":1}]", "\"rows\":[]", "has no rows"),
            ("\"cost\":3", "\"cost\":-3", "negative"),
            ("\"cost\":3", "\"cost\":9000000000000000000", "coarser unit"),
            ("\"tensor\":1", "\"tensor\":9", "requirement 0: tensor id 9"),
            ("\"any_of\":[0]", "\"any_of\":[31]", "requirement 0: form 31"),
            ("\"gradient\":1", "\"gradient\":9", "tie 0 (gradient)"),
        ] {
            let text = GOOD.replace(old, new);
            assert_ne!(text, GOOD, "{old} does not occur");
            let problem = problem(&text);
            let message = validate(&problem).expect_err(new).to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
