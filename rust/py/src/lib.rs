//! Python surface of the search: JSON text in, JSON text out.
//!
//! The GIL is released while the search runs. Twenty times a second the searching thread takes it to
//! let pending signals raise (Ctrl-C) and to call `progress`.

use std::sync::Mutex;

use hetspmd_search::problem::Problem;
use hetspmd_search::{Assignment, Limits, Progress, solve as search};
use pyo3::exceptions::PyValueError;
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
    let parsed: Problem = parse(problem, "problem")?;
    let incumbent: Option<Assignment> = incumbent.map(|text| parse(text, "incumbent")).transpose()?;
    if time_limit.is_nan() {
        return Err(PyValueError::new_err("time_limit is not a number"));
    }
    let limits = Limits { time: time_limit, expansions: max_expansions, memory: memory_limit };
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let outcome = py.detach(|| {
        let mut tick = |state: &Progress| {
            let outcome = Python::attach(|py| {
                py.check_signals()?;
                if let Some(progress) = &progress {
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
        search(&parsed, limits, incumbent.as_ref(), &mut tick)
    });
    if let Ok(Some(error)) = raised.into_inner() {
        return Err(error);
    }
    let solution = outcome.map_err(|error| PyValueError::new_err(error.to_string()))?;
    serde_json::to_string(&solution).map_err(|error| PyValueError::new_err(error.to_string()))
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
    module.add_function(wrap_pyfunction!(solve, module)?)?;
    module.add_function(wrap_pyfunction!(version, module)?)
}
