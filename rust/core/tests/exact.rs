//! The search against exhaustive search on thousands of small random problems.
#![allow(missing_docs)]

mod support;

use hetspmd_search::StopReason;
use hetspmd_search::brute::brute_force;
use hetspmd_search::verify::verify;
use proptest::prelude::*;
use support::random::problems;
use support::solve;

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_exhaustive_search(problem in problems(5)) {
        let solution = solve(&problem);
        match brute_force(&problem) {
            None => {
                prop_assert_eq!(solution.stop_reason, StopReason::Infeasible);
                prop_assert!(solution.conflict.is_some());
                prop_assert!(solution.rows.is_empty());
            }
            Some((cost, _)) => {
                prop_assert_eq!(solution.stop_reason, StopReason::Optimal);
                prop_assert_eq!(solution.cost, Some(cost));
                prop_assert_eq!(solution.lower_bound, cost);
                let program = hetspmd_search::Assignment { rows: solution.rows, moves: solution.moves };
                prop_assert_eq!(verify(&problem, &program), Ok(cost));
            }
        }
    }
}
