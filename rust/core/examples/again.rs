//! Solves a problem file several times at slightly other costs and prints seconds of each search.
#![allow(missing_docs, clippy::print_stdout)]

use hetspmd_search::{Asked, Assignment, Limits, Problem, Searcher};

fn main() {
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).unwrap();
        let problem: Problem = serde_json::from_str(&text).unwrap();
        let start = std::time::Instant::now();
        let mut searcher = Searcher::new(problem.clone()).unwrap();
        let prepared = start.elapsed().as_secs_f64();
        println!("{path}: prepared in {prepared:.3} s");
        let mut before: Option<Assignment> = None;
        for round in 0..4u64 {
            let mut seed = 88_172_645_463_325_252u64 + round;
            let mut noise = |cost: i64| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                cost + (cost as f64 * (seed % 1000) as f64 * 3e-5 * round.min(1) as f64) as i64
            };
            let rows: Vec<i64> =
                problem.instructions.iter().flat_map(|i| &i.rows).map(|row| noise(row.cost)).collect();
            let moves: Vec<i64> =
                problem.tensors.iter().flat_map(|t| &t.moves).map(|mv| noise(mv.3)).collect();
            let keep: Vec<i64> =
                problem.tensors.iter().flat_map(|t| &t.keep).map(|keep| noise(keep.1)).collect();
            searcher.set_costs(&rows, &moves, &keep).unwrap();
            let found = searcher
                .solve(
                    Limits::default(),
                    Asked { incumbent: before.as_ref(), ..Asked::default() },
                    &mut |_| true,
                )
                .unwrap();
            println!(
                "  round {round}: {:?} cost {:?} gap {:.1e}, {} sweeps, {:.3} s",
                found.stop_reason, found.cost, found.gap, found.sweeps, found.seconds
            );
            before = Some(Assignment { rows: found.rows, moves: found.moves });
        }
    }
}
