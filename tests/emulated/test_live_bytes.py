"""The counter of live bytes against what can be counted by hand."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from emulated.child import environment
from emulated.launch import KEEP_MEMORY
from emulated.memory import LiveBytes, ResidentPeak


def test_storages_are_counted_once_and_until_they_die() -> None:
    with LiveBytes() as counter:
        a = torch.zeros(1000)
        view = a[10:20].view(2, 5)
        assert counter.current == 4000
        del a
        assert counter.current == 4000
        b = view + 1
        assert counter.current == 4040
        del view
        assert counter.current == 40
        assert counter.peak == 4040
        counter.reset_peak()
        assert counter.peak == 40
    del b
    assert counter.current == 0


def test_resized_storages() -> None:
    resize = torch.UntypedStorage.resize_
    with LiveBytes() as counter:
        a = torch.zeros(100)
        a.untyped_storage().resize_(0)
        assert counter.current == 0
        a.untyped_storage().resize_(800)
        assert counter.current == 800
    assert torch.UntypedStorage.resize_ is resize


def test_a_training_step_of_a_linear_layer() -> None:
    """Weight, momentum and gradient, the input and the loss live on; at the peak little else does."""
    rows, n, m = 16, 128, 64
    with LiveBytes() as counter:
        layer = nn.Linear(n, m, bias=False)
        x = torch.randn(rows, n)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = layer(x).sum()
            loss.backward()
            optimizer.step()
        weight = 4 * n * m
        assert counter.current == 3 * weight + 4 * rows * n + 4
        counter.reset_peak()
        optimizer.zero_grad()
        assert counter.current == 2 * weight + 4 * rows * n + 4
        layer(x).sum().backward()
        assert 0 <= counter.peak - (3 * weight + 4 * rows * n) <= 64


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc/self/clear_refs")
def test_the_resident_peak_sees_what_was_freed_again() -> None:
    assert sys.platform == "linux"
    resident = ResidentPeak()
    size = 64 << 20
    block = torch.ones(size // 4)
    del block
    assert 0.9 * size < resident.peak < 1.5 * size
    resident.reset()
    assert resident.peak < 0.5 * size


HOLES = """
from emulated.child import environment
from emulated.launch import KEEP_MEMORY
from emulated.memory import _status, give_back
size = 64 << 20
blocks = [bytearray(b"1" * size) for _ in range(3)]
del blocks[:2]
held = _status("VmRSS")
give_back(0.0)
print(held - _status("VmRSS"))
give_back(2.0)
print(held - _status("VmRSS"))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's heap")
def test_a_heap_gives_its_holes_back_where_little_is_available() -> None:
    """Processes that keep what they have freed, as the workers of an emulated cluster do."""
    done = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True,
        env={**environment(), **KEEP_MEMORY},
    )  # fmt: skip
    kept, given = map(int, done.stdout.split())
    assert kept < 16 << 20, "all of the machine's memory is enough"
    assert given >= 2 * 60 << 20
