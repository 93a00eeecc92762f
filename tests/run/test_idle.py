"""Plans that leave devices idle: the same numbers as one device, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from ranks import CLOSE, loss_of, on_ranks
from small_models import Case, case
from small_plans import cluster
from torch import nn

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import CollectiveMismatchError, PlanError
from hetspmd.lower import lower_plan
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import REPLICATE, shard
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain
from hetspmd.search.constraints import Constraints, named_tensors
from hetspmd.verify.comparison import verify

T = TypeVar("T")
SUBSETS = [(0,), (2,), (0, 2), (1, 2), (0, 1, 2)]


def idle_plan(c: Case, active: tuple[int, ...], forms: dict[str, int] | None = None) -> Plan:
    """The best program on some of three devices, with shares 1 : 2 : ... ."""
    total = sum(range(1, len(active) + 1))
    ratios = tuple((i + 1) / total for i in range(len(active)))
    names = named_tensors(c.theory)
    fixed = Constraints({names[n]: form for n, form in (forms or {}).items()})
    return plan_for(c.theory, cluster(1, 2, 3), fixed, ratios, active=active)


def trained(model: nn.Module, batch: dict[str, Any]) -> list[float]:
    """Three steps of AdamW; their losses."""
    step = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for _ in range(3):
        step.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()
        losses.append(loss.item())
        step.step()
    return losses


@pytest.mark.parametrize("active", SUBSETS)
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_training_equals_the_single_device(name: str, active: tuple[int, ...]) -> None:
    c = case(name)
    single = copy.deepcopy(c.model)
    losses = trained(single, c.batch)
    plan = idle_plan(c, active)
    want = single.state_dict()

    def body(hap: HAP) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], list[int]]:
        seen = trained(hap, c.batch)
        return seen, hap.full_tensors(), hap.full_state_dict(), [p.numel() for p in plain(hap.parameters())]

    for rank, (seen, tensors, state, sizes) in enumerate(on_ranks(c, plan, body)):
        assert seen == pytest.approx(losses, rel=1e-10)
        assert set(tensors) == set(state) == set(want)
        for key, value in want.items():
            torch.testing.assert_close(tensors[key], value, **CLOSE)
            torch.testing.assert_close(state[key], value, **CLOSE)
        assert (sum(sizes) == 0) == (rank not in active)


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_verify_knows_idle_devices(name: str) -> None:
    c = case(name)
    for active in ((1,), (0, 2)):
        report = verify(c.model, c.batch, cluster(1, 2, 3), plan=idle_plan(c, active))
        assert report.ok, report.text


def test_idle_ranks_keep_names_gradients_and_frozen_parameters() -> None:
    c = case("mlp")
    plan = idle_plan(c, (1,))

    def body(hap: HAP) -> tuple[list[tuple[str, bool, int]], dict[str, Any], torch.Size]:
        loss = hap(**c.batch)["loss"]
        assert loss.requires_grad
        (2.0 * loss).backward()
        named = list(hap.module.named_parameters())
        grads = {n: None if p.grad is None else p.grad.shape == p.shape for n, p in named}
        return (
            [(n, p.requires_grad, p.dim()) for n, p in named],
            grads,
            hap.full_gradients()["a.weight"].shape,
        )

    results = on_ranks(c, plan, body)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == [(n, p.requires_grad, p.dim()) for n, p in c.model.named_parameters()]
    assert results[0][1] == {n: None if n in ("scale", "unused") else True for n in results[0][1]}


class Scaled(nn.Module):
    """A scalar parameter, and an output without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.linear(x) * self.scale
        return y.square().mean(), y, y.detach().amax(0)


def test_scalar_parameters_and_whole_outputs() -> None:
    from hetspmd.rules.theory import derive
    from hetspmd.trace.trace import trace

    model = Scaled().double()
    batch = {"x": torch.randn(8, 6, dtype=torch.float64)}
    c = Case(model, batch, derive(trace(model, (), batch)))
    want = model(**batch)
    plan = idle_plan(c, (1,))
    network = plan.cluster.network
    assert network is not None
    sent = 2 * network.latency + (8 + 4 * 8) / network.bandwidth
    assert plan.cost.communication_seconds == pytest.approx(sent)

    def body(hap: HAP) -> tuple[Any, torch.Size, torch.Tensor]:
        out = hap(**batch)
        out[0].backward()
        module: Any = hap.module
        return [o.detach() for o in out], plain([module.scale])[0].shape, hap.full_gradients()["scale"]

    want[0].backward()
    for gather in (False, True):
        for rank, (out, shape, gradient) in enumerate(on_ranks(c, plan, body, gather_outputs=gather)):
            torch.testing.assert_close(out[0], want[0].detach(), **CLOSE)
            torch.testing.assert_close(out[2], want[2], **CLOSE)
            whole = rank == 1 or gather
            torch.testing.assert_close(out[1], want[1].detach()[: None if whole else 0], **CLOSE)
            assert shape == (() if rank == 1 else (0,))
            torch.testing.assert_close(gradient, model.scale.grad, **CLOSE)


def test_outputs_are_rows_or_whole() -> None:
    c = case("mlp")
    want = c.model(**c.batch)["logits"].detach()

    def body(hap: HAP) -> torch.Tensor:
        out: torch.Tensor = hap(**c.batch)["logits"]
        return out.detach()

    for active in ((1,), (0, 2)):
        plan = idle_plan(c, active)
        assert plan.program.outputs[-1].form == shard(0)
        rows = on_ranks(c, plan, body)
        torch.testing.assert_close(torch.cat(rows), want, **CLOSE)
        assert rows[1 if active == (0, 2) else 0].shape == (0, 5)
        pinned = idle_plan(c, active, {"output[1]": REPLICATE})
        assert pinned.cost.communication_seconds > plan.cost.communication_seconds
        for whole in (*on_ranks(c, plan, body, gather_outputs=True), *on_ranks(c, pinned, body)):
            torch.testing.assert_close(whole, want, **CLOSE)


def test_evaluation_and_other_batches_keep_the_active_devices() -> None:
    c = case("conv")
    batch = {"image": c.batch["image"][:3], "labels": c.batch["labels"][:3]}
    single = copy.deepcopy(c.model)
    want = [single(**batch).item()]
    single.eval()
    want.append(single(**c.batch).item())
    plan = idle_plan(c, (0, 2))

    def body(hap: HAP) -> tuple[list[float], set[tuple[int, ...]]]:
        losses = [hap(**batch).item()]
        hap.eval()
        with torch.no_grad():
            losses.append(hap(**c.batch).item())
        return losses, {e.plan.active for e in hap._plans.entries}

    for losses, active in on_ranks(c, plan, body):
        assert losses == pytest.approx(want, rel=1e-10)
        assert active == {(0, 2)}


def test_state_dicts_move_between_plans() -> None:
    c = case("conv")
    idle, all_active = idle_plan(c, (2,)), idle_plan(c, (0, 1, 2))
    single = copy.deepcopy(c.model)
    trained(single, c.batch)
    want = trained(single, c.batch)

    def first(hap: HAP) -> dict[str, Any]:
        trained(hap, c.batch)
        return hap.full_state_dict()

    def resumed(state: dict[str, Any]) -> Callable[[HAP], list[float]]:
        def second(hap: HAP) -> list[float]:
            hap.load_full_state_dict(state)
            return trained(hap, c.batch)

        return second

    for before, after in ((idle, all_active), (all_active, idle)):
        states = on_ranks(c, before, first)
        for state in states:
            for losses in on_ranks(c, after, resumed(state)):
                assert losses == pytest.approx(want, rel=1e-10)
    only = on_ranks(c, idle, lambda hap: hap.full_state_dict(rank0_only=True))
    assert [bool(s) for s in only] == [True, False, False]


def test_other_ranks_start_from_rank_zero_though_it_is_idle() -> None:
    c = case("mlp")
    plan = idle_plan(c, (2,))
    models = [copy.deepcopy(c.model) for _ in range(3)]
    for model in models[1:]:
        for p in model.parameters():
            p.data.add_(1.0)
    _ = plan.theory, plan.digest

    def body(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = models[communicator.rank]
        return HAP(model, plan.cluster, plan=plan, process_group=communicator).full_tensors()

    for tensors in run_ranks(3, body):
        torch.testing.assert_close(tensors["a.weight"], c.model.get_parameter("a.weight").detach())


def test_plans_with_idle_devices_are_stored_and_told_apart() -> None:
    c = case("mlp")
    plan, other = idle_plan(c, (1,)), idle_plan(c, (2,))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest != other.digest
    assert plan.idle == (0, 2)
    assert plan.shares == (0.0, 1.0, 0.0)
    assert plan.cost.memory_bytes[0] == plan.cost.memory_bytes[2] == 0 < plan.cost.memory_bytes[1]
    assert plan.cost.per_device_compute[0] == 0.0 < plan.cost.per_device_compute[1]
    text = str(plan)
    assert text.count("idle  ") == 2
    assert "# idle, forward" in str(lower_plan(plan, 0, torch.device("cpu")))
    for active in ((1, 0), (0, 0), (3,), (0, 1)):
        with pytest.raises(PlanError):
            plan.with_step(active=active)


def test_ranks_that_wait_in_different_groups_stop() -> None:
    def crossed(comm: Communicator) -> None:
        part = comm.split([[0, 1], [2]])
        if comm.rank == 0:
            part.all_reduce(torch.ones(1)).wait()
        comm.exchange(0)

    def absent(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.split([[0, 1], [2]]).exchange(0)

    for body in (crossed, absent):
        with pytest.raises(CollectiveMismatchError, match="same program"):
            run_ranks(3, body)


def test_parts_add_up() -> None:
    def body(comm: Communicator) -> list[float]:
        value = torch.tensor([float(comm.rank)])
        part = comm.split([[1, 3], [0], [2]])
        part.all_reduce(value).wait()
        again = comm.split([[0, 1, 3], [2]])
        again.all_reduce(value).wait()
        assert comm.split([range(4)]) is comm
        return [part.rank, part.world, again.world, value.item()]

    assert run_ranks(4, body) == [[0, 1, 3, 8.0], [0, 2, 3, 8.0], [0, 1, 1, 2.0], [1, 2, 3, 8.0]]
