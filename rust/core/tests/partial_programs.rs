//! A*, beam search, dives, eliminations and joins on random pairwise models, before and after sweeps.
#![allow(missing_docs)]

use hetspmd_search::astar::{self, Outcome};
use hetspmd_search::beam::beam;
use hetspmd_search::compact::{compact, reordered};
use hetspmd_search::control::{Limits, Monitor};
use hetspmd_search::dive::dive;
use hetspmd_search::dominance::reduce;
use hetspmd_search::eliminate::{Trail, eliminate};
use hetspmd_search::join::contract;
use hetspmd_search::model::{DEAD, Edge, HALF, Model, Var};
use hetspmd_search::trws::sweep;
use proptest::prelude::*;

const VALUES: usize = 3;

/// Every pair of `count` variables may have an edge; negative costs are incompatible.
fn models(count: usize) -> impl Strategy<Value = Model> {
    let theta = prop::collection::vec(prop::collection::vec(0..2000i64, VALUES), count);
    let table = prop::collection::vec(-400..1500i64, VALUES * VALUES);
    let edge = (0..count, 1..count, table);
    (theta, prop::collection::vec(edge, 0..2 * count)).prop_map(move |(theta, edges)| {
        let var = |(origin, theta): (usize, Vec<i64>)| Var {
            origin: origin as u32,
            labels: (0..VALUES as u32).collect(),
            theta,
            settled: None,
        };
        let mut model = Model { vars: theta.into_iter().enumerate().map(var).collect(), ..Model::default() };
        for (a, step, table) in edges {
            let class = || (0..VALUES as u16).collect::<Vec<u16>>();
            let table = table.into_iter().map(|cost| if cost < 0 { DEAD } else { cost }).collect();
            let ends = [a as u32, ((a + step) % count) as u32];
            model.edges.push(Edge::new(ends, [class(), class()], [vec![0; VALUES], vec![0; VALUES]], table));
        }
        model.index();
        model
    })
}

fn minimum(model: &Model) -> Option<i64> {
    let total = VALUES.pow(model.vars.len() as u32);
    let costs = (0..total).map(|code| {
        let mut rest = code;
        let digit = |_| {
            let digit = rest % VALUES;
            rest /= VALUES;
            digit
        };
        model.evaluate(&(0..model.vars.len()).map(digit).collect::<Vec<_>>())
    });
    costs.min().filter(|&cost| cost < HALF)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn exact_searches_agree_with_exhaustive_search(model in models(6), sweeps in 0..4usize, width in 1..40usize) {
        let least = minimum(&model);
        let top = 1 << 40;
        let mut model = reordered(model);
        if (0..sweeps).any(|_| sweep(&mut model, top, || true).is_err()) {
            prop_assert_eq!(least, None);
            return Ok(());
        }
        let mut tick = |_: &_| true;
        let mut monitor = Monitor::new(Limits::default(), &mut tick);
        match astar::search(&model, top, u64::MAX, &mut monitor) {
            Outcome::Solved(values, cost) => {
                prop_assert_eq!(Some(model.constant + cost), least);
                prop_assert_eq!(Some(model.evaluate(&values)), least);
            }
            other => {
                prop_assert_eq!(other, Outcome::Exhausted);
                prop_assert_eq!(least, None);
            }
        }
        let found = beam(&model, top, width, &mut monitor).unwrap();
        if let Some(least) = least {
            prop_assert!(model.constant <= least);
            prop_assert!(found.bound <= least - model.constant);
        }
        if let Some((values, cost)) = &found.best {
            prop_assert_eq!(model.evaluate(values), model.constant + cost);
        }
        if found.is_exact() {
            prop_assert_eq!(found.best.map(|(_, cost)| model.constant + cost), least);
        }
        let dived = dive(&model, u64::MAX, false, || Ok::<(), ()>(())).unwrap();
        prop_assert_eq!(dived.is_some(), least.is_some());
        if let Some(values) = dived {
            prop_assert!(Some(model.evaluate(&values)) >= least);
        }
    }

    #[test]
    fn eliminations_and_joins_preserve_the_optimum_and_recover_it(
        whole in models(7), sweeps in 0..3usize, most in 2..40usize, tight in any::<bool>()
    ) {
        let least = minimum(&whole);
        // With no room to spare only optimal programs survive a join.
        let limit = least.filter(|_| tight).unwrap_or(1 << 40);
        let mut model = whole.clone();
        if reduce(&mut model).is_err() {
            prop_assert_eq!(least, None);
            return Ok(());
        }
        model = reordered(model);
        let mut trail = Trail::new(whole.vars.len());
        for _ in 0..40 {
            let Ok(keep) = eliminate(&mut model, &mut trail, most) else {
                prop_assert_eq!(least, None);
                return Ok(());
            };
            model = compact(model, &keep);
            prop_assert!(least.is_none_or(|least| model.constant <= least));
            if reduce(&mut model).is_err() {
                prop_assert_eq!(least, None);
                return Ok(());
            }
            model = reordered(model);
            if model.vars.is_empty() {
                break;
            }
            let swept = (0..sweeps).try_for_each(|_| sweep(&mut model, limit, || true).map(|_| ()));
            for var in 0..model.vars.len() {
                model.refresh(var, |_| {});
            }
            if swept.is_err() || reduce(&mut model).is_err() {
                prop_assert_eq!(least, None);
                return Ok(());
            }
            model = reordered(model);
            let room = limit - model.constant;
            match contract(&mut model, &mut trail, room, 1 << 14, || true) {
                Ok(Some(keep)) => model = compact(model, &keep),
                Ok(None) => {}
                Err(_) => {
                    prop_assert_eq!(least, None);
                    return Ok(());
                }
            }
        }
        prop_assert!(model.vars.is_empty());
        prop_assert_eq!(Some(model.constant).filter(|&cost| cost < HALF), least);
        if least.is_some() {
            let mut labels = vec![0; trail.origins()];
            model.labels(&[], &mut labels);
            trail.recover(&mut labels);
            let values: Vec<usize> = labels[..whole.vars.len()].iter().map(|&label| label as usize).collect();
            prop_assert_eq!(Some(whole.evaluate(&values)), least);
        }
    }
}
