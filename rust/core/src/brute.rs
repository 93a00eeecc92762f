//! Exhaustive search: the reference that tests compare with. Exponential; for tiny problems only.

use crate::problem::Problem;
use crate::solution::Assignment;
use crate::verify::verify;

/// The least cost over all rows and moves, and the first assignment that reaches it.
pub fn brute_force(problem: &Problem) -> Option<(i64, Assignment)> {
    let mut radix: Vec<usize> = problem.instructions.iter().map(|i| i.rows.len()).collect();
    radix.extend(problem.tensors.iter().map(|t| t.moves.len() + 1));
    let split = problem.instructions.len();
    let mut digits = vec![0usize; radix.len()];
    let mut best: Option<(i64, Assignment)> = None;
    loop {
        let rows = digits[..split].to_vec();
        let moves = digits[split..].iter().map(|&digit| digit as i64 - 1).collect();
        let assignment = Assignment { rows, moves };
        if let Ok(cost) = verify(problem, &assignment)
            && best.as_ref().is_none_or(|(least, _)| cost < *least)
        {
            best = Some((cost, assignment));
        }
        let Some(place) = (0..digits.len()).find(|&place| digits[place] + 1 < radix[place]) else {
            return best;
        };
        digits[place] += 1;
        digits[..place].fill(0);
    }
}
