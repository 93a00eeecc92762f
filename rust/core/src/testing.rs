//! Tiny models for unit tests.

use crate::control::{Limits, Monitor, Tick};
use crate::eliminate::Trail;
use crate::model::{DEAD, Edge, HALF, Model, Var};

/// A model from the costs of its values and, per edge, the two variables and the table `[x][y]`
/// (`-1`: incompatible). Every value is its own class.
pub fn model(theta: &[&[i64]], edges: &[(usize, usize, &[&[i64]])]) -> Model {
    let var = |(origin, theta): (usize, &&[i64])| Var {
        origin: origin as u32,
        labels: (0..theta.len() as u32).collect(),
        theta: theta.to_vec(),
        settled: None,
    };
    let mut model = Model { vars: theta.iter().enumerate().map(var).collect(), ..Model::default() };
    for &(a, b, table) in edges {
        let sizes = [table.len(), table[0].len()];
        let class = sizes.map(|size| (0..size as u16).collect());
        let cost = |&cost: &i64| if cost < 0 { DEAD } else { cost };
        let table = table.iter().flat_map(|row| row.iter().map(cost)).collect();
        model.edges.push(Edge::new([a as u32, b as u32], class, sizes.map(|size| vec![0; size]), table));
    }
    model.index();
    model
}

/// A ring whose neighbours must differ, three values each: two colours do not suffice if `length` is odd,
/// so the bound of the relaxation is not tight.
pub fn ring(length: usize, cost: i64) -> Model {
    let table: &[&[i64]] = &[&[-1, 0, 0], &[0, -1, 0], &[0, 0, -1]];
    let theta: Vec<[i64; 3]> = (0..length).map(|i| [0, cost, 2 * cost + i as i64]).collect();
    let theta: Vec<&[i64]> = theta.iter().map(|theta| &theta[..]).collect();
    let edges: Vec<_> = (0..length).map(|i| (i, (i + 1) % length, table)).collect();
    model(&theta, &edges)
}

/// The least cost over all living assignments, with one that reaches it.
pub fn minimum(model: &Model) -> Option<(i64, Vec<usize>)> {
    let mut best: Option<(i64, Vec<usize>)> = None;
    let mut values = vec![0; model.vars.len()];
    loop {
        let cost = model.evaluate(&values);
        if cost < HALF && best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((cost, values.clone()));
        }
        let Some(place) = (0..values.len()).find(|&place| values[place] + 1 < model.vars[place].theta.len())
        else {
            return best;
        };
        values[place] += 1;
        values[..place].fill(0);
    }
}

/// The least of all terms that are not dead.
pub fn least_terms(model: &Model) -> i64 {
    let edges = model.edges.iter().map(|edge| {
        let pairs = (0..edge.f[0].len()).flat_map(|a| (0..edge.f[1].len()).map(move |b| (a, b)));
        let living = pairs.filter(|&(a, b)| edge.f[0][a] < HALF && edge.f[1][b] < HALF);
        living.map(|(a, b)| edge.f[0][a] + edge.f[1][b] + edge.cost(0, a, b)).min().unwrap_or(0)
    });
    let unary = model.vars.iter().map(|var| var.theta.iter().copied().min().unwrap_or(0));
    edges.chain(unary).min().unwrap_or(0)
}

/// The optimum and labels that the trail recovers from a model without variables.
pub fn solved(whole: &Model, model: &Model, trail: &Trail) -> (i64, i64) {
    assert!(model.vars.is_empty());
    let mut labels = vec![0; trail.origins()];
    model.labels(&[], &mut labels);
    trail.recover(&mut labels);
    let values: Vec<usize> = labels[..whole.vars.len()].iter().map(|&label| label as usize).collect();
    (model.constant, whole.evaluate(&values))
}

/// Runs `body` with a monitor of the given limits.
pub fn with_monitor<T>(limits: Limits, body: impl FnOnce(&mut Monitor<'_>) -> T) -> T {
    let mut tick = |_: &_| true;
    let tick: &mut Tick<'_> = &mut tick;
    body(&mut Monitor::new(limits, tick))
}
