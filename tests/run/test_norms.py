"""Clipping and accumulation: what one device computes, over uneven, empty, whole, tied and idle shards."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from ranks import CLOSE, loss_of, on_ranks, own_gradient
from small_models import Case, case
from small_plans import cluster, random_plan
from torch import nn

import hetspmd
from hetspmd.dist.communicator import Communicator, Work
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import SimulatedCommunicator, run_ranks
from hetspmd.errors import GradientError
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import derive
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain
from hetspmd.search.constraints import Constraints
from hetspmd.trace.trace import trace

ORDERS = (2.0, 1.0, math.inf, 3.0, 0.5, 12.0)


def quiet(name: str, dtype: torch.dtype = torch.float64) -> Case:
    return case(name, dtype, **({"dropout": 0.0} if name == "attention" else {}))


def plans(c: Case) -> list[Plan]:
    """Uneven ones, some with empty shards, one with an idle device."""
    active = (0, 2)
    idle = plan_for(c.theory, cluster(3, 1, 2), Constraints({}), (0.6, 0.4), active=active)
    return [*(random_plan(c, 3, seed) for seed in (1, 2, 4, 6)), idle]


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_total_norm_and_clipped_gradients(name: str) -> None:
    c = quiet(name)
    loss_of(c.model(**c.batch)).backward()
    before = {n: p.grad.clone() for n, p in c.model.named_parameters() if p.grad is not None}
    want = {}
    for order in ORDERS:
        for n, p in c.model.named_parameters():
            p.grad = before[n].clone() if n in before else None
        norm = nn.utils.clip_grad_norm_(c.model.parameters(), 0.05, order)
        want[order] = norm, {n: p.grad for n, p in c.model.named_parameters() if p.grad is not None}

    def body(hap: HAP) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        loss_of(hap(**c.batch)).backward()
        kept = [None if p.grad is None else p.grad.clone() for p in hap.parameters()]
        found = []
        for index, order in enumerate(ORDERS):
            for p, gradient in zip(hap.parameters(), kept, strict=True):
                p.grad = None if gradient is None else gradient.clone()
            norm = hetspmd.clip_grad_norm_(hap if index % 2 else hap.parameters(), 0.05, order)
            found.append((norm, hap.full_gradients()))
        return found

    empty = 0
    for plan in plans(c):
        results = on_ranks(c, plan, body)
        for rank, found in enumerate(results):
            for order, (norm, gradients), (first, _) in zip(ORDERS, found, results[0], strict=True):
                assert torch.equal(norm, first), f"rank {rank} has another norm than rank 0"
                assert norm.dtype == torch.float64
                assert norm.ndim == 0
                torch.testing.assert_close(norm, want[order][0], **CLOSE)
                assert set(gradients) == set(want[order][1])
                for key, value in gradients.items():
                    torch.testing.assert_close(value, want[order][1][key], **CLOSE)
        empty += any(0 in extents for _, extents in plan.parameter_layout().values())
    assert empty


def test_a_small_norm_leaves_gradients_alone() -> None:
    c = quiet("mlp")

    def body(hap: HAP) -> bool:
        loss_of(hap(**c.batch)).backward()
        gradients = plain(p.grad for p in hap.parameters() if p.grad is not None)
        before = [g.clone() for g in gradients]
        hetspmd.clip_grad_norm_(hap, 1e6)
        return all(map(torch.equal, before, gradients))

    assert all(on_ranks(c, random_plan(c, 3, 2), body))


class Counting(SimulatedCommunicator):
    """Counts what it issues."""

    gathers = 0

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Work:
        self.gathers += 1
        return super().all_gather(output, buffer)


@pytest.mark.parametrize("gpus", [False, True])
def test_one_collective_of_a_number_per_rank(gpus: bool) -> None:
    """The number travels in the word that tells the others of it, unless it lies on a GPU."""
    c = quiet("mlp")
    plan = random_plan(c, 3, 2)
    models = [copy.deepcopy(c.model) for _ in range(3)]
    _ = plan.theory, plan.digest

    def body(given: Communicator) -> tuple[int, int]:
        assert isinstance(given, SimulatedCommunicator)
        counting = Counting(given.meeting, given.rank)
        hap = HAP(models[given.rank], plan.cluster, plan=plan, process_group=counting)
        loss_of(hap(**c.batch)).backward()
        assert hap._attendance is not None
        hap._attendance._late = gpus
        issued, gathers = counting.count, counting.gathers
        hetspmd.clip_grad_norm_(hap, 1.0)
        given.count = counting.count
        return counting.count - issued, counting.gathers - gathers

    assert run_ranks(3, body) == [(gpus, gpus)] * 3


def test_part_of_the_parameters_and_none_with_gradients() -> None:
    c = quiet("mlp")
    model = c.model
    loss_of(model(**c.batch)).backward()
    want = nn.utils.get_total_norm([model.a.weight.grad, model.b.bias.grad])

    def body(hap: HAP) -> tuple[torch.Tensor, torch.Tensor]:
        module: Any = hap.module
        nothing = hetspmd.get_total_norm(hap)
        loss_of(hap(**c.batch)).backward()
        return nothing, hetspmd.get_total_norm(iter([module.a.weight, module.b.bias, module.a.weight]))

    for nothing, norm in on_ranks(c, random_plan(c, 3, 4), body):
        assert nothing == 0.0
        torch.testing.assert_close(norm, want, **CLOSE)


def test_what_is_not_finite() -> None:
    c = quiet("mlp")
    found = (random_plan(c, 3, seed) for seed in range(20))
    plan = next(p for p in found if p.parameter_layout()["a.weight"][1][2:] > (0,))

    def body(hap: HAP) -> tuple[float, str]:
        loss_of(hap(**c.batch)).backward()
        weight: Any = hap.module.get_parameter("a.weight")
        if hap.rank == 2:
            own_gradient(weight).view(-1)[0] = math.nan
        norm = float(hetspmd.get_total_norm(hap))
        with pytest.raises(RuntimeError, match="error_if_nonfinite") as caught:
            hetspmd.clip_grad_norm_(hap, 1.0, error_if_nonfinite=True)
        hetspmd.clip_grad_norm_(hap, 1.0)
        assert all(bool(own_gradient(p).isnan().all()) for p in hap.parameters() if p.grad is not None), (
            "as torch's"
        )
        return norm, str(caught.value)

    results = on_ranks(c, plan, body)
    assert all(math.isnan(norm) for norm, _ in results)
    assert len({message for _, message in results}) == 1


def test_norms_of_half_precision_do_not_overflow() -> None:
    """In bfloat16 each tensor's norm is taken in float32; the result is of the gradients' dtype, as torch's."""
    c = quiet("mlp", torch.bfloat16)
    loss_of(c.model(**c.batch)).backward()
    want = nn.utils.get_total_norm([p.grad.double() for p in c.model.parameters() if p.grad is not None])

    def body(hap: HAP) -> torch.Tensor:
        loss_of(hap(**c.batch)).backward()
        return hetspmd.get_total_norm(hap)

    for norm in on_ranks(c, random_plan(c, 3, 2), body):
        assert norm.dtype == torch.bfloat16
        torch.testing.assert_close(norm.double(), want, rtol=0.02, atol=0.0)


def test_bad_arguments() -> None:
    c = quiet("mlp")
    hap = HAP(copy.deepcopy(c.model), cluster(1), example=c.batch)
    with pytest.raises(ValueError, match="positive"):
        hetspmd.clip_grad_norm_(hap, 1.0, 0.0)
    with pytest.raises(GradientError, match="belongs to no HAP module"):
        hetspmd.clip_grad_norm_(c.model, 1.0)
    with pytest.raises(GradientError, match="no parameters"):
        hetspmd.clip_grad_norm_([], 1.0)
    hetspmd.clip_grad_norm_(nn.ModuleList([hap]), 1.0)
    parameters = list(hap.parameters())
    del hap
    gc.collect()
    with pytest.raises(GradientError, match="belongs to no HAP module"):
        hetspmd.clip_grad_norm_(parameters, 1.0)


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
@pytest.mark.parametrize("no_sync", [False, True])
def test_accumulation_equals_the_single_device(name: str, no_sync: bool) -> None:
    """Micro-batches of several sizes before each step, scaled as users do; gradients stay where they are."""
    c = quiet(name)
    cut = next(len(v) // 2 for v in c.batch.values())
    whole = [c.batch, {k: v.flip(0) for k, v in c.batch.items()}]
    part = {k: v[:cut] for k, v in c.batch.items()}
    micro = [whole[0], whole[1], part]
    single = copy.deepcopy(c.model)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        for batch in micro:
            (loss_of(single(**batch)) / len(micro)).backward()
        optimizer.step()
    want = {**dict(single.named_parameters()), **dict(single.named_buffers())}

    def body(hap: HAP) -> tuple[dict[str, torch.Tensor], bool]:
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1, momentum=0.9)
        stays = True
        for _ in range(2):
            optimizer.zero_grad()
            places: list[int] = []
            for index, batch in enumerate(micro):
                if no_sync and index < len(micro) - 1:
                    with hap.no_sync():
                        (loss_of(hap(**batch)) / len(micro)).backward()
                else:
                    (loss_of(hap(**batch)) / len(micro)).backward()
                now = [p.grad.data_ptr() for p in hap.parameters() if p.grad is not None]
                stays = stays and (not places or places == now)
                places = now
            optimizer.step()
        return hap.full_tensors(), stays

    for seed in (2, 5):
        plan = random_plan(c, 3, seed)
        for tensors, stays in on_ranks(c, plan, body):
            assert stays, "gradients are added in place"
            for key, value in tensors.items():
                torch.testing.assert_close(value, want[key].detach(), **CLOSE)


def test_accumulation_draws_anew() -> None:
    """Dropout of the second micro-batch is not the first's."""
    c = case("attention", dropout=0.5)

    def body(hap: HAP) -> list[float]:
        hap.use_randomness(Randomness(1, hap.rank, torch.device("cpu")))
        with hap.no_sync():
            return [loss_of(hap(**c.batch)).item() for _ in range(2)]

    first, second = on_ranks(c, random_plan(c, 2, 2), body)
    assert first == second
    assert first[0] != first[1]


def test_an_untrained_model_has_nothing_to_count() -> None:
    """Frozen parameters have no gradients on any rank; every rank still takes part."""
    c = quiet("mlp")
    for p in c.model.parameters():
        p.requires_grad_(False)
    frozen = Case(c.model, c.batch, derive(trace(c.model, (), c.batch, training=False)))

    def body(hap: HAP) -> float:
        hap(**c.batch)
        return float(hetspmd.clip_grad_norm_(hap, 1.0))

    assert on_ranks(frozen, random_plan(frozen, 2, 2), body) == [0.0, 0.0]
