"""Models that checkpoint activations train as on one device, and compute them again as they do there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from equal import assert_equal_to_one_device
from small_plans import cluster
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import hetspmd
from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace
from nets import traced

WIDE = torch.float64

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(12, 24, dtype=WIDE)
        self.b = nn.Linear(24, 12, dtype=WIDE)
        self.n = nn.BatchNorm1d(24, dtype=WIDE)
        self.layers = nn.Sequential(*(nn.Linear(24, 24, dtype=WIDE) for _ in range(4)))
        self.function = forward
        self.register_buffer("k", torch.zeros((), dtype=WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def block(m: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda h: torch.tanh(m.layers(h))


def normed(m: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda h: torch.relu(m.n(m.layers[0](h)))


def in_a_loop(m: Any, h: torch.Tensor) -> torch.Tensor:
    def region(h: torch.Tensor, times: float, *, layer: nn.Module, names: dict[str, str]) -> torch.Tensor:
        return getattr(torch, names["function"])(layer(h) * times) + h

    for index, layer in enumerate(m.layers[:3]):
        names = {"function": "tanh" if index else "sin"}
        h = checkpoint(region, h, 0.5 + index, use_reentrant=False, layer=layer, names=names)
    return h


def nested(m: Any, *, reentrant: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    def region(h: torch.Tensor) -> torch.Tensor:
        inner = lambda z: torch.tanh(m.layers[1](torch.sin(z)))  # noqa: E731  # one line beside its use
        return torch.tanh(m.layers[0](checkpoint(inner, torch.cos(h), use_reentrant=reentrant)))

    return region


def several(m: Any, h: torch.Tensor) -> torch.Tensor:
    def region(h: torch.Tensor) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
        z = torch.sin(m.layers[0](h))
        return torch.tanh(m.layers[1](z)), 3, [z.exp()]

    a, k, (b,) = checkpoint(region, h, use_reentrant=False)
    return m.b(a * k + b).pow(2).mean()


def to_the_end(m: Any, h: torch.Tensor) -> torch.Tensor:
    """The second run of a region goes on when it has what was saved, that of the one in it does not."""

    def region(h: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(True):
            return checkpoint(normed(m), h.cos(), use_reentrant=False)  # type: ignore[no-any-return]  # torch says Any

    with set_checkpoint_early_stop(False):
        return m.b(checkpoint(region, h, use_reentrant=False)).pow(2).mean()  # type: ignore[no-any-return]  # torch says Any


CASES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "without reentry": lambda m, x: m.b(checkpoint(block(m), m.a(x), use_reentrant=False)).pow(2).mean(),
    "reentrant": lambda m, x: m.b(checkpoint(block(m), m.a(x), use_reentrant=True)).pow(2).mean(),
    "in sequence": lambda m, x: (
        m.b(checkpoint_sequential(m.layers, 2, m.a(x), use_reentrant=False)).pow(2).mean()
    ),
    "batch norm": lambda m, x: m.b(checkpoint(normed(m), m.a(x), use_reentrant=False)).pow(2).mean(),
    "batch norm, reentrant": lambda m, x: (
        m.b(checkpoint(normed(m), m.a(x), use_reentrant=True)).pow(2).mean()
    ),
    "batch norm twice": lambda m, x: (
        m.b(checkpoint(normed(m), checkpoint(normed(m), m.a(x), use_reentrant=False), use_reentrant=False))
        .pow(2)
        .mean()
    ),
    "reentrant, of the batch": lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)).pow(2).mean(),
    "in a loop, with other arguments": lambda m, x: m.b(in_a_loop(m, m.a(x))).pow(2).mean(),
    "one region in another": lambda m, x: (
        m.b(checkpoint(nested(m), m.a(x), use_reentrant=False)).pow(2).mean()
    ),
    "one reentrant region in another": lambda m, x: (
        m.b(checkpoint(nested(m, reentrant=True), m.a(x), use_reentrant=True)).pow(2).mean()
    ),
    "batch norm in the last region of another": lambda m, x: (
        m.b(
            checkpoint(
                lambda h: checkpoint(normed(m), h.cos(), use_reentrant=False), m.a(x), use_reentrant=False
            )
        )
        .pow(2)
        .mean()
    ),
    "batch norm in the last region of one that goes on": lambda m, x: to_the_end(m, m.a(x)),
    "batch norm in a region of another": lambda m, x: (
        m.b(
            checkpoint(
                lambda h: checkpoint(normed(m), h, use_reentrant=False).tanh(), m.a(x), use_reentrant=False
            )
        )
        .pow(2)
        .mean()
    ),
    "several results": lambda m, x: several(m, m.a(x)),
}
REGIONS = {
    "in sequence": 1,  # of the last part nothing is: it is one layer's product
    "reentrant, of the batch": 0,
    "in a loop, with other arguments": 3,
    "batch norm twice": 2,
    "one region in another": 2,
    "one reentrant region in another": 2,
    "batch norm in a region of another": 2,
    "batch norm in the last region of another": 2,
    "batch norm in the last region of one that goes on": 2,
}
"""How many regions are computed again, of those that compute something that the backward reads."""


@pytest.mark.parametrize("name", CASES)
def test_a_checkpointed_model_trains_as_on_one_device(name: str) -> None:
    torch.manual_seed(3)
    batches = [(torch.randn(16, 12, dtype=WIDE),) for _ in range(2)]

    assert_equal_to_one_device(lambda: Model(CASES[name]), batches)
    graph = trace(Model(CASES[name]), batches[0], {})
    wanted = REGIONS.get(name, 1)
    assert [block.block for block in graph.recomputed] == [f"checkpoint {n}" for n in range(wanted)]


def counting(m: Any, x: torch.Tensor) -> torch.Tensor:
    def region(h: torch.Tensor) -> torch.Tensor:
        m.k.add_(1)
        return m.b(h)

    return checkpoint(region, m.a(x), use_reentrant=False).pow(2).mean()


def drawing(m: Any, x: torch.Tensor) -> torch.Tensor:
    region = lambda h: nn.functional.dropout(m.n(h), 0.5)  # noqa: E731  # one line beside its use
    return m.b(checkpoint(region, m.a(x), use_reentrant=False)).pow(2).mean()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (counting, "region of torch.utils.checkpoint at .* changes buffer model.k"),
        (drawing, "changes running statistics and draws random numbers"),
    ],
)
def test_a_second_run_that_cannot_be_kept_is_refused(forward: Callable[..., Any], message: str) -> None:
    model = Model(forward)
    with pytest.raises(TraceError, match=message):
        traced(lambda m, x: m.model(x), torch.randn(16, 12, dtype=WIDE), model=model)


def test_torchs_own_functions_are_put_back() -> None:
    import torch.utils.checkpoint as of_torch

    before = of_torch.CheckpointFunction
    traced(lambda m, x: m.model(x), torch.randn(16, 12, dtype=WIDE), model=Model(CASES["reentrant"]))
    assert of_torch.CheckpointFunction is before


def _counts(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return torch.tanh(m.layers(h))


def _counts_in_a_dict(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.table["calls"] += 1
    return torch.tanh(m.layers(h))


def _collects(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.rows.append(len(h))
    return torch.tanh(m.layers(h))


@pytest.mark.parametrize("region", [_counts, _counts_in_a_dict, _collects])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_region_that_counts_is_refused(region: Any, reentrant: bool) -> None:
    model = Model(
        lambda m, x: m.b(checkpoint(partial(region, m), m.a(x), use_reentrant=reentrant)).square().mean()
    )
    model.calls, model.table, model.rows = 0, {"calls": 0}, []
    message = r"torch\.utils\.checkpoint at .*test_checkpoints\.py.* changes (calls|table|rows)"
    with pytest.raises(TraceError, match=message):
        hetspmd.compile(model, (torch.randn(16, 12, dtype=WIDE),), cluster(4, 2, 1, 1))


def _keeps(m: Any, h: torch.Tensor) -> torch.Tensor:
    if m.scale is None:
        m.scale = torch.full((), 2.0, dtype=WIDE)
    m.width, m.ready = h.shape[1], True
    return torch.tanh(m.layers(h)) * m.scale


def test_a_region_may_keep_what_its_second_run_keeps_alike() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.calls += 1
        loss = m.b(checkpoint(partial(_keeps, m), m.a(x), use_reentrant=False)).square().mean()
        m.calls += 1
        return loss  # type: ignore[no-any-return]

    model = Model(forward)
    model.calls, model.scale, model.width, model.ready = 0, None, 0, False
    graph = trace(model, (torch.randn(16, 12, dtype=WIDE),), {})
    assert {c.path: c.step for c in graph.host.counters} == {(".calls",): 2}
