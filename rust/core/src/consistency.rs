//! Arc consistency: a value without a compatible living value at the other end of some edge belongs
//! to no solution and is removed, until nothing changes (AC-3 on classes). Exact: no solution is lost.

use crate::model::{HALF, Model, Wipeout};

/// Makes `model` arc consistent, starting from the variables in `queue` (all: `0..vars.len()`).
/// Calls `killed` for each variable that loses values.
///
/// # Errors
/// The variable that lost its last value.
pub fn arc_consistency(
    model: &mut Model,
    queue: impl IntoIterator<Item = usize>,
    mut killed: impl FnMut(usize),
) -> Result<(), Wipeout> {
    let mut waiting = vec![false; model.vars.len()];
    let mut queue: Vec<usize> = queue.into_iter().collect();
    for &var in &queue {
        waiting[var] = true;
        if model.vars[var].living().next().is_none() {
            return Err(Wipeout { var, edge: None });
        }
    }
    while let Some(var) = queue.pop() {
        waiting[var] = false;
        for position in 0..model.incident[var].len() {
            let (e, side) = model.incident[var][position];
            let (e, other) = (e as usize, 1 - side as usize);
            let edge = &mut model.edges[e];
            let end = edge.ends[other] as usize;
            let [first, second] = &mut edge.f;
            let (own, others) = if side == 0 { (&*first, second) } else { (&*second, first) };
            let mut lost = false;
            for (message, costs) in others.iter_mut().zip(edge.w[other].chunks_exact(own.len())) {
                let supported = || own.iter().zip(costs).any(|(&own, &cost)| own < HALF && cost < HALF);
                if *message < HALF && !supported() {
                    *message = crate::model::DEAD;
                    lost = true;
                }
            }
            if !lost {
                continue;
            }
            let mut alive = false;
            for (theta, &class) in model.vars[end].theta.iter_mut().zip(&edge.class[other]) {
                if edge.f[other][class as usize] >= HALF {
                    *theta = crate::model::DEAD;
                }
                alive |= *theta < HALF;
            }
            killed(end);
            if !alive {
                return Err(Wipeout { var: end, edge: Some(e) });
            }
            model.refresh(end, |_| {});
            if !waiting[end] {
                waiting[end] = true;
                queue.push(end);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::model;

    const EQUAL: &[&[i64]] = &[&[0, -1], &[-1, 0]];

    #[test]
    fn removal_travels_along_a_chain() {
        let mut chain = model(&[&[0, 0], &[0, 0], &[0, 0]], &[(0, 1, EQUAL), (1, 2, EQUAL)]);
        chain.kill(0, 1);
        chain.refresh(0, |_| {});
        let mut killed = Vec::new();
        arc_consistency(&mut chain, 0..3, |var| killed.push(var)).unwrap();
        assert_eq!(killed, [1, 2]);
        assert_eq!(chain.living_values(), 3);
    }

    #[test]
    fn a_wipeout_names_the_edge() {
        let mut chain = model(&[&[0, 0], &[0, 0]], &[(0, 1, EQUAL)]);
        chain.kill(0, 1);
        chain.kill(1, 0);
        chain.refresh(0, |_| {});
        chain.refresh(1, |_| {});
        assert!(arc_consistency(&mut chain, 0..2, |_| {}).is_err_and(|wipeout| wipeout.edge == Some(0)));
    }
}
