//! Small random problems for comparison with exhaustive search.

use hetspmd_search::problem::{Instruction, Keep, Move, Problem, Requirement, Row, Tensor, Tie};
use proptest::prelude::*;

const FORMS: u8 = 4;

type RawRow = (Vec<u8>, Vec<u8>, i64, bool);
type RawTensor = (Vec<(u8, u8, i64)>, Vec<(u8, i64)>);
type RawInstruction = (Vec<usize>, usize, Vec<RawRow>);

fn form() -> impl Strategy<Value = u8> {
    prop_oneof![2 => Just(0), 1 => Just(1), 3 => 2..FORMS]
}

fn row() -> impl Strategy<Value = RawRow> {
    (prop::collection::vec(form(), 3), prop::collection::vec(form(), 3), 0..30i64, prop::bool::weighted(0.2))
}

fn instruction() -> impl Strategy<Value = RawInstruction> {
    let inputs = prop::collection::vec(0..100usize, 0..=2);
    let outputs = prop_oneof![1 => Just(0usize), 8 => Just(1), 2 => Just(2)];
    (inputs, outputs, prop::collection::vec(row(), 1..=3))
}

/// Problems with up to `most` instructions; many are feasible, some are not.
pub fn problems(most: usize) -> impl Strategy<Value = Problem> {
    let moves = prop::collection::vec((0..FORMS, 0..FORMS, 0..15i64), 0..=2);
    let keep = prop_oneof![
        2 => Just(vec![]),
        1 => prop::collection::vec((0..FORMS, 0..20i64), 0..=3)
    ];
    let moves = (moves, keep);
    (
        prop::collection::vec(instruction(), 1..=most),
        prop::collection::vec(moves, 2 * most),
        prop::collection::vec((0..100usize, prop::collection::vec(form(), 1..=2)), 0..=2),
        prop::collection::vec((0..100usize, 0..100usize), 0..=1),
    )
        .prop_map(|(raw, moves, requirements, ties)| assemble(raw, moves, requirements, ties))
}

fn assemble(
    raw: Vec<RawInstruction>,
    moves: Vec<RawTensor>,
    requirements: Vec<(usize, Vec<u8>)>,
    ties: Vec<(usize, usize)>,
) -> Problem {
    let mut instructions = Vec::new();
    let mut count = 0;
    for (id, (inputs, outputs, rows)) in raw.into_iter().enumerate() {
        let inputs: Vec<usize> = if count == 0 { vec![] } else { inputs.iter().map(|i| i % count).collect() };
        let row = |(pre, post, cost, direct): RawRow| Row {
            pre: pre[..inputs.len()].to_vec(),
            post: post[..outputs].to_vec(),
            cost,
            direct,
        };
        let rows = rows.into_iter().map(row).collect();
        let outputs: Vec<usize> = (count..count + outputs).collect();
        count += outputs.len();
        instructions.push(Instruction { name: format!("i{id}"), inputs, outputs, rows });
    }
    let named = |(id, (moves, mut keep)): (usize, RawTensor)| Tensor {
        name: format!("t{id}"),
        keep: {
            keep.sort_unstable();
            keep.dedup_by_key(|keep| keep.0);
            keep.into_iter().map(|(form, cost)| Keep(form, cost)).collect()
        },
        moves: moves.into_iter().map(|(a, b, cost)| Move(a, b, "move".into(), cost)).collect(),
    };
    let tensors: Vec<Tensor> = moves.into_iter().take(count).enumerate().map(named).collect();
    let some = count > 0;
    let requirement = |(tensor, any_of): (usize, Vec<u8>)| Requirement { tensor: tensor % count, any_of };
    let tie = |(a, b): (usize, usize)| Tie { parameter: a % count, gradient: b % count };
    Problem {
        version: 1,
        tensors,
        instructions,
        requirements: requirements.into_iter().filter(|_| some).map(requirement).collect(),
        ties: ties.into_iter().filter(|_| some).map(tie).collect(),
    }
}

/// A problem whose interaction graph is dense, so that neither the bound nor the beam settles it quickly.
/// Every row set contains an all-replicated row and every form can be gathered, so it is feasible.
pub fn dense(count: usize, mut seed: u64) -> Problem {
    let mut next = |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 16) % below
    };
    let mut instructions = Vec::new();
    let mut tensors = Vec::new();
    for id in 0..count {
        let arity = if id < 3 { 0 } else { 3 };
        let inputs: Vec<usize> = (0..arity).map(|_| next(id as u64) as usize).collect();
        let mut rows = vec![Row { pre: vec![0; arity], post: vec![0], cost: 900, direct: false }];
        for _ in 0..7 {
            let pre = (0..arity).map(|_| 1 + next(5) as u8).collect();
            rows.push(Row { pre, post: vec![1 + next(5) as u8], cost: next(400) as i64, direct: false });
        }
        let mut moves: Vec<Move> =
            (1..6).map(|form| Move(form, 0, "gather".into(), 300 + next(900) as i64)).collect();
        for from in 1..6 {
            let to = 1 + next(5) as u8;
            moves.push(Move(from, to, "all_to_all".into(), 50 + next(400) as i64));
        }
        tensors.push(Tensor { name: format!("t{id}"), moves, keep: vec![] });
        instructions.push(Instruction { name: format!("i{id}"), inputs, outputs: vec![id], rows });
    }
    let requirements = vec![Requirement { tensor: count - 1, any_of: vec![0] }];
    Problem { version: 1, tensors, instructions, requirements, ties: vec![] }
}
