//! `cargo bench`: sweeps, reductions, beam and A*, and the whole search, on synthetic transformers (and
//! on the problem files in `tests/fixtures/problems`, where there are any).
#![allow(missing_docs)]

#[path = "../tests/support/random.rs"]
#[allow(dead_code)]
mod random;
#[path = "../tests/support/transformer.rs"]
#[allow(dead_code)]
mod transformer;

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use hetspmd_search::build::build;
use hetspmd_search::compact::compact;
use hetspmd_search::control::{Limits, Monitor};
use hetspmd_search::dominance::reduce;
use hetspmd_search::eliminate::{Trail, eliminate};
use hetspmd_search::join::contract;
use hetspmd_search::model::Model;
use hetspmd_search::order::small_frontier_order;
use hetspmd_search::trws::Sweeper;
use hetspmd_search::validate::validate;
use hetspmd_search::{Problem, astar, beam, solve};
use transformer::{Config, transformer};

const NO_LIMIT: i64 = 1 << 56;

fn built(problem: &Problem) -> Model {
    build(&validate(problem).expect("well formed")).expect("small").priced(problem)
}

fn reduced(problem: &Problem) -> Model {
    let mut model = built(problem);
    reduce(&mut model).expect("feasible");
    compact(&model, &small_frontier_order(&model))
}

fn parts(c: &mut Criterion) {
    let problem = transformer(Config::base(12));
    c.bench_function("build/12 layers", |b| b.iter(|| built(black_box(&problem))));
    let model = built(&problem);
    c.bench_function("reduce/12 layers", |b| {
        b.iter_batched(|| model.clone(), |mut model| reduce(&mut model), BatchSize::LargeInput);
    });
    c.bench_function("order and compact/12 layers", |b| {
        b.iter(|| compact(&model, &small_frontier_order(&model)));
    });
    let model = reduced(&problem);
    c.bench_function("sweep/12 layers", |b| {
        let (mut model, mut sweeper) = (model.clone(), Sweeper::default());
        b.iter(|| sweeper.sweep(&mut model, NO_LIMIT, || true));
    });
    c.bench_function("eliminate/12 layers", |b| {
        let both = || (model.clone(), Trail::new(model.vars.len()));
        let run = |(mut model, mut trail): (Model, Trail)| eliminate(&mut model, &mut trail, 1024);
        b.iter_batched(both, run, BatchSize::LargeInput);
    });
    c.bench_function("one round of joins/12 layers", |b| {
        let both = || (model.clone(), Trail::new(model.vars.len()));
        let run =
            |(mut model, mut trail): (Model, Trail)| contract(&mut model, &mut trail, NO_LIMIT, 256, || true);
        b.iter_batched(both, run, BatchSize::LargeInput);
    });
    let mut dense = reduced(&random::dense(30, 7));
    let mut sweeper = Sweeper::default();
    for _ in 0..100 {
        sweeper.sweep(&mut dense, NO_LIMIT, || true).expect("feasible");
    }
    let mut tick = |_: &_| true;
    let mut monitor = Monitor::new(Limits { time: 1e9, expansions: u64::MAX, memory: u64::MAX }, &mut tick);
    c.bench_function("beam 100/dense 30", |b| b.iter(|| beam::beam(&dense, NO_LIMIT, 100, &mut monitor)));
    c.bench_function("A* 10,000 expansions/dense 30", |b| {
        b.iter(|| astar::search(&dense, NO_LIMIT, 10_000, &mut monitor));
    });
}

fn whole(c: &mut Criterion) {
    let mut group = c.benchmark_group("solve");
    group.sample_size(10);
    let mut problems: Vec<(String, Problem)> =
        [2, 12, 32].map(|layers| (format!("{layers} layers"), transformer(Config::base(layers)))).into();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/problems");
    let mut files: Vec<_> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|f| f.path()).collect();
    files.sort();
    for path in files.iter().filter(|path| path.file_name().is_some_and(|name| name != "optima.json")) {
        let text = std::fs::read_to_string(path).expect("readable");
        problems.push((path.display().to_string(), serde_json::from_str(&text).expect("a problem")));
    }
    for (name, problem) in &problems {
        group.bench_function(name, |b| {
            b.iter(|| {
                let mut tick = |_: &_| true;
                solve(problem, Limits::default(), None, &mut tick)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, parts, whole);
criterion_main!(benches);
