"""Settings of all tests: one thread per process, fixed seeds, GPU tests only where there is a GPU.

Beside those that are marked in their files, the tests of ``slow.txt`` are slow (``scripts/slow_tests.py``): cases
that take more than 0.8 s and are not the quickest of their function, and functions whose quickest case takes more
than 4 s, of which the quick run has no case.

Of the slow cases of a function in ``thinned.txt`` a run takes every second, third, ...; ``--all-cases`` takes all.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

from hetspmd.trace.compat.joint import current_annotations

settings.register_profile("hetspmd", deadline=None, derandomize=True)
settings.load_profile("hetspmd")


SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines())

THINNED = {
    function: int(every)
    for every, function in map(
        str.split, Path(__file__).with_name("thinned.txt").read_text(encoding="utf-8").splitlines()
    )
}
"""Functions of very many slow cases, and of how many of these a run takes one."""

COLLECTED = pytest.StashKey[frozenset[str]]()
"""The node ids of all tests in the files that were asked for, before any is left out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases", action="store_true", help="every case of the functions in tests/thinned.txt"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What there is when tests start, some 600,000 objects, is no garbage, and no test looks for it.

    Without this the collector, and what asks it who holds an object, goes through all of it again and again, which
    took a tenth of the time of all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        importlib.import_module("torch._dynamo")  # what the first optimizer would import
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries count what is left when Python ends


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
    # A case that is asked for by its name is run.
    if not config.getoption("all_cases") and not any("::" in argument for argument in config.args):
        left_out = thinned(items)
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """The slow cases that a run leaves out: of each function in THINNED, all but the first of so many."""
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function not in THINNED or item.get_closest_marker("slow") is None:
            continue
        if seen[function] % THINNED[function]:
            left_out.append(item)
        seen[function] += 1
    return left_out


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _annotates_nothing() -> Iterator[None]:
    """What a trace says of its graph's nodes ends with it: the next one in the process would have it too."""
    yield
    assert not current_annotations(), "a trace has left annotations of nodes"
