"""Every case of the corpus: on unlike ranks what one device does, or refused by name."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from harness import CASES, Case, check

HERE = Path(__file__).parent
for path in sorted(HERE.glob("cases_*.py")):
    importlib.import_module(path.stem)


QUICK = 4
"""One case in so many is in the quick run."""


def cases() -> list[object]:
    """All of them; slow are those that are not quick and most of the others."""
    return [
        pytest.param(c, id=name, marks=[pytest.mark.slow] if c.slow or i % QUICK else [])
        for i, (name, c) in enumerate(CASES.items())
    ]


@pytest.mark.parametrize("c", cases())
@pytest.mark.filterwarnings("ignore:None of the inputs have")
@pytest.mark.filterwarnings("ignore::hetspmd.errors.MissingRuleWarning")
def test_foreign(c: Case) -> None:
    check(c)


def test_every_case_names_its_report() -> None:
    assert all(c.report for c in CASES.values())
    assert len(CASES) >= 80, "the corpus grows"
    assert len({c.report for c in CASES.values()}) >= 60
