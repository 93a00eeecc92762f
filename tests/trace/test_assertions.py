"""A forward with an assertion that pytest has rewritten leads to no other test."""

from __future__ import annotations

import torch
from test_clocks import Scaled

from hetspmd.trace.host.discovery import discover
from hetspmd.trace.host.places import Roots
from hetspmd.trace.trace import trace

X = torch.randn(4, 3)


def asserting() -> float:
    assert X.shape[0] == 4, "rewritten by pytest"
    return 1.0


def test_the_machinery_of_tests_is_no_part_of_a_model() -> None:
    roots = Roots(Scaled(asserting), None)
    discover(roots)
    assert not [function for function in roots.functions if "pytest" in function]
    graph = trace(Scaled(asserting), (X,), {})
    assert not [read for read in graph.host.reads if "pytest" in f"{read.root} {read.value}"]
