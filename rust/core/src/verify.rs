//! Independent check of a program against the problem text. It shares nothing with the model that
//! the search works on except the definition of availability.
//!
//! `cost = Σ_i rows[i].cost + Σ_t (moves[t].cost + price of holding t)`, provided that every precondition,
//! requirement and tie holds.

use crate::problem::{Form, Problem, availability};
use crate::solution::Assignment;

/// Recomputes the cost of `assignment`.
///
/// # Errors
/// The first condition that the assignment breaks, in words.
pub fn verify(problem: &Problem, assignment: &Assignment) -> Result<i64, String> {
    let Assignment { rows, moves } = assignment;
    if rows.len() != problem.instructions.len() || moves.len() != problem.tensors.len() {
        return Err(format!(
            "{} rows and {} moves given for {} instructions and {} tensors",
            rows.len(),
            moves.len(),
            problem.instructions.len(),
            problem.tensors.len()
        ));
    }
    let mut cost = 0i64;
    let mut produced: Vec<Form> = vec![0; problem.tensors.len()];
    for (instruction, &row) in problem.instructions.iter().zip(rows) {
        let row = instruction.rows.get(row).ok_or_else(|| format!("{}: no row {row}", instruction.name))?;
        cost += row.cost;
        for (&tensor, &form) in instruction.outputs.iter().zip(&row.post) {
            produced[tensor] = form;
        }
    }
    let mut available = vec![0u32; problem.tensors.len()];
    for (id, (tensor, &index)) in problem.tensors.iter().zip(moves).enumerate() {
        let mut moved = None;
        if index != -1 {
            let found = usize::try_from(index).ok().and_then(|index| tensor.moves.get(index));
            let mv = found.ok_or_else(|| format!("{}: no move {index}", tensor.name))?;
            if mv.0 != produced[id] {
                return Err(format!(
                    "{}: move {index} starts from {}, produced {}",
                    tensor.name, mv.0, produced[id]
                ));
            }
            moved = Some(mv.1);
            cost += mv.3;
        }
        available[id] = availability(produced[id], moved);
        cost += tensor.kept(produced[id], moved);
    }
    for (instruction, &row) in problem.instructions.iter().zip(rows) {
        let row = &instruction.rows[row];
        for (&tensor, &form) in instruction.inputs.iter().zip(&row.pre) {
            let given = if row.direct { availability(produced[tensor], None) } else { available[tensor] };
            if given & 1 << form == 0 {
                let name = &problem.tensors[tensor].name;
                return Err(format!("{}: needs {name} in form {form}, not available", instruction.name));
            }
        }
    }
    for requirement in &problem.requirements {
        if !requirement.any_of.iter().any(|&form| available[requirement.tensor] & 1 << form != 0) {
            return Err(format!("requirement on {} not met", problem.tensors[requirement.tensor].name));
        }
    }
    for tie in &problem.ties {
        if available[tie.gradient] & 1 << produced[tie.parameter] == 0 {
            let names = (&problem.tensors[tie.gradient].name, &problem.tensors[tie.parameter].name);
            return Err(format!("{} not available in the stored form of {}", names.0, names.1));
        }
    }
    Ok(cost)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn broken_programs_are_refused() {
        let text = r#"{"version":1,
          "tensors":[{"name":"w","moves":[[2,0,"all_gather",5]]},{"name":"g","moves":[[0,2,"cut",1]]}],
          "instructions":[
            {"name":"w","inputs":[],"outputs":[0],"rows":[{"pre":[],"post":[2],"cost":1},{"pre":[],"post":[3],"cost":1}]},
            {"name":"f","inputs":[0],"outputs":[1],"rows":[{"pre":[0],"post":[0],"cost":3},{"pre":[2],"post":[1],"cost":2}]}],
          "requirements":[{"tensor":1,"any_of":[0,1]}],"ties":[{"parameter":0,"gradient":1}]}"#;
        let problem: Problem = serde_json::from_str(text).unwrap();
        let check = |rows: [usize; 2], moves: [i64; 2]| {
            verify(&problem, &Assignment { rows: rows.to_vec(), moves: moves.to_vec() })
        };
        assert_eq!(check([0, 0], [0, -1]), Ok(9));
        assert_eq!(check([0, 0], [0, 0]), Ok(10));
        for (rows, moves, expected) in [
            ([0, 0], [-1, -1], "needs w in form 0"),
            ([1, 0], [0, -1], "starts from 2, produced 3"),
            ([0, 1], [-1, -1], "stored form of w"),
            ([0, 2], [0, -1], "no row 2"),
            ([0, 0], [4, -1], "no move 4"),
        ] {
            let why = check(rows, moves).expect_err(expected);
            assert!(why.contains(expected), "{why}");
        }
        assert!(verify(&problem, &Assignment::default()).is_err());
    }
}
