//! Dominated values (dead-end elimination, Goldstein 1994, on edges).
//!
//! Value `v` of `s` goes if another living value `u` satisfies
//!
//! `θ(u) - θ(v) + Σ_e max_b [ (f + w)_e(u, b) - (f + w)_e(v, b) ] <= 0`,
//!
//! `b` over the classes at the other end that are compatible with `v`. For hard edges this says: `u`
//! costs no more and is compatible with whatever `v` is compatible with. Proof: take an optimal
//! assignment with `x_s = v`; each neighbour's class is compatible with `v`, so replacing `v` by `u`
//! changes the cost by at most the left side. Equal values dominate each other; values are examined
//! from the last to the first and `u` must be alive at that moment, so the first one stays.
//!
//! The left side does not change as messages move between `θ_s` and `f_es`, and with fewer values of `s` no other
//! one is dominated: a variable without dominated values ([`Var::settled`]) has none until a class dies at the other
//! end of an edge, or an edge is replaced, and need not be examined again.

use crate::consistency::arc_consistency;
#[cfg(doc)]
use crate::model::Var;
use crate::model::{HALF, Model, Wipeout};

/// Variables with more values, or whose classes take more steps to compare, are left alone.
const MOST_VALUES: usize = 256;
const MOST_WORK: usize = 1 << 18;

/// Alternates arc consistency and dominance to their common fixpoint.
///
/// # Errors
/// The variable that lost its last value (arc consistency only; dominance always leaves one).
pub fn reduce(model: &mut Model) -> Result<(), Wipeout> {
    let count = model.vars.len();
    arc_consistency(model, 0..count, |_| {})?;
    reduce_consistent(model)
}

/// [`reduce`] of a model that is arc consistent.
///
/// # Errors
/// As [`reduce`].
pub fn reduce_consistent(model: &mut Model) -> Result<(), Wipeout> {
    let count = model.vars.len();
    let unsettled = |s: usize| model.vars[s].settled != Some(model.facing(s));
    let mut waiting: Vec<bool> = (0..count).map(unsettled).collect();
    debug_assert!(
        (0..count).all(|s| waiting[s] || dominated(model, s).is_some_and(|values| values.is_empty()))
    );
    let mut left_alone = vec![false; count];
    let mut queue: Vec<usize> = (0..count).collect();
    let mut changed = Vec::new();
    let mut first = true;
    while !queue.is_empty() {
        let mut next = Vec::new();
        for var in queue {
            if !std::mem::take(&mut waiting[var]) {
                continue;
            }
            let removed = dominated(model, var);
            left_alone[var] = removed.is_none();
            let removed = removed.unwrap_or_default();
            if removed.is_empty() {
                continue;
            }
            for v in removed {
                model.kill(var, v);
            }
            changed.clear();
            changed.push(var);
            model.refresh(var, |_| {});
            arc_consistency(model, [var], |other| changed.push(other))?;
            for &changed in &changed {
                for &(e, side) in &model.incident[changed] {
                    let end = model.edges[e as usize].ends[1 - side as usize] as usize;
                    let comes = std::mem::replace(&mut waiting[end], true) || first && end > var;
                    if !comes {
                        next.push(end);
                    }
                }
            }
        }
        next.sort_unstable();
        queue = next;
        first = false;
    }
    for (var, left_alone) in left_alone.into_iter().enumerate() {
        model.vars[var].settled = (!left_alone).then(|| model.facing(var));
    }
    Ok(())
}

/// The dominated values of `var`; `None` if it is left alone.
fn dominated(model: &Model, var: usize) -> Option<Vec<usize>> {
    let living: Vec<usize> = model.vars[var].living().collect();
    let work = |&(e, side): &(u32, u8)| {
        let (edge, side) = (&model.edges[e as usize], side as usize);
        edge.w[0].len() * edge.f[side].len()
    };
    if living.len() < 2 {
        return Some(Vec::new());
    }
    if living.len() > MOST_VALUES || model.incident[var].iter().map(work).sum::<usize>() > MOST_WORK {
        return None;
    }
    // Per edge: the class of each living value and the worst difference for each pair of classes.
    let edges: Vec<(&[u16], usize, Vec<i64>)> = model.incident[var]
        .iter()
        .map(|&(e, side)| {
            let (edge, side) = (&model.edges[e as usize], side as usize);
            (&edge.class[side][..], edge.f[side].len(), differences(model, e as usize, side))
        })
        .collect();
    let theta = &model.vars[var].theta;
    let worse = |u: usize, v: usize| {
        let mut difference = theta[u] - theta[v];
        for (class, count, table) in &edges {
            let worst = table[class[u] as usize * count + class[v] as usize];
            if worst >= HALF {
                return false;
            }
            difference += worst;
        }
        difference <= 0
    };
    let mut alive = vec![true; theta.len()];
    let mut removed = Vec::new();
    for &v in living.iter().rev() {
        if living.iter().any(|&u| u != v && alive[u] && worse(u, v)) {
            alive[v] = false;
            removed.push(v);
        }
    }
    Some(removed)
}

/// `max_b [(f + w)(u, b) - (f + w)(v, b)]` for every pair of own classes, over living `b` compatible
/// with `v`; [`HALF`] where `v`'s partner is incompatible with `u`.
fn differences(model: &Model, e: usize, side: usize) -> Vec<i64> {
    let edge = &model.edges[e];
    let (own, other) = (edge.f[side].len(), edge.f[1 - side].len());
    let mut table = vec![0; own * own];
    for u in 0..own {
        for v in 0..own {
            if u == v || edge.f[side][u] >= HALF || edge.f[side][v] >= HALF {
                continue;
            }
            let mut most = -HALF;
            for b in 0..other {
                let with_v = edge.cost(side, v, b);
                if edge.f[1 - side][b] < HALF && with_v < HALF {
                    let with_u = edge.cost(side, u, b);
                    most = most.max(if with_u >= HALF { HALF } else { with_u - with_v });
                }
            }
            table[u * own + v] = if most == HALF { HALF } else { most + edge.f[side][u] - edge.f[side][v] };
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compact::compact;
    use crate::testing::{minimum, model, ring};

    #[test]
    fn a_dearer_value_with_fewer_friends_goes() {
        let mut pair = model(&[&[3, 4, 1], &[0, 9]], &[(0, 1, &[&[0, 0], &[0, -1], &[-1, 0]])]);
        reduce(&mut pair).unwrap();
        // Value 1 costs more than value 0 and fits less; value 2 is cheaper, so it stays.
        assert_eq!(pair.vars[0].living().collect::<Vec<_>>(), [0, 2]);
        assert_eq!(pair.vars[1].living().collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn of_equal_values_the_first_stays() {
        let mut single = model(&[&[2, 2, 2]], &[]);
        reduce(&mut single).unwrap();
        assert_eq!(single.vars[0].living().collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn a_settled_variable_is_examined_again_when_a_class_faces_it_no_more() {
        let table: &[&[i64]] = &[&[0, 5], &[5, 0]];
        let mut pair = model(&[&[3, 2], &[0, 0]], &[(0, 1, table)]);
        reduce(&mut pair).unwrap();
        assert_eq!(pair.living_values(), 4);
        assert_eq!(pair.vars[0].settled, Some(2));
        pair = compact(pair, &[1, 0]);
        assert_eq!(pair.vars[1].settled, Some(2));
        pair.kill(0, 1);
        pair.refresh(0, |_| {});
        let mut dropped = compact(pair.clone(), &[0, 1]);
        reduce(&mut pair).unwrap();
        assert_eq!(pair.vars[1].living().collect::<Vec<_>>(), [0]);
        reduce(&mut dropped).unwrap();
        assert_eq!(dropped.living_values(), 1);
    }

    #[test]
    fn the_optimum_survives() {
        let whole = ring(5, 7);
        let mut reduced = whole.clone();
        reduce(&mut reduced).unwrap();
        assert_eq!(minimum(&whole).map(|(cost, _)| cost), minimum(&reduced).map(|(cost, _)| cost));
    }
}
