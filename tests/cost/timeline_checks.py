"""What holds of every timeline."""

from __future__ import annotations

import itertools

import pytest

from hetspmd.cost.simulator import TwoStreams
from hetspmd.cost.timeline import Timeline
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Program
from hetspmd.rules.theory import Theory
from scheduled import order_of

CLOSE = {"rel": 1e-9, "abs": 1e-15}


def scheduled(theory: Theory, made: Program) -> Program:
    """The steps that are run, in the order in which they are."""
    order = order_of(theory, made)
    return Program((*order.forward, *order.backward), made.loss, made.outputs, made.gradients, made.buffers)


def check(found: Timeline, streams: TwoStreams, lengths: Lengths) -> None:
    """Its events add up to its totals, no stream does two things at once, and it is as long as its longest rank."""
    n = len(found.devices)
    events = found.events
    issuing = streams.run(streams.model.shares(lengths)).issuing
    spent = dict(zip(found.active, issuing, strict=True))
    for name, want in (
        ("compute", tuple(s - spent.get(r, 0.0) for r, s in enumerate(found.compute_seconds))),
        ("waiting", found.waiting_seconds),
        ("communication", tuple(found.communication_seconds * (r in found.active) for r in range(n))),
    ):
        for rank in found.active:
            total = sum(e.end - e.start for e in events if e.device == rank and e.stream == name)
            assert total == pytest.approx(want[rank], **CLOSE), (name, rank)
    for rank in found.active:
        ends = found.compute_seconds[rank] + found.exposed_seconds[rank] + sum(found.waits_for[rank])
        assert found.end_seconds[rank] == pytest.approx(ends, **CLOSE)
        assert found.waits_for[rank][rank] == pytest.approx(0, **CLOSE)
        busy = sorted((e.start, e.end) for e in events if e.device == rank and e.stream != "communication")
        assert all(a[1] <= b[0] + 1e-9 * found.step_seconds for a, b in itertools.pairwise(busy))
    waited = sum(t.waited for t in found.transfers)
    assert sum(found.waiting_seconds) == pytest.approx(waited, **CLOSE)
    assert all(t.issued <= t.ready <= t.start <= t.end for t in found.transfers)
    assert all(a.end <= b.start for a, b in itertools.pairwise(found.transfers))
    assert found.step_seconds == max(found.end_seconds) == streams.seconds(streams.model.shares(lengths))
    assert found.step_seconds >= max(found.compute_seconds) * (1 - 1e-12)
    assert found.step_seconds >= found.communication_seconds * (1 - 1e-12)
    assert 0 <= found.forward_seconds <= found.step_seconds
