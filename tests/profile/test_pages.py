"""Samples whose memory has settled."""

from __future__ import annotations

import mmap
import sys
from dataclasses import replace
from itertools import count
from time import perf_counter

import pytest
import torch

from hetspmd.profile import ops
from hetspmd.profile.pages import Sample, page_faults, settled, settling
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.single import SingleCalls

PAGE = mmap.PAGESIZE
PAGES = 20_000


def test_samples_with_the_fewest_faults_count() -> None:
    faulting, free = Sample(5.0, 200_000), Sample(1.0, 0)
    assert settled([faulting, free, Sample(1.1, 3)]) == [1.0, 1.1]
    assert settled([Sample(5.0, 200_000), Sample(4.9, 201_000)]) == [5.0, 4.9], (
        "each call has them: they are its own"
    )
    assert settled([faulting], fewest=0) == []
    assert settled([]) == []


def test_one_more_sample_while_memory_settles() -> None:
    assert settling([Sample(5.0, 200_000)])
    assert settling([Sample(5.0, 200_000), Sample(3.0, 100_000)])
    assert not settling([Sample(5.0, 200_000), Sample(5.0, 200_000)])
    assert not settling([Sample(1.0, 3)])


@pytest.mark.skipif(sys.platform == "win32", reason="nobody counts page faults there")
def test_a_call_whose_memory_moved_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call touches new pages, the others the same as before: what the others take is measured."""
    torch.set_num_threads(1)
    same = mmap.mmap(-1, PAGES * PAGE)
    moved = []
    calls = count()

    def call() -> None:
        place = same
        if next(calls) == 1:
            place = mmap.mmap(-1, PAGES * PAGE)
            moved.append(place)
        for page in range(PAGES):
            place[page * PAGE] = 1

    monkeypatch.setattr(ops, "THRESHOLDS", replace(THRESHOLDS, sample_seconds=0.0))
    samples = ops._samples(torch.device("cpu"), call, SingleCalls(), perf_counter(), 0.05)
    assert samples[0].faults > PAGES / 2, "the system gave it one page at a time, or nearly"
    assert len(samples) == 2
    assert samples[1].faults < PAGES / 10
    assert ops._point([samples])[0] == samples[1].seconds
    assert ops._point([samples[:1], samples[1:], samples[:1]])[0] == samples[1].seconds


@pytest.mark.skipif(sys.platform == "win32", reason="nobody counts page faults there")
def test_a_call_that_needs_new_pages_each_time_is_measured_with_them() -> None:
    torch.set_num_threads(1)

    def call() -> None:
        with mmap.mmap(-1, PAGES * PAGE) as place:
            for page in range(PAGES):
                place[page * PAGE] = 1

    before = page_faults()
    samples = ops._samples(torch.device("cpu"), call, SingleCalls(), perf_counter(), 0.05)
    assert page_faults() - before > PAGES
    assert len(samples) == 2
    assert len(settled(samples)) == 2
