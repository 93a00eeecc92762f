"""The corpus's way to say what one device does, and to run the same on unlike ranks.

A case is a model, its batches and a loop, as a user wrote them for one device. The loop takes a :class:`Run`: on
one device ``run.wrap(model, batch)`` is the model itself, on ranks it is a :class:`~hetspmd.HAP`. What the loop
returns (losses, outputs, the whole state) is compared with the single device's, on every rank; or the named error
that the case expects must come, on every rank. Anything else (another number, another error, a hang) fails.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import hetspmd
from foreign.run import RANKS, SLOW, called, in_float64, loss_of
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import HetspmdError


@dataclass
class Run:
    """Where a loop runs: on one device (``communicator`` is None) or as one of the ranks."""

    communicator: Communicator | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return self.communicator is None

    def wrap(self, model: nn.Module, example: Any, **options: Any) -> Any:
        """The model on one device, HAP on ranks."""
        if self.communicator is None:
            return model
        options = {"process_group": self.communicator, **self.options, **options}
        return hetspmd.HAP(model, SLOW, example=example, **options)

    def state(self, wrapped: Any) -> dict[str, torch.Tensor]:
        """The whole state dict, copied."""
        state = wrapped.full_state_dict() if isinstance(wrapped, hetspmd.HAP) else wrapped.state_dict()
        return {name: value.detach().clone() for name, value in state.items()}

    def clip(self, wrapped: Any, norm: float) -> torch.Tensor:
        """Clipped gradients: the norm before."""
        clip = nn.utils.clip_grad_norm_ if self.alone else hetspmd.clip_grad_norm_
        return clip(wrapped.parameters(), norm)


Loop = Callable[[Run, nn.Module, Sequence[Any]], dict[str, Any]]


def train(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """The ordinary loop: SGD with momentum over the batches, then the loss in evaluation, then the state."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    wrapped = run.wrap(model, batches[0])
    at = run.options.get("loss")
    at = None if callable(at) else at
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(called(wrapped, batch), at)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    wrapped.eval()
    with torch.no_grad():
        losses.append(loss_of(called(wrapped, batches[0]), at).clone())
    return {"losses": losses, "state": run.state(wrapped)}


@dataclass(frozen=True)
class Case:
    """One report. ``report`` names where people met it (``pytorch#31553``).

    ``make`` returns ``(model, batches)``; it is called with torch seeded. ``refused`` is a pattern of the named
    error, None where the ranks must equal the single device within ``tolerance`` (relative, of float64).
    ``options`` go to HAP.
    """

    name: str
    report: str
    make: Callable[[], tuple[nn.Module, Sequence[Any]]]
    loop: Loop = train
    refused: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    slow: bool = False


CASES: dict[str, Case] = {}


def case(report: str, **facts: Any) -> Callable[[Callable[[], tuple[nn.Module, Sequence[Any]]]], Any]:
    """Add the decorated function, which returns ``(model, batches)``, to the corpus."""

    def add(make: Callable[[], tuple[nn.Module, Sequence[Any]]]) -> Any:
        name = make.__name__
        assert name not in CASES, f"two cases are called {name}"
        CASES[name] = Case(name, report, make, **facts)
        return make

    return add


def check(c: Case) -> None:
    """Run a case. Raises AssertionError where the ranks are neither equal to one device nor refused as expected."""
    with in_float64():
        _check(c)


def _check(c: Case) -> None:
    options = dict(c.options)

    def made() -> tuple[nn.Module, Sequence[Any]]:
        torch.manual_seed(0)
        return c.make()

    copies = [made() for _ in range(RANKS)]

    def on_rank(communicator: Communicator) -> Any:
        model, batches = copies[communicator.rank]
        try:
            return c.loop(Run(communicator, options), model, batches)
        except HetspmdError as error:
            return error

    if c.refused is not None:
        for rank, found in enumerate(run_ranks(RANKS, on_rank)):
            assert isinstance(found, HetspmdError), f"rank {rank} of {c.name} was not refused: {found}"
            assert re.search(c.refused, str(found)), (
                f"rank {rank} of {c.name}: {type(found).__name__}: {found}"
            )
        return
    model, batches = made()
    want = c.loop(Run(None, options), copy.deepcopy(model), batches)
    for rank, found in enumerate(run_ranks(RANKS, on_rank)):
        if isinstance(found, HetspmdError):
            raise AssertionError(f"rank {rank} of {c.name} was refused") from found
        assert_equal(found, want, f"rank {rank} of {c.name}", c.tolerance)


def assert_equal(found: Any, want: Any, where: str, tolerance: float) -> None:
    """Nested results are equal: tensors and floats within the tolerance, of the largest magnitude."""
    if isinstance(want, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{where}: {type(found).__name__} instead of a tensor"
        assert found.shape == want.shape, f"{where}: {list(found.shape)} instead of {list(want.shape)}"
        assert found.dtype == want.dtype, f"{where}: {found.dtype} instead of {want.dtype}"
        a, b = found.detach(), want.detach()
        exact = not (b.is_floating_point() or b.is_complex())
        scale = float(b.abs().max()) if b.numel() and not exact else 0.0
        bound = max(tolerance * scale, 1e-12)
        same = torch.equal(a, b) if exact else bool(((a - b).abs() <= bound).all())
        assert same, f"{where}: {a.flatten()[:6].tolist()} instead of {b.flatten()[:6].tolist()}"
    elif isinstance(want, Mapping):
        assert list(found) == list(want), f"{where}: {list(found)} instead of {list(want)}"
        for key in want:
            assert_equal(found[key], want[key], f"{where}, {key}", tolerance)
    elif isinstance(want, (list, tuple)):
        assert len(found) == len(want), f"{where}: {len(found)} items instead of {len(want)}"
        for i, (a, b) in enumerate(zip(found, want, strict=True)):
            assert_equal(a, b, f"{where}[{i}]", tolerance)
    elif isinstance(want, float):
        assert abs(found - want) <= max(tolerance * abs(want), 1e-12), f"{where}: {found} instead of {want}"
    else:
        assert found == want, f"{where}: {found!r} instead of {want!r}"
