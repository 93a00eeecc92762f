//! Problems whose optimum is known in closed form.
#![allow(missing_docs)]

mod support;

use hetspmd_search::problem::{Instruction, Move, Problem, Requirement, Row, Tensor, Tie};
use hetspmd_search::{Solution, StopReason};
use support::solve;

const IDENTITY: u8 = 0;
const REDUCE: u8 = 1;
const GATHER0: u8 = 2;
const GATHER1: u8 = 3;

/// Data that every device may hold.
const WHOLE: &[u8] = &[IDENTITY, GATHER0, GATHER1];
/// Compute of a sharded and of a replicated matrix product.
const SHARDED: i64 = 10;
const REPLICATED: i64 = 40;

/// One training step of `y = w2 (w1 x)`, loss = sum: joint graph of a two-layer perceptron.
struct Mlp {
    problem: Problem,
}

impl Mlp {
    fn tensor(&mut self, name: &str, all_reduce: i64, gather: i64) -> usize {
        let mut moves = vec![Move(REDUCE, IDENTITY, "all_reduce".into(), all_reduce)];
        for form in [GATHER0, GATHER1] {
            moves.push(Move(form, IDENTITY, "all_gather".into(), gather));
            moves.push(Move(REDUCE, form, "reduce_scatter".into(), all_reduce / 2));
        }
        self.problem.tensors.push(Tensor { name: name.into(), moves, keep: vec![] });
        self.problem.tensors.len() - 1
    }

    fn source(&mut self, name: &str, forms: &[u8], tensor: usize) {
        let rows =
            forms.iter().map(|&form| Row { pre: vec![], post: vec![form], ..Row::default() }).collect();
        let outputs = vec![tensor];
        self.problem.instructions.push(Instruction { name: name.into(), inputs: vec![], outputs, rows });
    }

    fn op(&mut self, name: &str, inputs: &[usize], output: usize, rows: &[(&[u8], u8, i64)]) {
        let row = |&(pre, post, cost): &(&[u8], u8, i64)| Row {
            pre: pre.to_vec(),
            post: vec![post],
            cost,
            direct: false,
        };
        let rows = rows.iter().map(row).collect();
        let (inputs, outputs) = (inputs.to_vec(), vec![output]);
        self.problem.instructions.push(Instruction { name: name.into(), inputs, outputs, rows });
    }

    /// `weight` and `activation`: cost to all-reduce (twice the cost to gather) such a tensor; `data`: the
    /// forms in which x and the seed gradient dy may be held.
    fn step(weight: i64, activation: i64, data: &[u8]) -> Problem {
        let empty =
            Problem { version: 1, tensors: vec![], instructions: vec![], requirements: vec![], ties: vec![] };
        let mut g = Self { problem: empty };
        let act = |g: &mut Self, name: &str| g.tensor(name, activation, activation / 2);
        let par = |g: &mut Self, name: &str| g.tensor(name, weight, weight / 2);
        // x: [b, i]; w1: [i, h]; w2: [h, o]; h = x w1; y = h w2; loss = sum y.
        let x = act(&mut g, "x");
        g.source("x", data, x);
        let (w1, w2) = (par(&mut g, "w1"), par(&mut g, "w2"));
        g.source("w1", &[IDENTITY, GATHER0, GATHER1], w1);
        g.source("w2", &[IDENTITY, GATHER0, GATHER1], w2);
        // [m, k] [k, n] -> [m, n]
        let mm: &[(&[u8], u8, i64)] = &[
            (&[IDENTITY, IDENTITY], IDENTITY, REPLICATED),
            (&[GATHER0, IDENTITY], GATHER0, SHARDED),
            (&[IDENTITY, GATHER1], GATHER1, SHARDED),
            (&[GATHER1, GATHER0], REDUCE, SHARDED),
        ];
        let h = act(&mut g, "h");
        g.op("h", &[x, w1], h, mm);
        let y = act(&mut g, "y");
        g.op("y", &[h, w2], y, mm);
        let loss = g.tensor("loss", 0, 0);
        g.op(
            "loss",
            &[y],
            loss,
            &[(&[IDENTITY], IDENTITY, 0), (&[GATHER0], REDUCE, 0), (&[GATHER1], REDUCE, 0)],
        );
        let dy = act(&mut g, "dy");
        g.source("dy", data, dy);
        // dw2 = h^T dy, dw1 = x^T dh: [b, m], [b, n] -> [m, n]; dh = dy w2^T: [b, o], [h, o] -> [b, h].
        let outer: &[(&[u8], u8, i64)] = &[
            (&[IDENTITY, IDENTITY], IDENTITY, REPLICATED),
            (&[GATHER1, IDENTITY], GATHER0, SHARDED),
            (&[IDENTITY, GATHER1], GATHER1, SHARDED),
            (&[GATHER0, GATHER0], REDUCE, SHARDED),
        ];
        let dw2 = par(&mut g, "dw2");
        g.op("dw2", &[h, dy], dw2, outer);
        let dh = act(&mut g, "dh");
        let transposed: &[(&[u8], u8, i64)] = &[
            (&[IDENTITY, IDENTITY], IDENTITY, REPLICATED),
            (&[GATHER0, IDENTITY], GATHER0, SHARDED),
            (&[IDENTITY, GATHER0], GATHER1, SHARDED),
            (&[GATHER1, GATHER1], REDUCE, SHARDED),
        ];
        g.op("dh", &[dy, w2], dh, transposed);
        let dw1 = par(&mut g, "dw1");
        g.op("dw1", &[x, dh], dw1, outer);
        g.problem.requirements = vec![Requirement { tensor: loss, any_of: vec![IDENTITY, REDUCE] }];
        g.problem.ties = vec![Tie { parameter: w1, gradient: dw1 }, Tie { parameter: w2, gradient: dw2 }];
        g.problem
    }
}

fn kinds(problem: &Problem, solution: &Solution) -> Vec<String> {
    let moved = problem.tensors.iter().zip(&solution.moves).filter(|&(_, &index)| index >= 0);
    moved.map(|(tensor, &index)| format!("{} {}", tensor.moves[index as usize].2, tensor.name)).collect()
}

#[test]
fn data_parallel_with_dear_activations() {
    // 5 sharded products; each gradient is all-reduced, or the weight is stored sharded and gathered (the
    // same price here).
    let problem = Mlp::step(8, 1000, &[GATHER0]);
    let solution = solve(&problem);
    assert_eq!(solution.stop_reason, StopReason::Optimal);
    assert_eq!(solution.cost, Some(5 * SHARDED + 2 * 8));
    let kinds = kinds(&problem, &solution);
    assert!(kinds.iter().all(|kind| kind.contains('w')), "{kinds:?}");
}

#[test]
fn whole_data_saves_a_gradient_scatter() {
    // As above, but dy is on every device: dh comes out by columns from the stored rows of w2, and dw1 by
    // columns from it, in the form in which w1 is stored; w1 is gathered once and nothing is reduced.
    let solution = solve(&Mlp::step(8, 1000, WHOLE));
    assert_eq!(solution.cost, Some(5 * SHARDED + 8 + 4));
}

#[test]
fn tensor_parallel_with_dear_weights() {
    // Megatron: w1 by columns, w2 by rows, dy whole: h, dw2, dh, dw1 need nothing; y is a summand that the
    // linear loss would take, but this loss has no such row, so it is scattered: one reduce-scatter.
    let problem = Mlp::step(1000, 8, WHOLE);
    let solution = solve(&problem);
    assert_eq!(solution.cost, Some(5 * SHARDED + 4));
    assert_eq!(kinds(&problem, &solution), ["reduce_scatter y"]);
}

#[test]
fn no_communication_when_it_is_dear() {
    // The best program without moves, by exhaustion.
    let problem = Mlp::step(100_000, 100_000, WHOLE);
    let solution = solve(&problem);
    assert_eq!(solution.stop_reason, StopReason::Optimal);
    assert!(kinds(&problem, &solution).is_empty());
    let brute = hetspmd_search::brute::brute_force(&Problem {
        tensors: problem.tensors.iter().map(|t| Tensor { moves: vec![], ..t.clone() }).collect(),
        ..problem.clone()
    });
    assert_eq!(solution.cost, brute.map(|(cost, _)| cost));
}
