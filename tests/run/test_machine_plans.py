"""Machines of several accelerators: HAP on plans across them equals the single device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from machine_plans import machine_plan, machines
from ranks import CLOSE, loss_of, on_ranks, own_gradient
from small_models import Case, case
from torch import nn

import hetspmd
from hetspmd.cluster.machines import flat, ranks_of
from hetspmd.dist.machine_levels import MachineRuntime
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import PlanError, WorldSizeError
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain


def quiet(name: str) -> Case:
    return case(name, **({"dropout": 0.0} if name == "attention" else {}))


def trained(c: Case, model: nn.Module, run: Any, steps: int = 2) -> list[float]:
    """Losses of steps that clip, and of an evaluation."""
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(run(**c.batch))
        loss.backward()
        clip = hetspmd.clip_grad_norm_ if isinstance(run, HAP) else nn.utils.clip_grad_norm_
        losses.append(float(clip(run.parameters(), 0.5)))
        losses.append(loss.item())
        optimizer.step()
    run.eval()
    with torch.no_grad():
        losses.append(loss_of(run(**c.batch)).item())
    run.train()
    return losses


PLANS = [
    ("mlp", (2, 1, 3), 1, None), ("mlp", (3, 2), 2, None), ("mlp", (2, 3, 1), 4, (0, 2)), ("mlp", (4, 1), 3, None),
    ("conv", (2, 3), 2, None), ("conv", (2, 2, 2), 4, (1,)), ("attention", (3, 1), 2, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "accelerators", "seed", "active"), PLANS)
def test_training_equals_the_single_device(
    name: str, accelerators: tuple[int, ...], seed: int, active: tuple[int, ...] | None
) -> None:
    """Loss, norms, parameters, buffers, evaluation by a plan of its own, loading and continuing; some machines are
    idle, some shards empty."""
    c = quiet(name)
    single = copy.deepcopy(c.model)
    losses = trained(c, single, single)
    again = trained(c, single, single)
    plan = machine_plan(c, accelerators, seed, active)
    want = {**dict(single.named_parameters()), **dict(single.named_buffers())}

    def body(hap: HAP) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, Any], list[int]]:
        first = trained(c, hap.module, hap)
        state = hap.full_state_dict()
        hap.load_full_state_dict(state)
        second = trained(c, hap.module, hap)
        return (
            first,
            second,
            hap.full_tensors(),
            hap.full_state_dict(),
            [p.numel() for p in plain(hap.parameters())],
        )

    results = on_ranks(c, plan, body)
    busy = ranks_of(plan.cluster, plan.active)
    assert len(results) == sum(accelerators)
    for rank, (first, second, tensors, state, sizes) in enumerate(results):
        assert first == pytest.approx(losses, rel=1e-9)
        assert second == pytest.approx(again, rel=1e-9)
        assert rank in busy or not sum(sizes)
        for key, value in want.items():
            if rank in busy or not value.dtype.is_floating_point or key in dict(single.named_parameters()):
                torch.testing.assert_close(tensors[key], value.detach(), **CLOSE)
        for key, value in single.state_dict().items():
            torch.testing.assert_close(state[key], value, **CLOSE)


@pytest.mark.parametrize("name", ["mlp", pytest.param("conv", marks=pytest.mark.slow)])
def test_training_in_segments_equals_the_single_device(name: str) -> None:
    """With an evaluation by a plan of its own, in the same segments."""
    c = quiet(name)
    single = copy.deepcopy(c.model)
    losses = trained(c, single, single)
    plan = hetspmd.compile(c.model, c.batch, machines(2, 1, 3), machines="virtual", segments=2)
    assert plan.inside is not None
    assert plan.graph.segment_count == 2
    results = on_ranks(c, plan, lambda hap: (trained(c, hap.module, hap), hap.full_state_dict()))
    for got, state in results:
        assert got == pytest.approx(losses, rel=1e-9)
        for key, value in single.state_dict().items():
            torch.testing.assert_close(state[key], value, **CLOSE)


def test_accelerators_of_a_machine_store_the_same() -> None:
    c = quiet("mlp")
    plan = machine_plan(c, (2, 3), 4)
    layout = plan.parameter_layout()
    assert any(is_sharded(form) for form, _ in layout.values())

    def body(hap: HAP) -> dict[str, torch.Tensor]:
        loss_of(hap(**c.batch)).backward()
        found = {n: own_gradient(p) for n, p in hap.module.named_parameters() if p.grad is not None}
        counted = {n: hap.counts(n) for n in layout}
        return {"counted": counted, **found}

    results = on_ranks(c, plan, body)
    for machine in ((0, 1), (2, 3, 4)):
        first, *others = (results[rank] for rank in machine)
        for other in others:
            assert not any(other["counted"].values())
            for name in first:
                if name != "counted":
                    assert torch.equal(first[name], other[name])
    for name, (form, extents) in layout.items():
        counting = [rank for rank, r in enumerate(results) if r["counted"][name]]
        assert counting == (
            [r for r, e in zip((0, 2), extents, strict=True) if e] if is_sharded(form) else [0]
        )


@pytest.mark.parametrize("gather", [False, True])
def test_outputs(gather: bool) -> None:
    """Rows in rank order, or whole."""
    c = quiet("attention")
    want = c.model(**c.batch)[1].detach()
    for seed in range(1, 4):
        plan = machine_plan(c, (2, 3), seed)
        results = on_ranks(c, plan, lambda hap: hap(**c.batch)[1].detach(), gather_outputs=gather)
        divided = plan.program.outputs[1].form == 2
        if divided and not gather:
            torch.testing.assert_close(torch.cat(results), want, **CLOSE)
            continue
        for got in results:
            torch.testing.assert_close(got, want, **CLOSE)


def test_random_numbers_are_the_same_where_tensors_are() -> None:
    """With dropout and numbers of their own, accelerators of a machine keep the same parameters, and the machines
    those that none of them divides; the parts of a mask that one machine holds are not alike."""
    c = case("attention", dropout=0.5)
    for seed in (1, 2, 4):
        plan = machine_plan(c, (2, 3), seed)
        layout = plan.parameter_layout()

        def body(hap: HAP) -> dict[str, torch.Tensor]:
            optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(hap(**c.batch)).backward()
                optimizer.step()
            return {n: p.detach() for n, p in hap.module.named_parameters()}

        results = on_ranks(c, plan, body)
        for rank, found in enumerate(results):
            first = 0 if rank < 2 else 2
            for name, value in found.items():
                torch.testing.assert_close(value, results[first][name], **CLOSE)
                if not is_sharded(layout[name][0]):
                    torch.testing.assert_close(value, results[0][name], **CLOSE)


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("conv", "attention"))]
)
def test_compiled_both_ways(name: str) -> None:
    """Verified, with dropout; the cheaper one is kept, with the other one's seconds."""
    c = case(name)
    cluster = machines(2, 1, 3)
    plans = {
        way: hetspmd.compile(c.model, c.batch, cluster, machines=way) for way in ("virtual", "flat", "auto")
    }
    assert plans["virtual"].inside is not None
    assert plans["flat"].inside is None
    assert plans["flat"].cluster == flat(cluster)
    seconds = {way: plan.cost.step_seconds for way, plan in plans.items()}
    assert seconds["auto"] == min(seconds.values())
    other = "single_accelerators" if plans["auto"].inside else "virtual_devices"
    assert plans["auto"].baselines[other] == max(seconds.values())
    for plan in plans.values():
        assert hetspmd.verify(c.model, c.batch, cluster, plan=plan).ok
        assert Plan.from_json(plan.to_json()) == plan
        assert str(plan)


def test_hap_compiles_takes_other_batches_and_records_them() -> None:
    c = quiet("mlp")
    cluster = machines(2, 3)
    models = [copy.deepcopy(c.model) for _ in range(cluster.ranks)]
    smaller = {key: value[:5] for key, value in c.batch.items()}
    want = [loss_of(c.model(**batch)).item() for batch in (c.batch, smaller)]

    def rank(communicator: Any) -> list[float]:
        hap = HAP(
            models[communicator.rank],
            cluster,
            example=c.batch,
            process_group=communicator,
            machines="virtual",
        )
        assert isinstance(hap._runtime, MachineRuntime)
        with hap.record() as recording:
            found = [loss_of(hap(**batch)).item() for batch in (c.batch, smaller)]
        graphs = [(r.plan, r.graph) for r in recording.measured.runs if r.device == hap.rank]
        assert graphs == [(0, "forward"), (1, "forward")]
        hap.use_randomness(Randomness(1, hap.rank, torch.device("cpu")))
        return found

    for found in run_ranks(cluster.ranks, rank):
        assert found == pytest.approx(want, rel=1e-10)


def test_errors() -> None:
    c = quiet("mlp")
    with pytest.raises(WorldSizeError, match="has 5 devices"):
        HAP(copy.deepcopy(c.model), machines(2, 3), example=c.batch)
    with pytest.raises(hetspmd.errors.OptionError, match="allowed are 'auto', 'virtual' and 'flat'"):
        hetspmd.compile(c.model, c.batch, machines(2, 3), machines="both")
    plan = machine_plan(c, (2, 3), 2)

    with pytest.raises(PlanError, match="says nothing of their accelerators"):
        plan.with_step(inside=None)
