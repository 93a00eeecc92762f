//! Problems of real models: `tests/fixtures/problems/NAME.json`, and beside them `optima.json`
//! (`{NAME: picoseconds}`), which two different searches (with and without eliminations and joins) proved.
#![allow(missing_docs)]

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use hetspmd_search::verify::verify;
use hetspmd_search::{Assignment, Problem, StopReason};
use support::solve;

fn read<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/problems"));
    let text = std::fs::read_to_string(folder.join(name)).expect("readable");
    serde_json::from_str(&text).expect("well formed")
}

#[test]
fn the_optimum_of_every_fixture_is_proven() {
    let optima: BTreeMap<String, i64> = read("optima.json");
    assert!(!optima.is_empty());
    for (name, &optimum) in &optima {
        let problem: Problem = read(&format!("{name}.json"));
        let solution = solve(&problem);
        assert_eq!((solution.stop_reason, solution.cost), (StopReason::Optimal, Some(optimum)), "{name}");
        assert_eq!(solution.lower_bound, optimum, "{name}");
        let program = Assignment { rows: solution.rows, moves: solution.moves };
        assert_eq!(verify(&problem, &program), Ok(optimum), "{name}");
        // From its own optimum there is nothing left to find.
        let again = support::solve_with(&problem, hetspmd_search::Limits::default(), Some(&program));
        assert_eq!((again.stop_reason, again.cost), (StopReason::Optimal, Some(optimum)), "{name}");
    }
}
