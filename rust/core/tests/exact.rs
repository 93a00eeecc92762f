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
use hetspmd_search::problem::{Instruction, Row, Tensor};
use hetspmd_search::trws::sweep;
use hetspmd_search::validate::validate;
use hetspmd_search::verify::verify;
use hetspmd_search::{Asked, Assignment, Limits, Problem, StopReason};
use proptest::prelude::*;
use support::random::problems;
use support::{set_costs, solve, solve_with};

use hetspmd_search::Searcher;

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

/// The problem in which rows that are not allowed can never run.
fn forbid(problem: &Problem, allowed: Option<&[bool]>) -> Problem {
    let mut problem = problem.clone();
    let Some(allowed) = allowed else { return problem };
    let nowhere = problem.tensors.len();
    let mut allowed = allowed.iter();
    for instruction in &mut problem.instructions {
        let forbidden: Vec<bool> = allowed.by_ref().take(instruction.rows.len()).map(|a| !a).collect();
        if forbidden.contains(&true) {
            // It reads a tensor that never is in the form that those rows want.
            instruction.inputs.push(nowhere);
            for (row, forbidden) in instruction.rows.iter_mut().zip(forbidden) {
                row.pre.push(if forbidden { 9 } else { 8 });
            }
        }
    }
    problem.tensors.push(Tensor { name: "nowhere".into(), ..Tensor::default() });
    problem.instructions.insert(
        0,
        Instruction {
            name: "nowhere".into(),
            inputs: vec![],
            outputs: vec![nowhere],
            rows: vec![Row { post: vec![8], ..Row::default() }],
        },
    );
    problem
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
    #![proptest_config(config(10_000))]

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
        prop_assert_eq!(minimum(&built.priced(&problem)), scaled(&problem).0);
    }

    #[test]
    fn reductions_and_compaction_preserve_the_optimum(problem in problems(4)) {
        let (least, _, _) = scaled(&problem);
        let mut model = build(&validate(&problem).unwrap()).unwrap().priced(&problem);
        if reduce(&mut model).is_err() {
            prop_assert_eq!(least, None);
            return Ok(());
        }
        prop_assert_eq!(minimum(&model), least);
        let order = small_frontier_order(&model);
        prop_assert_eq!(minimum(&compact(model.clone(), &order)), least);
    }

    #[test]
    fn every_sweep_bounds_and_reparametrises(problem in problems(4)) {
        let (least, _, worst) = scaled(&problem);
        let mut model = build(&validate(&problem).unwrap()).unwrap().priced(&problem);
        for round in 0..6 {
            let before = model.constant;
            if sweep(&mut model, least.unwrap_or(worst), || true).is_err() {
                prop_assert_eq!(least, None);
                break;
            }
            prop_assert!(before <= model.constant);
            prop_assert!(least.is_none_or(|least| model.constant <= least));
            prop_assert_eq!(minimum(&model), least);
            if round == 2 {
                for var in 0..model.vars.len() {
                    model.refresh(var, |_| {});
                }
                let count = model.vars.len();
                if arc_consistency(&mut model, 0..count, |_| {}).is_err() || reduce(&mut model).is_err() {
                    prop_assert_eq!(least, None);
                    break;
                }
                let order = small_frontier_order(&model);
                model = compact(model, &order);
                prop_assert_eq!(minimum(&model), least);
            }
        }
    }

    #[test]
    fn limits_leave_a_bound_and_a_program(problem in problems(5), expansions in 0..40u64, hurry in any::<bool>()) {
        let least = brute_force(&problem).map(|(cost, _)| cost);
        let time = if hurry { 0.0 } else { 1e9 };
        let solution = solve_with(&problem, Limits { time, expansions, memory: 1 << 30, ..Limits::default() }, None);
        prop_assert!(least.is_none_or(|least| solution.lower_bound <= least));
        prop_assert!(solution.cost.is_none() || solution.cost >= least);
        prop_assert_eq!(solution.stop_reason == StopReason::Optimal, solution.cost == Some(solution.lower_bound));
    }

    #[test]
    fn a_searcher_at_changing_costs_equals_exhaustive_search(
        problem in problems(4),
        rounds in prop::collection::vec((prop::collection::vec(0..30i64, 40), any::<u64>(), any::<bool>()), 1..5),
    ) {
        let mut searcher = Searcher::new(problem).unwrap();
        let mut before: Option<Assignment> = None;
        for (costs, mask, large) in rounds {
            // Other scales of costs too.
            let next = costs.iter().cycle().map(|cost| if large { (cost << 20) + 7 * cost } else { *cost });
            let rows = set_costs(&mut searcher, next);
            let present = searcher.problem().clone();
            // A half of the rows, or an eighth.
            let few = if mask % 4 == 0 { mask & mask.rotate_left(7) & mask.rotate_left(23) } else { mask };
            let allowed: Vec<bool> = (0..rows).map(|row| few >> (row % 64) & 1 == 1).collect();
            let allowed = Some(&allowed[..]).filter(|_| mask % 2 == 0);
            let expected = brute_force(&forbid(&present, allowed));
            let mut tick = |_: &_| true;
            let usable = before.clone().filter(|program| allowed.is_none_or(|allowed| {
                let mut offset = 0;
                present.instructions.iter().zip(&program.rows).all(|(instruction, &row)| {
                    offset += instruction.rows.len();
                    allowed[offset - instruction.rows.len() + row]
                })
            }));
            let found = searcher.solve(Limits::default(), Asked { incumbent: usable.as_ref(), allowed, ..Asked::default() }, &mut tick).unwrap();
            match expected {
                None => {
                    prop_assert_eq!(found.stop_reason, StopReason::Infeasible);
                    prop_assert!(found.conflict.is_some_and(|why| !why.is_empty()));
                }
                Some((cost, _)) => {
                    prop_assert_eq!((found.stop_reason, found.cost), (StopReason::Optimal, Some(cost)));
                    let program = Assignment { rows: found.rows, moves: found.moves };
                    prop_assert_eq!(verify(&present, &program), Ok(cost));
                    before = Some(program);
                }
            }
        }
    }

    #[test]
    fn with_a_tolerance_nothing_is_better_by_more(
        problem in problems(4),
        rounds in prop::collection::vec((prop::collection::vec(0..30i64, 40), 0..40i64, any::<bool>()), 1..5),
    ) {
        let mut searcher = Searcher::new(problem).unwrap();
        let mut before: Option<Assignment> = None;
        for (costs, tolerance, large) in rounds {
            let next = costs.iter().cycle().map(|cost| if large { (cost << 20) + 7 * cost } else { *cost });
            let tolerance = if large { tolerance << 20 } else { tolerance };
            set_costs(&mut searcher, next);
            let present = searcher.problem().clone();
            let Some((least, _)) = brute_force(&present) else { break };
            let mut tick = |_: &_| true;
            let asked = Asked { incumbent: before.as_ref(), tolerance, ..Asked::default() };
            let found = searcher.solve(Limits::default(), asked, &mut tick).unwrap();
            let cost = found.cost.unwrap();
            prop_assert!(cost <= least + tolerance);
            prop_assert!(found.lower_bound <= least && cost - found.lower_bound <= tolerance);
            let met = cost == found.lower_bound;
            prop_assert_eq!(found.stop_reason, if met { StopReason::Optimal } else { StopReason::Tolerance });
            let program = Assignment { rows: found.rows, moves: found.moves };
            prop_assert_eq!(verify(&present, &program), Ok(cost));
            before = Some(program);
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
