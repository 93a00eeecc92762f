//! Python surface of the search: JSON text in, JSON text out; costs as arrays.
//!
//! The GIL is released while the search runs. Twenty times a second the searching thread takes it to
//! let pending signals raise (Ctrl-C) and to call `progress`.

use std::sync::{Mutex, MutexGuard};

use hetspmd_search::problem::Problem;
use hetspmd_search::{Asked, Assignment, Limits, Progress, Solution};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Finds the SPMD program of least cost; see `_core.pyi`.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // Python hands over owned objects.
#[pyo3(signature = (problem, *, time_limit, max_expansions, memory_limit, incumbent=None, progress=None))]
fn solve(
    py: Python<'_>,
    problem: &str,
    time_limit: f64,
    max_expansions: u64,
    memory_limit: u64,
    incumbent: Option<&str>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let mut searcher = hetspmd_search::Searcher::new(parse(problem, "problem")?).map_err(malformed)?;
    let incumbent: Option<Assignment> = incumbent.map(|text| parse(text, "incumbent")).transpose()?;
    let limits = limits(time_limit, max_expansions, memory_limit, None)?;
    let asked = Asked { incumbent: incumbent.as_ref(), ..Asked::default() };
    text(&run(py, &mut searcher, limits, asked, progress.as_ref())?)
}

/// A problem that is searched again and again at other costs; see `_core.pyi`.
#[pyclass(module = "hetspmd._core", frozen)]
struct Searcher(Mutex<hetspmd_search::Searcher>);

#[pymethods]
impl Searcher {
    #[new]
    fn new(py: Python<'_>, problem: &str) -> PyResult<Self> {
        let problem: Problem = parse(problem, "problem")?;
        let searcher = py.detach(|| hetspmd_search::Searcher::new(problem)).map_err(malformed)?;
        Ok(Self(Mutex::new(searcher)))
    }

    /// Replaces all costs.
    fn set_costs(&self, rows: &[u8], moves: &[u8], keep: &[u8]) -> PyResult<()> {
        let [rows, moves, keep] = [rows, moves, keep].map(integers);
        self.lock()?.set_costs(&rows?, &moves?, &keep?).map_err(malformed)
    }

    /// Prepares searches among the programs in which instructions are alike: for each the one that it is like.
    fn fold(&self, py: Python<'_>, alike: &[u8]) -> PyResult<()> {
        let groups: Vec<usize> =
            integers(alike)?.into_iter().map(|id| usize::try_from(id).unwrap_or(usize::MAX)).collect();
        let searcher = &mut *self.lock()?;
        py.detach(|| searcher.fold(&groups)).map_err(malformed)
    }

    /// Finds a program of least cost.
    #[allow(clippy::needless_pass_by_value)] // Python hands over owned objects.
    #[allow(clippy::too_many_arguments)] // Keywords.
    #[pyo3(signature = (*, time_limit, max_expansions, memory_limit, max_sweeps=None, incumbent=None, allowed=None, folded=false, tolerance=0, progress=None))]
    fn solve(
        &self,
        py: Python<'_>,
        time_limit: f64,
        max_expansions: u64,
        memory_limit: u64,
        max_sweeps: Option<u64>,
        incumbent: Option<&str>,
        allowed: Option<&[u8]>,
        folded: bool,
        tolerance: i64,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let incumbent: Option<Assignment> = incumbent.map(|text| parse(text, "incumbent")).transpose()?;
        let limits = limits(time_limit, max_expansions, memory_limit, max_sweeps)?;
        let allowed: Option<Vec<bool>> = allowed.map(|bytes| bytes.iter().map(|&byte| byte != 0).collect());
        let mut searcher = self.lock()?;
        let asked = Asked { incumbent: incumbent.as_ref(), allowed: allowed.as_deref(), folded, tolerance };
        text(&run(py, &mut searcher, limits, asked, progress.as_ref())?)
    }

    /// The problem text at the present costs.
    fn problem(&self) -> PyResult<String> {
        text(self.lock()?.problem())
    }
}

impl Searcher {
    fn lock(&self) -> PyResult<MutexGuard<'_, hetspmd_search::Searcher>> {
        self.0.try_lock().map_err(|_| PyRuntimeError::new_err("this Searcher is searching already"))
    }
}

fn run(
    py: Python<'_>,
    searcher: &mut hetspmd_search::Searcher,
    limits: Limits,
    asked: Asked<'_>,
    progress: Option<&Py<PyAny>>,
) -> PyResult<Solution> {
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let outcome = py.detach(|| {
        let mut tick = |state: &Progress| {
            let outcome = Python::attach(|py| {
                py.check_signals()?;
                if let Some(progress) = progress {
                    progress.call1(py, (state.seconds, state.lower_bound, state.cost))?;
                }
                Ok(())
            });
            let Err(error) = outcome else { return true };
            if let Ok(mut raised) = raised.lock() {
                *raised = Some(error);
            }
            false
        };
        searcher.solve(limits, asked, &mut tick)
    });
    if let Ok(Some(error)) = raised.into_inner() {
        return Err(error);
    }
    outcome.map_err(malformed)
}

fn limits(time: f64, expansions: u64, memory: u64, sweeps: Option<u64>) -> PyResult<Limits> {
    if time.is_nan() {
        return Err(PyValueError::new_err("time_limit is not a number"));
    }
    Ok(Limits { time, expansions, memory, sweeps: sweeps.unwrap_or(u64::MAX) })
}

fn integers(bytes: &[u8]) -> PyResult<Vec<i64>> {
    if !bytes.len().is_multiple_of(8) {
        return Err(PyValueError::new_err(format!("{} bytes are no 64-bit integers", bytes.len())));
    }
    let word = |word: &[u8]| word.iter().rev().fold(0, |number, &byte| number << 8 | i64::from(byte));
    Ok(bytes.chunks_exact(8).map(word).collect())
}

#[allow(clippy::needless_pass_by_value)] // The signature of `map_err`.
fn malformed(error: hetspmd_search::ProblemError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn text(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| PyValueError::new_err(error.to_string()))
}

fn parse<'a, T: serde::Deserialize<'a>>(text: &'a str, what: &str) -> PyResult<T> {
    serde_json::from_str(text).map_err(|error| PyValueError::new_err(format!("{what}: {error}")))
}

/// Version of the search core.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Searcher>()?;
    module.add_function(wrap_pyfunction!(solve, module)?)?;
    module.add_function(wrap_pyfunction!(version, module)?)
}
