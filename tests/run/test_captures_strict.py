"""The capturer for CPUs is as strict as CUDA graphs: where a precaution is left out, the numbers are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import both, trained
from ranks import loss_of
from small_models import Case, case

from hetspmd.dist.random import Randomness
from hetspmd.run import captured_regions as captured
from hetspmd.run.capture_memory import Held, Place, Variant
from hetspmd.run.capturer import CaptureError
from hetspmd.run.module import HAP
from hetspmd.run.simulated_capture import SimulatedCapturer

CPU = torch.device("cpu")


def two_forwards(hap: HAP, c: Case) -> Any:
    found = []
    for number in range(4):
        batches = [c.batch, {k: v.flip(0) for k, v in c.batch.items()}]
        losses = [loss_of(hap(**batch)) for batch in batches[: 1 + number // 2]]
        hap.zero_grad()
        losses[0].backward()
        found += [p.grad.clone() for p in hap.parameters() if p.grad is not None]
    return found


def moved(hap: HAP, c: Case) -> Any:
    found = []
    for _ in range(4):
        found.append(loss_of(hap(**c.batch)).item())
        hap.module.a.weight.data = hap.module.a.weight.data * 1.5
    return found


def other_numbers(hap: HAP, c: Case) -> Any:
    found = []
    for seed in range(4):
        if seed:
            hap.use_randomness(Randomness(seed, 0, CPU))
        found.append(loss_of(hap(**c.batch)).item())
    return found


def evaluated_between(hap: HAP, c: Case) -> Any:
    """Evaluations come before the first step, and between the forward and the backward of each."""
    found = []

    def evaluate() -> None:
        hap.eval()
        with torch.no_grad():
            found.append(loss_of(hap(**c.batch)).item())
        hap.train()

    for _ in range(3):
        evaluate()
    for _ in range(4):
        hap.zero_grad()
        loss = loss_of(hap(**c.batch))
        evaluate()
        loss.backward()
        found += [p.grad.clone() for p in hap.parameters() if p.grad is not None]
    return found


def _as_they_are(_: Any, tensors: Any) -> Any:
    return list(tensors)


def _always(*_: Any) -> bool:
    return True


def in_another_order(hap: HAP, c: Case) -> Any:
    """Each time another batch, which lies elsewhere."""
    dice = torch.Generator().manual_seed(0)
    orders = [torch.randperm(9, generator=dice) for _ in range(4)]
    return [loss_of(hap(**{k: v[order] for k, v in c.batch.items()})).item() for order in orders]


def _anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(captured, "_places", lambda _: ())
    patch.setattr(Variant, "is_read_there", _always)
    patch.setattr(Place, "has", _always)


def _no_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Held, "inputs", _as_they_are)
    _anywhere(patch)


def _one_pool(patch: pytest.MonkeyPatch) -> None:
    pool: list[Any] = []
    patch.setattr(SimulatedCapturer, "pool", lambda _: pool)


PRECAUTIONS: dict[str, tuple[Callable[[HAP, Case], Any], Callable[[pytest.MonkeyPatch], object]]] = {
    "copies of what is handed out": (
        trained, lambda patch: patch.setattr(Held, "copies", _as_they_are),
    ),
    "one step at a time": (
        two_forwards, lambda patch: patch.setattr(Variant, "is_held", lambda _: False),
    ),
    "where parameters are": (moved, _anywhere),
    "pools of their own": (evaluated_between, _one_pool),
    "copies of the batch": (in_another_order, _no_copies),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::hetspmd.errors.CudaGraphsWarning")
@pytest.mark.parametrize("left_out", PRECAUTIONS)
def test_precautions_are_needed(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, leave_out = PRECAUTIONS[left_out]
    both(case("mlp"), body)
    leave_out(monkeypatch)
    with pytest.raises(AssertionError, match=r"Tensor-likes|Scalars|Expected"):
        both(case("mlp"), body)


def test_generators_are_those_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture draws from the generators with which it was made."""
    both(case("attention"), other_numbers)
    monkeypatch.setattr(captured.Captures, "_drop", lambda _: None)
    with pytest.raises(AssertionError, match=r"Scalars|Expected"):
        both(case("attention"), other_numbers)


def capture(call: Callable[[], Any], *generators: torch.Generator) -> Any:
    capturer = SimulatedCapturer()
    return capturer.capture(call, generators, capturer.pool())


def test_nothing_happens_while_calls_are_captured() -> None:
    x, generator = torch.ones(3), torch.Generator().manual_seed(0)
    state = generator.get_state()
    made = capture(lambda: (x.add_(1.0), torch.rand(3, generator=generator)), generator)
    assert x.tolist() == [1.0] * 3
    assert torch.equal(generator.get_state(), state)
    assert made.outputs[1].isnan().all()
    made.replay()
    made.replay()
    assert x.tolist() == [3.0] * 3
    want = torch.Generator().manual_seed(0)
    torch.rand(3, generator=want)
    assert torch.equal(made.outputs[1], torch.rand(3, generator=want))


def test_what_passes_is_rubbish_afterwards() -> None:
    passing: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        passing.append(torch.ones(3) * 2)
        return passing[0] + 1

    made = capture(call)
    made.replay()
    assert made.outputs.tolist() == [3.0] * 3
    assert passing[0].isnan().all()


def test_what_was_captured_later_is_rubbish_after_a_repetition() -> None:
    """Where it was captured into the same pool."""
    capturer = SimulatedCapturer()
    one, other = capturer.pool(), capturer.pool()
    first, second, third = (
        capturer.capture(lambda: torch.ones(3) * 2 + 1, (), pool) for pool in (one, one, other)
    )
    for made in (first, second, third):
        made.replay()
    second.replay()
    assert [made.outputs.isnan().any().item() for made in (first, second, third)] == [False] * 3
    first.replay()
    assert [made.outputs.isnan().any().item() for made in (first, second, third)] == [False, True, False]


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(3).sum().item(),
        lambda: torch.ones(3).nonzero(),
        lambda: torch.ones(3)[torch.ones(3) > 0],
        lambda: bool(torch.ones(())),
        lambda: torch.rand(3),
        lambda: torch.rand(3, generator=torch.Generator()),
    ],
)
def test_what_cannot_be_captured(call: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError):
        capture(call)
