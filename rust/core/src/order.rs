//! A linear order of the variables with a small frontier.
//!
//! The frontier after a prefix is the set of its variables with a neighbour outside: what a partial
//! program still has live. Greedy: append the candidate (a neighbour of the prefix) that leaves the
//! smallest frontier, `Δ = [x stays open] - #{neighbours that x closes}`; ties go to the lowest index.
//! An instruction and its gradients come out close to each other although they are far apart in
//! execution order. Each connected component starts at a variable of least degree.

use std::collections::BTreeSet;

use crate::model::Model;

/// Sorted distinct neighbours of every variable.
pub fn neighbours(model: &Model) -> Vec<Vec<usize>> {
    let ends = |&(e, side): &(u32, u8)| model.edges[e as usize].ends[1 - side as usize] as usize;
    let sorted = |list: &Vec<(u32, u8)>| {
        let mut list: Vec<usize> = list.iter().map(ends).collect();
        list.sort_unstable();
        list.dedup();
        list
    };
    model.incident.iter().map(sorted).collect()
}

/// The order (a permutation of `0..vars.len()`).
pub fn small_frontier_order(model: &Model) -> Vec<usize> {
    let adjacent = neighbours(model);
    let count = adjacent.len();
    let mut open: Vec<usize> = adjacent.iter().map(Vec::len).collect();
    let mut placed = vec![false; count];
    // Candidates by (Δ, index); `delta` says under which Δ a candidate is filed.
    let mut candidates: BTreeSet<(i64, usize)> = BTreeSet::new();
    let mut delta: Vec<Option<i64>> = vec![None; count];
    let mut starts: Vec<usize> = (0..count).collect();
    starts.sort_by_key(|&var| (adjacent[var].len(), var));
    let mut starts = starts.into_iter();
    let mut order = Vec::with_capacity(count);
    while order.len() < count {
        let chosen = candidates.pop_first().map(|(_, var)| var);
        let Some(var) = chosen.or_else(|| starts.by_ref().find(|&var| !placed[var])) else { break };
        placed[var] = true;
        order.push(var);
        let mut changed = Vec::new();
        for &other in &adjacent[var] {
            open[other] -= 1;
            if !placed[other] {
                changed.push(other);
            } else if open[other] == 1 {
                changed.extend(adjacent[other].iter().copied().filter(|&last| !placed[last]));
            }
        }
        for other in changed {
            let closed = adjacent[other].iter().filter(|&&end| placed[end] && open[end] == 1).count();
            let new = i64::from(open[other] > 0) - closed as i64;
            if let Some(old) = delta[other].replace(new) {
                candidates.remove(&(old, other));
            }
            candidates.insert((new, other));
        }
    }
    order
}

/// Connected components, each in ascending order, by their first variable.
pub fn components(model: &Model) -> Vec<Vec<usize>> {
    let adjacent = neighbours(model);
    let mut seen = vec![false; adjacent.len()];
    let mut found = Vec::new();
    for root in 0..adjacent.len() {
        if seen[root] {
            continue;
        }
        seen[root] = true;
        let (mut component, mut stack) = (Vec::new(), vec![root]);
        while let Some(var) = stack.pop() {
            component.push(var);
            for &other in &adjacent[var] {
                if !seen[other] {
                    seen[other] = true;
                    stack.push(other);
                }
            }
        }
        component.sort_unstable();
        found.push(component);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{model, ring};

    #[test]
    fn a_ring_is_walked_with_two_open_ends() {
        let ring = ring(8, 1);
        let order = small_frontier_order(&ring);
        let adjacent = neighbours(&ring);
        for cut in 1..8 {
            let inside = &order[..cut];
            let open =
                inside.iter().filter(|&&var| adjacent[var].iter().any(|other| !inside.contains(other)));
            assert!(open.count() <= 2);
        }
    }

    #[test]
    fn components_are_found_and_all_variables_ordered() {
        let table: &[&[i64]] = &[&[0, 0], &[0, 0]];
        let two = model(&[&[0, 0], &[0, 0], &[0, 0], &[0, 0], &[0, 0]], &[(0, 3, table), (1, 4, table)]);
        assert_eq!(components(&two), [vec![0, 3], vec![1, 4], vec![2]]);
        let mut order = small_frontier_order(&two);
        order.sort_unstable();
        assert_eq!(order, [0, 1, 2, 3, 4]);
    }
}
