"""The list of slow tests names tests that there are, and the quick run has what it is said to have."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def test_what_is_listed_exists() -> None:
    listed = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    assert listed == sorted(set(listed))
    functions: dict[str, set[str]] = {}
    for line in listed:
        file, _, name = line.partition("::")
        if file not in functions:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            functions[file] = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert name.partition("[")[0].rpartition("::")[2] in functions[file], line


def _skip_if_in_part(request: pytest.FixtureRequest) -> None:
    """Where single tests are asked for, a file has more cases than were collected, and nothing can be said."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("files are collected in part")


def test_every_listed_case_exists(request: pytest.FixtureRequest) -> None:
    """In the files that this run has collected, so in all of them where the whole suite runs."""
    _skip_if_in_part(request)
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    collected = request.config.stash[conftest.COLLECTED]
    files = {test.partition("::")[0] for test in collected}
    listed = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    assert [t for t in listed if t.partition("::")[0] in files and t not in collected] == []


def test_what_is_thinned_exists_and_has_slow_cases(request: pytest.FixtureRequest) -> None:
    """In the files that this run has collected; a run takes some case of each function, and not all."""
    _skip_if_in_part(request)
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    collected = request.config.stash[conftest.COLLECTED]
    lines = (ROOT / "tests" / "thinned.txt").read_text(encoding="utf-8").splitlines()
    functions = [line.partition(" ")[2] for line in lines]
    assert functions == sorted(set(functions))
    cases = Counter(test.partition("[")[0] for test in collected)
    files = {test.partition("::")[0] for test in collected}
    for function, every in conftest.THINNED.items():
        if function.partition("::")[0] in files:
            assert cases[function] >= every > 1, function


def test_the_first_of_so_many_cases_stays(pytestconfig: pytest.Config) -> None:
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    function, every = next(iter(conftest.THINNED.items()))

    class Case:
        def __init__(self, nodeid: str, slow: bool) -> None:
            self.nodeid, self.slow = nodeid, slow

        def get_closest_marker(self, name: str) -> object:
            return pytest.mark.slow if self.slow and name == "slow" else None

    slow = [Case(f"{function}[{k}]", True) for k in range(2 * every + 1)]
    quick, other = Case(f"{function}[quick]", False), Case("tests/other.py::test_other[x]", True)
    left_out = conftest.thinned([quick, *slow, other])
    assert left_out == [case for k, case in enumerate(slow) if k % every]


def test_what_becomes_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CONTRIBUTING.md and conftest.py say it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from slow_tests import slow

    seconds = {
        "a[quick]": 0.9,
        "a[slow]": 0.95,
        "b[least]": 3.9,
        "b[more]": 4.1,
        "c": 3.9,
        "d": 4.1,
        "e[x]": 7,
        "e[y]": 8,
    }
    cases = "".join(f'<testcase classname="tests.f" name="{n}" time="{s}"/>' for n, s in seconds.items())
    (tmp_path / "junit.xml").write_text(f"<testsuite>{cases}</testsuite>")
    found = {test.partition("::")[2] for test in slow(tmp_path / "junit.xml")}
    assert found == {"a[slow]", "b[more]", "d", "e[x]", "e[y]"}
