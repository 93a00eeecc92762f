"""Seeds and generators in forward, gradients that it reads, and what it is told of being traced."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from beside import Beside, X, base, equal, train
from small_plans import cluster
from torch import nn

import hetspmd
from hetspmd.errors import TraceError


def _mask(m: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return m.down(m.up(x) * (torch.rand(24, **options) > 0.5)).square().mean()  # type: ignore[no-any-return]


def _forked(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return _mask(m, x)


def _forked_alone(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return _mask(m, x)


def _seeded(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return _mask(m, x)


def _put_back(m: Any, x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    torch.random.manual_seed(3)
    loss = _mask(m, x)
    torch.set_rng_state(state)
    return loss


_BOUND = torch.manual_seed


def _by_another_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    _BOUND(3)
    return _mask(m, x)


SEEDS = [_forked, _forked_alone, _seeded, _put_back, _by_another_name]


@pytest.mark.parametrize("forward", SEEDS)
@pytest.mark.parametrize("randomness", ["refuse", "freeze"])
def test_a_seed_in_forward_is_refused(forward: Any, randomness: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(
        TraceError, match=r"sets torch's random state at .*test_asked\.py:\d+: .*register_buffer"
    ):
        hetspmd.compile(Beside(forward), (X,), cluster(4, 2, 1, 1), host_randomness=randomness)
    assert isinstance(torch.random.default_generator, torch.Generator)
    model = Beside(forward)  # a model draws when it is made
    torch.set_rng_state(before)
    with pytest.raises(TraceError, match="sets torch's random state"):
        train(lambda: model, steps=1)


@pytest.mark.parametrize(
    "read", [torch.initial_seed, torch.random.initial_seed], ids=["torch", "torch.random"]
)
def test_a_seed_that_forward_reads_is_named(read: Any) -> None:
    model = Beside(lambda m, x: m.down(m.up(x)).square().mean() * (1 + read() % 3))
    with pytest.raises(TraceError, match=r"reads torch's seed at .*test_asked\.py:\d+: .*as an argument"):
        hetspmd.compile(model, (X,), cluster(4, 2, 1, 1))


class Drawing(Beside):
    """Has a generator, which cannot be copied."""

    def __init__(self, forward: Any) -> None:
        super().__init__(forward, generator=torch.Generator())

    def __deepcopy__(self, _memo: Any) -> Drawing:
        made = Drawing(self.function)
        made.load_state_dict(self.state_dict())
        return made


def _permuted(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x[torch.randperm(16, generator=m.generator)])


GENERATORS: list[Any] = [
    lambda m, x: _mask(m, x, generator=torch.Generator().manual_seed(3)),
    lambda m, x: _mask(m, x, generator=m.generator),
    lambda m, x: base(m, x + torch.zeros_like(x).normal_(generator=m.generator)),
    _permuted,
]


@pytest.mark.parametrize("forward", GENERATORS)
def test_a_generator_of_its_own_is_refused_with_its_line(forward: Any) -> None:
    with pytest.raises(TraceError, match=r"draws from a torch\.Generator at .*test_asked\.py:\d+: .*rand"):
        train(lambda: Drawing(forward), steps=1)


def test_the_default_generator_may_be_named() -> None:
    _, ranks = train(lambda: Beside(lambda m, x: _mask(m, x, generator=torch.default_generator)), steps=2)
    assert ranks[0].losses == ranks[-1].losses


GRADIENTS: dict[str, Any] = {
    "whether there is one": lambda m, x: base(m, x) * (1.0 if m.up.weight.grad is None else 2.0),
    "its norm": lambda m, x: base(m, x) + (m.up.bias.grad.norm() if m.up.bias.grad is not None else 0.0),
    "of all": lambda m, x: base(m, x) * (1.0 + sum(p.grad is not None for p in m.parameters())),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_forward_reads_is_refused(name: str) -> None:
    with pytest.raises(
        TraceError, match=r"uses (up|down)\.\w+\.grad at .*test_asked\.py:\d+: .*full_gradients"
    ):
        train(lambda: Beside(GRADIENTS[name]), steps=1)


def test_a_gradient_that_forward_clears_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.up.weight.grad = None
        return base(m, x)

    with pytest.raises(TraceError, match=r"uses up\.weight\.grad at"):
        train(lambda: Beside(forward), steps=1)


def test_a_version_that_forward_asks_is_refused() -> None:
    with pytest.raises(TraceError, match=r"asks up\.weight\._version at .*test_asked\.py:\d+"):
        train(lambda: Beside(lambda m, x: base(m, x) * (1.0 + m.up.weight._version)), steps=1)


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 24)
        self.scale = 2.0 if torch.compiler.is_compiling() else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad() if torch.compiler.is_compiling() else nullcontext():
            return self.layer(x).square().mean()  # type: ignore[no-any-return]


def _told(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) * (2.0 if torch.compiler.is_compiling() else 1.0)


def _told_by_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    return base(m, x) * (2.0 if is_compiling() else 1.0)


is_compiling = torch.compiler.is_compiling


@pytest.mark.parametrize("make", [Asks, lambda: Beside(_told), lambda: Beside(_told_by_name)])
def test_a_model_is_told_what_one_device_tells_it(make: Any) -> None:
    equal(make, steps=2)
    assert torch.compiler.is_compiling is is_compiling


def test_libraries_are_told_that_they_are_compiled() -> None:
    library: dict[str, Any] = {"__name__": "torch.library_of_models", "torch": torch}
    exec("def asked(): return torch.compiler.is_compiling()", library)  # as transformers asks

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if not library["asked"]():
            raise RuntimeError("a library looks at values")
        return base(m, x)

    hetspmd.compile(Beside(forward), (X,), cluster(4, 2, 1, 1))
    assert not library["asked"]()
