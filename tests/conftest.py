"""Settings of all tests: one thread per process, fixed seeds, GPU tests only where there is a GPU.

Beside those that are marked in their files, the tests of ``slow.txt`` are slow: they take a second or more, and
others of the same function, or of the same file, are in the quick run.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("hetspmd", deadline=None, derandomize=True)
settings.load_profile("hetspmd")


SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
