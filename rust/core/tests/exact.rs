//! The search against exhaustive search on thousands of small random problems.
#![allow(missing_docs)]

mod support;

use hetspmd_search::brute::brute_force;
use hetspmd_search::build::build;
use hetspmd_search::compact::compact;
use hetspmd_search::consistency::arc_consistency;
use hetspmd_search::dominance::reduce;
use hetspmd_search::model::{HALF, Model};
use hetspmd_search::order::small_frontier_order;
use hetspmd_search::trws::Sweeper;
use hetspmd_search::validate::validate;
use hetspmd_search::verify::verify;
use hetspmd_search::{Assignment, Limits, Problem, StopReason};
use proptest::prelude::*;
use support::random::problems;
use support::{solve, solve_with};

/// The least cost of a model by trying everything.
fn minimum(model: &Model) -> Option<i64> {
    let mut least = None;
    let mut values = vec![0; model.vars.len()];
    loop {
        let cost = model.evaluate(&values);
        if cost < HALF && least.is_none_or(|least| cost < least) {
            least = Some(cost);
        }
        let next = (0..values.len()).find(|&place| values[place] + 1 < model.vars[place].theta.len());
        let Some(place) = next else { return least };
        values[place] += 1;
        values[..place].fill(0);
    }
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn scaled(problem: &Problem) -> (Option<i64>, u32, i64) {
    let checked = validate(problem).expect("well formed");
    let shift = build(&checked).expect("small").shift;
    (brute_force(problem).map(|(cost, _)| cost << shift), shift, checked.total_cost << shift)
}

proptest! {
    #![proptest_config(config(4000))]

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
                let program = Assignment { rows: solution.rows, moves: solution.moves };
                prop_assert_eq!(verify(&problem, &program), Ok(cost));
            }
        }
    }
}

proptest! {
    #![proptest_config(config(600))]

    #[test]
    fn the_model_has_the_cost_of_the_problem(problem in problems(4)) {
        let checked = validate(&problem).unwrap();
        let built = build(&checked).unwrap();
        prop_assert_eq!(minimum(&built.model), scaled(&problem).0);
    }

    #[test]
    fn reductions_and_compaction_preserve_the_optimum(problem in problems(4)) {
        let (least, _, _) = scaled(&problem);
        let mut model = build(&validate(&problem).unwrap()).unwrap().model;
        if reduce(&mut model).is_err() {
            prop_assert_eq!(least, None);
            return Ok(());
        }
        prop_assert_eq!(minimum(&model), least);
        let order = small_frontier_order(&model);
        prop_assert_eq!(minimum(&compact(&model, &order)), least);
    }

    #[test]
    fn every_sweep_bounds_and_reparametrises(problem in problems(4)) {
        let (least, _, worst) = scaled(&problem);
        let mut model = build(&validate(&problem).unwrap()).unwrap().model;
        let mut sweeper = Sweeper::default();
        for sweep in 0..6 {
            let before = model.constant;
            if sweeper.sweep(&mut model, least.unwrap_or(worst)).is_err() {
                prop_assert_eq!(least, None);
                break;
            }
            prop_assert!(before <= model.constant);
            prop_assert!(least.is_none_or(|least| model.constant <= least));
            prop_assert_eq!(minimum(&model), least);
            if sweep == 2 {
                for var in 0..model.vars.len() {
                    model.refresh(var, |_| {});
                }
                let count = model.vars.len();
                if arc_consistency(&mut model, 0..count, |_| {}).is_err() || reduce(&mut model).is_err() {
                    prop_assert_eq!(least, None);
                    break;
                }
                let order = small_frontier_order(&model);
                model = compact(&model, &order);
                prop_assert_eq!(minimum(&model), least);
            }
        }
    }

    #[test]
    fn nothing_beats_an_optimal_incumbent(problem in problems(5)) {
        let first = solve(&problem);
        if first.stop_reason == StopReason::Optimal {
            let incumbent = Assignment { rows: first.rows, moves: first.moves };
            let again = solve_with(&problem, Limits::default(), Some(&incumbent));
            prop_assert_eq!(again.cost, first.cost);
            prop_assert_eq!(again.stop_reason, StopReason::Optimal);
            prop_assert_eq!(Assignment { rows: again.rows, moves: again.moves }, incumbent);
        }
    }
}
