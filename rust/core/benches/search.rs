//! `cargo bench`: the stages of the search (preparation, sweeps, reductions, elimination, joins, beam, A*) and the
//! whole of it, first and again at other costs: on synthetic transformers, random dense problems, and the problem
//! files in `tests/fixtures/problems`.
#![allow(missing_docs)]

#[path = "../tests/support/random.rs"]
#[allow(dead_code)]
mod random;
#[path = "../tests/support/transformer.rs"]
#[allow(dead_code)]
mod transformer;

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use hetspmd_search::build::build;
use hetspmd_search::compact::reordered;
use hetspmd_search::control::{Limits, Monitor};
use hetspmd_search::dominance::reduce;
use hetspmd_search::eliminate::{Trail, eliminate};
use hetspmd_search::join::contract;
use hetspmd_search::messages::Messages;
use hetspmd_search::model::Model;
use hetspmd_search::trws::Sweeper;
use hetspmd_search::validate::validate;
use hetspmd_search::{Asked, Assignment, Problem, Searcher, Solution, astar, beam, solve};
use transformer::{Config, transformer};

const NO_LIMIT: i64 = 1 << 56;
const LAYERS: usize = 12;

fn built(problem: &Problem) -> Model {
    build(&validate(problem).expect("well formed")).expect("small").priced(problem)
}

fn ordered(model: &Model) -> Model {
    reordered(model.clone())
}

fn swept(mut model: Model, sweeps: usize) -> Model {
    let mut sweeper = Sweeper::new(&model);
    for _ in 0..sweeps {
        sweeper.sweep(NO_LIMIT, || true).expect("feasible");
    }
    sweeper.store(&mut model);
    model
}

fn preparation(c: &mut Criterion) {
    let problem = transformer(Config::base(LAYERS));
    let mut group = c.benchmark_group("preparation");
    group.bench_function("validate", |b| b.iter(|| validate(black_box(&problem)).is_ok()));
    group.bench_function("build", |b| b.iter(|| built(black_box(&problem))));
    let model = built(&problem);
    group.bench_function("order and compact", |b| b.iter(|| ordered(&model)));
    group.bench_function("whole", |b| {
        b.iter_batched(|| problem.clone(), |problem| Searcher::new(problem).is_ok(), BatchSize::LargeInput);
    });
    group.finish();
}

/// As in a search: sweeps over the whole model, then reductions, elimination, sweeps over the rest, joins.
fn stages(c: &mut Criterion) {
    let mut group = c.benchmark_group("stages");
    let whole = ordered(&built(&transformer(Config::base(LAYERS))));
    group.bench_function("sweep, whole model", |b| {
        let mut sweeper = Sweeper::new(&whole);
        b.iter(|| sweeper.sweep(NO_LIMIT, || true));
    });
    let ready = swept(whole.clone(), 8);
    let messages = Messages::of(&ready, 0);
    group.bench_function("load messages", |b| {
        b.iter_batched(|| whole.clone(), |mut model| messages.load(&mut model, 0), BatchSize::LargeInput);
    });
    group.bench_function("reduce", |b| {
        b.iter_batched(|| ready.clone(), |mut model| reduce(&mut model), BatchSize::LargeInput);
    });
    let mut rest = ready;
    reduce(&mut rest).expect("feasible");
    let rest = ordered(&rest);
    group.bench_function("eliminate", |b| {
        let both = || (rest.clone(), Trail::new(whole.vars.len()));
        let run = |(mut model, mut trail): (Model, Trail)| eliminate(&mut model, &mut trail, 1024);
        b.iter_batched(both, run, BatchSize::LargeInput);
    });
    group.bench_function("sweep, reduced model", |b| {
        let mut sweeper = Sweeper::new(&rest);
        b.iter(|| sweeper.sweep(NO_LIMIT, || true));
    });
    group.bench_function("one round of joins", |b| {
        let both = || (rest.clone(), Trail::new(whole.vars.len()));
        let run =
            |(mut model, mut trail): (Model, Trail)| contract(&mut model, &mut trail, NO_LIMIT, 256, || true);
        b.iter_batched(both, run, BatchSize::LargeInput);
    });
    group.finish();
}

fn partial_programs(c: &mut Criterion) {
    let mut group = c.benchmark_group("partial programs");
    let mut dense = built(&random::dense(30, 7));
    reduce(&mut dense).expect("feasible");
    let dense = swept(ordered(&dense), 100);
    let mut tick = |_: &_| true;
    let mut monitor = Monitor::new(
        Limits { time: 1e9, expansions: u64::MAX, memory: u64::MAX, sweeps: u64::MAX },
        &mut tick,
    );
    group.bench_function("beam 100, dense 30", |b| {
        b.iter(|| beam::beam(&dense, NO_LIMIT, 100, &mut monitor));
    });
    group.bench_function("A* 10,000 expansions, dense 30", |b| {
        b.iter(|| astar::search(&dense, NO_LIMIT, 10_000, &mut monitor));
    });
    group.finish();
}

/// Synthetic transformers and the fixtures, by name.
fn problems() -> Vec<(String, Problem)> {
    let mut found: Vec<(String, Problem)> =
        [2, 12, 32].map(|layers| (format!("{layers} layers"), transformer(Config::base(layers)))).into();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/problems");
    let mut files: Vec<_> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path()).collect();
    files.sort();
    for path in files.iter().filter(|path| path.file_name().is_some_and(|name| name != "optima.json")) {
        let text = std::fs::read_to_string(path).expect("readable");
        let name = path.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        found.push((name, serde_json::from_str(&text).expect("a problem")));
    }
    found
}

/// The costs of a problem: of rows, moves and holding.
type Costs = [Vec<i64>; 3];

/// Costs that differ from the problem's by up to three parts in a hundred, as those at other ratios do.
fn nearby(problem: &Problem, mut seed: u64) -> Costs {
    let mut noise = |cost: i64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        cost + cost * (seed % 31) as i64 / 1000
    };
    [
        problem.instructions.iter().flat_map(|i| &i.rows).map(|row| noise(row.cost)).collect(),
        problem.tensors.iter().flat_map(|t| &t.moves).map(|mv| noise(mv.3)).collect(),
        problem.tensors.iter().flat_map(|t| &t.keep).map(|keep| noise(keep.1)).collect(),
    ]
}

fn search(searcher: &mut Searcher, costs: &Costs, before: Option<&Assignment>) -> Solution {
    searcher.set_costs(&costs[0], &costs[1], &costs[2]).expect("as many as there are");
    searcher
        .solve(Limits::default(), Asked { incumbent: before, ..Asked::default() }, &mut |_| true)
        .expect("well formed")
}

fn whole(c: &mut Criterion) {
    let problems = problems();
    let mut group = c.benchmark_group("first search");
    group.sample_size(10);
    for (name, problem) in &problems {
        group.bench_function(name, |b| {
            b.iter(|| {
                let mut tick = |_: &_| true;
                solve(problem, Limits::default(), None, &mut tick)
            });
        });
    }
    group.finish();
    let mut group = c.benchmark_group("warm search");
    group.sample_size(10);
    for (name, problem) in &problems {
        let mut searcher = Searcher::new(problem.clone()).expect("well formed");
        let costs: Vec<Costs> = (1..=4).map(|seed| nearby(problem, seed)).collect();
        let first = search(&mut searcher, &costs[0], None);
        let mut before = Assignment { rows: first.rows, moves: first.moves };
        let mut turn = 0;
        group.bench_function(name, |b| {
            b.iter(|| {
                turn += 1;
                let found = search(&mut searcher, &costs[turn % costs.len()], Some(&before));
                before = Assignment { rows: found.rows, moves: found.moves };
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3));
    targets = preparation, stages, partial_programs, whole
}
criterion_main!(benches);
