//! Searches among programs whose alike instructions are alike, against exhaustive search among them.

mod support;

use hetspmd_search::problem::{Instruction, Problem, Requirement, Row, Tensor, Tie};
use hetspmd_search::verify::verify;
use hetspmd_search::{Asked, Assignment, Limits, Searcher, StopReason};
use proptest::prelude::*;
use support::random::problems;
use support::set_costs;

/// `copies` of a problem, one after the other: the first input of an instruction is that of the copy before.
fn repeated(one: &Problem, copies: usize) -> Problem {
    let (tensors, instructions) = (one.tensors.len(), one.instructions.len());
    let mut all =
        Problem { version: 1, tensors: vec![], instructions: vec![], requirements: vec![], ties: vec![] };
    for copy in 0..copies {
        let own = |tensor: usize| copy * tensors + tensor;
        let named = |name: &str| format!("{name} of {copy}");
        all.tensors.extend(one.tensors.iter().map(|t| Tensor { name: named(&t.name), ..t.clone() }));
        for instruction in &one.instructions {
            let mut inputs: Vec<usize> = instruction.inputs.iter().map(|&t| own(t)).collect();
            if let Some(first) = inputs.first_mut().filter(|_| copy > 0) {
                *first -= tensors;
            }
            all.instructions.push(Instruction {
                name: named(&instruction.name),
                inputs,
                outputs: instruction.outputs.iter().map(|&t| own(t)).collect(),
                rows: instruction.rows.clone(),
            });
        }
        all.requirements
            .extend(one.requirements.iter().map(|r| Requirement { tensor: own(r.tensor), ..r.clone() }));
        all.ties
            .extend(one.ties.iter().map(|t| Tie { parameter: own(t.parameter), gradient: own(t.gradient) }));
    }
    assert_eq!(all.instructions.len(), copies * instructions);
    all
}

/// For each instruction the one that it is like, where copy `n` is like `like[n]`.
fn groups(one: &Problem, like: &[usize]) -> Vec<usize> {
    let count = one.instructions.len();
    like.iter().flat_map(|copy| (0..count).map(move |id| copy * count + id)).collect()
}

/// The least cost of all programs that `allowed` leaves, in which copies are like the ones that are named.
fn brute_force(all: &Problem, one: &Problem, like: &[usize], allowed: Option<&[bool]>) -> Option<i64> {
    let copies: Vec<usize> = (0..like.len()).filter(|&copy| like[copy] == copy).collect();
    let mut radix: Vec<usize> = one.instructions.iter().map(|i| i.rows.len()).collect();
    radix.extend(one.tensors.iter().map(|t| t.moves.len() + 1));
    let (size, split) = (radix.len(), one.instructions.len());
    let mut digits = vec![0usize; size * copies.len()];
    let mut best: Option<i64> = None;
    loop {
        let mut assignment = Assignment::default();
        for copy in like {
            let place = size * copies.iter().position(|own| own == copy).expect("a copy that is like itself");
            assignment.rows.extend(&digits[place..place + split]);
            assignment
                .moves
                .extend(digits[place + split..place + size].iter().map(|&digit| digit as i64 - 1));
        }
        let mut offset = 0;
        let is_allowed = all.instructions.iter().zip(&assignment.rows).all(|(instruction, &row)| {
            offset += instruction.rows.len();
            allowed.is_none_or(|allowed| allowed[offset - instruction.rows.len() + row])
        });
        if let (true, Ok(cost)) = (is_allowed, verify(all, &assignment)) {
            best = Some(best.map_or(cost, |least| least.min(cost)));
        }
        let next = (0..digits.len()).find(|&place| digits[place] + 1 < radix[place % size]);
        let Some(place) = next else { return best };
        digits[place] += 1;
        digits[..place].fill(0);
    }
}

/// Compares searches at several costs, each on its own and after the others.
fn compare(one: &Problem, like: &[usize], rounds: &[(Vec<i64>, u64)]) -> Result<(), TestCaseError> {
    let mut searcher = Searcher::new(repeated(one, like.len())).unwrap();
    searcher.fold(&groups(one, like)).unwrap();
    for (costs, mask) in rounds {
        let next = costs.iter().cycle().copied();
        let rows = set_costs(&mut searcher, next);
        let present = searcher.problem().clone();
        let allowed: Vec<bool> = (0..rows).map(|row| mask >> (row % 64) & 3 != 0).collect();
        let allowed = Some(&allowed[..]).filter(|_| mask % 2 == 0);
        let expected = brute_force(&present, one, like, allowed);
        let asked = Asked { allowed, folded: true, ..Asked::default() };
        let found = searcher.solve(Limits::default(), asked, &mut |_| true).unwrap();
        match expected {
            None => prop_assert_eq!(found.stop_reason, StopReason::Infeasible),
            Some(cost) => {
                prop_assert_eq!((found.stop_reason, found.cost), (StopReason::Optimal, Some(cost)));
                prop_assert_eq!(found.lower_bound, cost);
                let program = Assignment { rows: found.rows, moves: found.moves };
                prop_assert_eq!(verify(&present, &program), Ok(cost));
                let (split, size) = (one.instructions.len(), one.tensors.len());
                for (copy, &other) in like.iter().enumerate() {
                    let of = |copy: usize| {
                        (&program.rows[copy * split..][..split], &program.moves[copy * size..][..size])
                    };
                    prop_assert_eq!(of(copy), of(other));
                }
            }
        }
        // The whole problem is searched as before, and what it finds may be what the next search improves on.
        let whole =
            searcher.solve(Limits::default(), Asked { allowed, ..Asked::default() }, &mut |_| true).unwrap();
        if let Some(cost) = expected {
            prop_assert!(whole.cost.is_some_and(|least| least <= cost));
        }
        if whole.cost.is_some() {
            let program = Assignment { rows: whole.rows, moves: whole.moves };
            let asked = Asked { incumbent: Some(&program), allowed, folded: true, ..Asked::default() };
            let better = searcher.solve(Limits::default(), asked, &mut |_| true).unwrap();
            prop_assert_eq!((better.stop_reason, better.cost), (StopReason::Optimal, whole.cost));
        }
    }
    Ok(())
}

fn costs() -> impl Strategy<Value = Vec<(Vec<i64>, u64)>> {
    prop::collection::vec((prop::collection::vec(0..30i64, 40), any::<u64>()), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn copies_that_are_all_alike(one in problems(2), rounds in costs()) {
        compare(&one, &[0, 0, 0], &rounds)?;
    }

    #[test]
    fn runs_of_copies(one in problems(1), rounds in costs(), last in any::<bool>()) {
        compare(&one, if last { &[0, 1, 1] } else { &[0, 0, 2] }, &rounds)?;
    }
}

fn chain(length: usize) -> Problem {
    let row =
        |pre: &[u8], post: u8, cost: i64| Row { pre: pre.to_vec(), post: vec![post], cost, direct: false };
    let instruction = |id: usize| Instruction {
        name: format!("i{id}"),
        inputs: if id == 0 { vec![] } else { vec![id - 1] },
        outputs: vec![id],
        rows: if id == 0 {
            vec![row(&[], 2, 1)]
        } else {
            vec![row(&[2], 3, 1), row(&[3], 2, 1), row(&[2], 2, 5)]
        },
    };
    Problem {
        version: 1,
        tensors: (0..length).map(|id| Tensor { name: format!("t{id}"), ..Tensor::default() }).collect(),
        instructions: (0..length).map(instruction).collect(),
        requirements: vec![],
        ties: vec![],
    }
}

#[test]
fn an_instruction_that_reads_its_like_takes_a_row_that_follows_itself() {
    let mut searcher = Searcher::new(chain(5)).unwrap();
    searcher.fold(&[0, 1, 1, 1, 1]).unwrap();
    let mut cost = |folded| {
        let asked = Asked { folded, ..Asked::default() };
        searcher.solve(Limits::default(), asked, &mut |_| true).unwrap().cost
    };
    assert_eq!((cost(false), cost(true)), (Some(5), Some(21)));
}

#[test]
fn what_is_not_alike_is_refused() {
    let mut searcher = Searcher::new(chain(3)).unwrap();
    let mut why = |groups: &[usize]| searcher.fold(groups).unwrap_err().to_string();
    assert_eq!(why(&[0, 1]), "alike: 2 given, there are 3 instructions");
    assert_eq!(why(&[0, 0, 2]), "alike: instruction 1 (i1) is not like 0 (i0)");
    assert_eq!(why(&[0, 2, 1]), "alike: 2 stands for 1, but not for itself");
    assert_eq!(why(&[0, 1, 7]), "alike: 7 stands for 2, but not for itself");
    let asked = Asked { folded: true, ..Asked::default() };
    let why = searcher.solve(Limits::default(), asked, &mut |_| true).unwrap_err();
    assert_eq!(why.to_string(), "folded: no instructions are known to be alike");
}
