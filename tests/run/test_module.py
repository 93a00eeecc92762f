"""HAP as a user meets it: like DistributedDataParallel, with shards."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import CLOSE, lone, loss_of, on_ranks
from small_models import Attention, case
from small_plans import cluster, random_plan
from torch import nn

from hetspmd.errors import (
    GradientError,
)  # fmt: skip
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import is_sharded
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain
from hetspmd.search import constraints as known

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, foreach=True),
}


@pytest.mark.parametrize("name", ["mlp", "conv"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_training_equals_the_single_device_with_empty_shards(name: str, optimizer: str) -> None:
    c = case(name)
    single = copy.deepcopy(c.model)
    step = OPTIMIZERS[optimizer](single.parameters())
    losses = []
    for _ in range(3):
        step.zero_grad()
        loss = loss_of(single(**c.batch))
        loss.backward()
        losses.append(loss.item())
        step.step()
    plan = random_plan(c, 4, 6)
    want = {**dict(single.named_parameters()), **dict(single.named_buffers())}

    def body(hap: HAP) -> tuple[list[float], dict[str, torch.Tensor], int]:
        step = OPTIMIZERS[optimizer](hap.parameters())
        seen = []
        for _ in range(3):
            step.zero_grad()
            loss = loss_of(hap(**c.batch))
            loss.backward()
            seen.append(loss.item())
            step.step()
        return seen, hap.full_tensors(), min(p.numel() for p in plain(hap.parameters()))

    results = on_ranks(c, plan, body)
    for seen, tensors, _ in results:
        assert seen == pytest.approx(losses, rel=1e-10)
        assert set(tensors) == set(want)
        for key, value in tensors.items():
            torch.testing.assert_close(value, want[key].detach(), **CLOSE)
    assert min(least for _, _, least in results) == 0, "some rank should hold an empty shard"


def test_names_are_those_of_data_parallel_and_ties_are_kept() -> None:
    c = case("attention")
    plan = random_plan(c, 2, 2)

    def body(hap: HAP) -> tuple[list[str], bool]:
        model = hap.module
        assert isinstance(model, Attention)
        return [n for n, _ in hap.named_parameters()], model.head.weight is model.tokens.weight

    for names, tied in on_ranks(c, plan, body):
        assert names == [f"module.{n}" for n, _ in c.model.named_parameters()]
        assert tied


def test_shards_have_the_planned_shapes() -> None:
    c = case("mlp")
    plan = random_plan(c, 3, 4)
    layout = plan.parameter_layout()
    assert any(is_sharded(form) for form, _ in layout.values())

    def body(hap: HAP) -> dict[str, tuple[int, ...]]:
        assert {n: s.form for n, s in hap.parameter_shards().items()} == {
            n: f for n, (f, _) in layout.items()
        }
        return {n: tuple(plain([p])[0].shape) for n, p in hap.module.named_parameters()}

    for rank, shapes in enumerate(on_ranks(c, plan, body)):
        for name, (form, extents) in layout.items():
            if is_sharded(form):
                assert shapes[name][form - 2] == extents[rank]


def test_an_optimizer_made_before_wrapping_sees_the_shards() -> None:
    c = case("mlp")
    plan = random_plan(c, 1, 0)
    model = copy.deepcopy(c.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hap = HAP(model, plan.cluster, plan=plan)
    before = model.a.weight.detach().clone()
    loss_of(hap(**c.batch)).backward()
    optimizer.step()
    assert not torch.equal(before, model.a.weight)


def test_gradients_accumulate_and_scale() -> None:
    c = case("mlp")
    plan = random_plan(c, 2, 2)

    def body(hap: HAP) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        loss_of(hap(**c.batch)).backward()
        once = hap.full_gradients()
        (loss_of(hap(**c.batch)) * 8.0).backward()
        return once, hap.full_gradients()

    for once, both in on_ranks(c, plan, body):
        assert set(once) == {"a.weight", "a.bias", "b.weight", "b.bias"}, (
            "neither the frozen nor the unused one"
        )
        for name, value in both.items():
            torch.testing.assert_close(value, once[name] * 9.0, **CLOSE)


def test_no_two_gradients_share_memory() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x + self.a) + self.b).square().sum()

    hap = HAP(Twice(), cluster(1), example=(torch.rand(3, 4),))
    hap(torch.rand(3, 4)).backward()
    pointers = {p.grad.data_ptr() for p in hap.parameters() if p.grad is not None}
    assert len(pointers) == 2
    nn.utils.clip_grad_norm_(hap.parameters(), 1e-3)
    assert torch.equal(hap.module.a.grad, hap.module.b.grad)


def test_gradients_of_a_bucket_lie_side_by_side() -> None:
    """In one storage, without copies and without an element in common."""
    c = case("mlp")
    plan = plan_for(c.theory, cluster(1, 1), known.data_parallel(c.theory), (0.5, 0.5))

    def body(hap: HAP) -> list[tuple[int, int, int]]:
        loss_of(hap(**c.batch)).backward()
        found = []
        for p in hap.parameters():
            if p.grad is not None:
                start = p.grad.data_ptr()
                found.append((p.grad.untyped_storage().data_ptr(), start, start + p.grad.nbytes))
        return sorted(found, key=lambda part: part[1])

    for parts in on_ranks(c, plan, body):
        assert len(parts) > 2
        assert len({storage for storage, _, _ in parts}) == 1
        assert all(end <= start for (_, _, end), (_, start, _) in pairwise(parts))


def test_backward_twice_needs_retain_graph() -> None:
    c = case("mlp")
    hap = lone(c)
    loss = loss_of(hap(**c.batch))
    loss.backward(retain_graph=True)
    once = hap.full_gradients()
    loss.backward()
    for name, value in hap.full_gradients().items():
        torch.testing.assert_close(value, 2 * once[name], **CLOSE)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_changing_what_backward_needs_is_noticed() -> None:
    c = case("mlp")
    hap = lone(c)
    loss = loss_of(hap(**c.batch))
    with torch.no_grad():
        hap.module.b.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_through_another_output_is_refused() -> None:
    c = case("mlp")
    hap = lone(c)
    output = hap(**c.batch)
    with pytest.raises(GradientError, match="not the loss"):
        (output["loss"] + output["logits"].sum()).backward()
    assert all(p.grad is None for p in hap.parameters())


def test_outputs_have_the_models_structure() -> None:
    c = case("attention", dropout=0.0)
    want = c.model(**c.batch)
    plan = random_plan(c, 3, 2)
    form = plan.program.outputs[1].form
    for gather in (False, True):
        results = on_ranks(c, plan, lambda hap: hap(**c.batch), gather_outputs=gather)
        for loss, _ in results:
            torch.testing.assert_close(loss.detach(), want[0].detach(), **CLOSE)
        logits = [r[1].detach() for r in results]
        if gather or form != 2:
            assert all(v.shape == want[1].shape for v in logits)
        whole = logits[0] if gather or form != 2 else torch.cat(logits)
        torch.testing.assert_close(whole, want[1].detach(), **CLOSE)


def test_rows_tile_the_output() -> None:
    c = case("mlp")
    want = c.model(**c.batch)["logits"].detach()
    for seed in range(12):
        plan = random_plan(c, 3, seed)
        if plan.program.outputs[1].form == 2:
            break
    else:
        pytest.fail("no plan leaves the logits in rows")
    parts = [o["logits"].detach() for o in on_ranks(c, plan, lambda hap: hap(**c.batch))]
    torch.testing.assert_close(torch.cat(parts), want, **CLOSE)
    wholes = on_ranks(c, plan, lambda hap: hap(**c.batch)["logits"].detach(), gather_outputs=True)
    for whole in wholes:
        torch.testing.assert_close(whole, want, **CLOSE)


def test_buffers_are_updated_in_place() -> None:
    c = case("conv")
    single = copy.deepcopy(c.model)
    single(**c.batch)
    hap = lone(c)
    kept = hap.module.norm.running_mean
    hap(**c.batch)
    assert hap.module.norm.running_mean is kept
    torch.testing.assert_close(kept, single.norm.running_mean, **CLOSE)
    assert hap.module.norm.num_batches_tracked.item() == 1


def test_no_grad_runs_forward_only() -> None:
    c = case("mlp")
    hap = lone(c)
    with torch.no_grad():
        loss = loss_of(hap(**c.batch))
    assert not loss.requires_grad
    assert len(hap._plans.entries) == 1


@pytest.mark.parametrize("lowered", [True, False])
def test_outputs_end_with_the_last_reference(lowered: bool) -> None:
    """Not when circles of references are looked for: logits may be gigabytes."""
    c = case("mlp")
    hap = lone(c)
    if lowered:
        hap.run_lowered()
    gc.collect()
    gc.disable()
    try:
        output = hap(**c.batch)
        ends = [weakref.ref(t) for t in output.values()]
        output["loss"].backward()
        del output
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()
