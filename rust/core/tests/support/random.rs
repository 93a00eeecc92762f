//! Small random problems for comparison with exhaustive search.

use hetspmd_search::problem::{Instruction, Move, Problem, Requirement, Row, Tensor, Tie};
use proptest::prelude::*;

const FORMS: u8 = 4;

type RawRow = (Vec<u8>, Vec<u8>, i64);
type RawInstruction = (Vec<usize>, usize, Vec<RawRow>);

fn form() -> impl Strategy<Value = u8> {
    prop_oneof![2 => Just(0), 1 => Just(1), 3 => 2..FORMS]
}

fn row() -> impl Strategy<Value = RawRow> {
    (prop::collection::vec(form(), 3), prop::collection::vec(form(), 3), 0..30i64)
}

fn instruction() -> impl Strategy<Value = RawInstruction> {
    let inputs = prop::collection::vec(0..100usize, 0..=2);
    let outputs = prop_oneof![1 => Just(0usize), 8 => Just(1), 2 => Just(2)];
    (inputs, outputs, prop::collection::vec(row(), 1..=3))
}

/// Problems with up to `most` instructions; many are feasible, some are not.
pub fn problems(most: usize) -> impl Strategy<Value = Problem> {
    let moves = prop::collection::vec((0..FORMS, 0..FORMS, 0..15i64), 0..=2);
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
    moves: Vec<Vec<(u8, u8, i64)>>,
    requirements: Vec<(usize, Vec<u8>)>,
    ties: Vec<(usize, usize)>,
) -> Problem {
    let mut instructions = Vec::new();
    let mut count = 0;
    for (id, (inputs, outputs, rows)) in raw.into_iter().enumerate() {
        let inputs: Vec<usize> = if count == 0 { vec![] } else { inputs.iter().map(|i| i % count).collect() };
        let row = |(pre, post, cost): RawRow| Row {
            pre: pre[..inputs.len()].to_vec(),
            post: post[..outputs].to_vec(),
            cost,
        };
        let rows = rows.into_iter().map(row).collect();
        let outputs: Vec<usize> = (count..count + outputs).collect();
        count += outputs.len();
        instructions.push(Instruction { name: format!("i{id}"), inputs, outputs, rows });
    }
    let named = |(id, moves): (usize, Vec<(u8, u8, i64)>)| Tensor {
        name: format!("t{id}"),
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
