//! Solves a problem file, a synthetic transformer of the given depth or `denseN,SEED`, and prints what happened.
#![allow(missing_docs, clippy::print_stdout, clippy::print_stderr)]

#[path = "../tests/support/transformer.rs"]
#[allow(dead_code)]
mod transformer;

#[path = "../tests/support/random.rs"]
#[allow(dead_code)]
mod random;

use hetspmd_search::{Limits, Problem, Progress, solve};

fn main() {
    for argument in std::env::args().skip(1) {
        let problem: Problem = match argument.parse() {
            Ok(layers) => transformer::transformer(transformer::Config::base(layers)),
            Err(_) if argument.starts_with("dense") => {
                let n: Vec<u64> = argument[5..].split(',').map(|n| n.parse().unwrap()).collect();
                random::dense(n[0] as usize, n[1])
            }
            Err(_) if argument.contains(',') => {
                let f: Vec<f64> = argument.split(',').map(|n| n.parse().unwrap()).collect();
                let n: Vec<u64> = f.iter().map(|&n| n as u64).collect();
                transformer::transformer(transformer::Config {
                    layers: n[0] as usize,
                    batch: n[1],
                    sequence: n[2],
                    hidden: n[3],
                    heads: n[4],
                    vocabulary: n[5],
                    byte: f[6],
                    latency: f[7],
                    noise: f[8],
                })
            }
            Err(_) => serde_json::from_str(&std::fs::read_to_string(&argument).unwrap()).unwrap(),
        };
        let mut tick = |p: &Progress| {
            eprintln!("{:7.3}s bound {} cost {:?}", p.seconds, p.lower_bound, p.cost);
            true
        };
        let solution = solve(&problem, Limits::default(), None, &mut tick).unwrap();
        println!(
            "{argument}: {} instructions, {} variables, {} -> {} values, {:?} cost {:?} bound {} gap {:.2e}, {} sweeps, {} expansions, {:.3} s",
            problem.instructions.len(),
            solution.variables,
            solution.values,
            solution.values_after_reduction,
            solution.stop_reason,
            solution.cost,
            solution.lower_bound,
            solution.gap,
            solution.sweeps,
            solution.expansions,
            solution.seconds
        );
    }
}
