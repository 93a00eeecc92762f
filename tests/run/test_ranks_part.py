"""Ranks that part are told so, every one of them, with the rank, the step and what differs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import loss_of, on_ranks
from small_models import Case, case
from small_plans import cluster, random_plan

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import (
    BatchMismatchError,
    CollectiveMismatchError,
    DeviceError,
    HetspmdError,
    OptionError,
    ParameterMismatchError,
)
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.run.replicas import ROUND_STEPS
from hetspmd.search import constraints as known

WORLD = 4
ODD = 2

Body = Callable[[HAP, Case], Any]


def even_plan(c: Case, world: int = WORLD) -> Plan:
    """Data parallelism: every parameter is replicated."""
    ratios = (tuple(1.0 / world for _ in range(world)),)
    return plan_for(c.theory, cluster(*range(1, world + 1)), known.data_parallel(c.theory), ratios)


def errors_of(c: Case, plan: Plan, body: Body, kind: type[HetspmdError], **options: Any) -> list[str]:
    """What every rank is told; all of them are told."""

    def caught(hap: HAP) -> str:
        with pytest.raises(kind) as found:
            body(hap, c)
        return str(found.value)

    return on_ranks(c, plan, caught, **options)


def train(hap: HAP, batch: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
    loss_of(hap(**batch)).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def changed(batch: dict[str, Any], **tensors: torch.Tensor) -> dict[str, Any]:
    return {**batch, **tensors}


def permuted(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


def one_element(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[-1] += 1
    return x


def negative(x: torch.Tensor) -> torch.Tensor:
    return -x


def with_nan(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[3] = float("nan")
    return x


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("change", [permuted, one_element, negative, with_nan])
def test_another_batch(change: Callable[[torch.Tensor], torch.Tensor], seed: int) -> None:
    c = case("mlp")
    plan = random_plan(c, WORLD, seed)

    def body(hap: HAP, c: Case) -> None:
        train(hap, c.batch)
        train(hap, c.batch)
        batch = changed(c.batch, x=change(c.batch["x"])) if hap.rank == ODD else c.batch
        train(hap, batch)

    for text in errors_of(c, plan, body, BatchMismatchError):
        assert f"at step 3 rank {ODD} was given another x than ranks 0, 1 and 3" in text


def test_other_labels_and_every_rank_another() -> None:
    c = case("mlp")
    plan = random_plan(c, WORLD, 2)

    def labels(hap: HAP, c: Case) -> None:
        train(hap, c.batch)
        train(hap, changed(c.batch, labels=c.batch["labels"].flip(0)) if hap.rank < 2 else c.batch)

    def all_differ(hap: HAP, c: Case) -> None:
        train(hap, c.batch)
        train(hap, changed(c.batch, x=c.batch["x"] + hap.rank))

    for text in errors_of(c, plan, labels, BatchMismatchError):
        assert "at step 2 ranks 2 and 3 was given another labels than ranks 0 and 1" in text
    for text in errors_of(c, plan, all_differ, BatchMismatchError):
        assert "at step 2 every rank was given another x" in text


def test_equal_batches_of_other_strides_are_equal() -> None:
    c = case("mlp")

    def body(hap: HAP) -> None:
        x = c.batch["x"]
        if hap.rank == 1:
            x = x.t().contiguous().t()
        if hap.rank == 2:
            x = torch.cat((x, x))[: len(x)]
        for _ in range(3):
            train(hap, changed(c.batch, x=x))

    on_ranks(c, random_plan(c, WORLD, 1), body)


@pytest.mark.parametrize("known_before", [True, False])
def test_another_shape(known_before: bool) -> None:
    """The odd rank has a plan for its shape, or must make one."""
    c = case("mlp")
    short = {k: v[:6] for k, v in c.batch.items()}

    def body(hap: HAP, c: Case) -> None:
        train(hap, c.batch)
        if known_before:
            train(hap, short)
            train(hap, c.batch)
        train(hap, short if hap.rank == ODD else c.batch)

    for text in errors_of(c, even_plan(c), body, BatchMismatchError):
        assert f"rank {ODD} called the model in another mode or on a batch of another shape" in text
        assert "[6, 6]" in text
        assert "[9, 6]" in text


@pytest.mark.parametrize("known_before", [True, False])
def test_another_mode(known_before: bool) -> None:
    c = case("conv")

    def body(hap: HAP, c: Case) -> None:
        train(hap, c.batch)
        if known_before:
            hap.eval()
            hap(**c.batch)
            hap.train()
            train(hap, c.batch)
        if hap.rank == ODD:
            hap.eval()
        hap(**c.batch)

    for text in errors_of(c, even_plan(c), body, BatchMismatchError):
        assert f"rank {ODD} called the model in another mode" in text
        assert f"rank {ODD}: eval mode" in text
        assert "ranks 0, 1 and 3: train mode" in text


@pytest.mark.parametrize("what", ["no_grad", "autocast", "frozen"])
def test_modes_of_torch(what: str) -> None:
    c = case("mlp", torch.float32)

    def body(hap: HAP, c: Case) -> None:
        train(hap, c.batch)
        odd = hap.rank == ODD
        if what == "frozen" and odd:
            hap.module.get_parameter("b.bias").requires_grad_(False)
        grad, cast = torch.set_grad_enabled(not (odd and what == "no_grad")), what == "autocast" and odd
        with grad, torch.autocast("cpu", torch.bfloat16, enabled=cast):
            hap(**c.batch)

    told = {"no_grad": "gradients off", "autocast": "autocast bfloat16", "frozen": "2 parameters frozen"}
    for text in errors_of(c, even_plan(c), body, BatchMismatchError):
        assert f"rank {ODD} called the model in another mode" in text
        assert told[what] in text
        assert f"rank {ODD}: train mode; gradients {'off' if what == 'no_grad' else 'on'}" in text
        assert "ranks 0, 1 and 3: train mode; gradients on;" in text, text


def test_a_batch_that_is_refused_on_one_rank() -> None:
    """The rank gets its own error; the others need not wait for it."""
    c = case("mlp")
    plan = even_plan(c)

    def body(hap: HAP) -> str:
        train(hap, c.batch)
        batch = c.batch
        if hap.rank == ODD:
            batch = changed(batch, x=batch["x"].to("meta"))
        with pytest.raises(DeviceError if hap.rank == ODD else BatchMismatchError) as found:
            train(hap, batch)
        return str(found.value)

    for text in on_ranks(c, plan, body):
        assert "on meta" in text


def clipped(hap: HAP) -> None:
    torch.nn.utils.clip_grad_norm_(hap.parameters(), 1.0)


def scaled(hap: HAP) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(hap.parameters(), lr=0.1))


@pytest.mark.parametrize("some", [{ODD}, set(range(WORLD)) - {ODD}, {0}])
@pytest.mark.parametrize("act", [clipped, hetspmd.get_total_norm, scaled])
def test_some_ranks_clip_or_scale(act: Callable[[HAP], Any], some: set[int]) -> None:
    """No rank hangs. Collectives that do not belong together are met here, in processes (``clips`` of
    ``part_worker.py``) what the ranks say."""
    c = case("mlp")

    def body(hap: HAP, c: Case) -> None:
        for step in range(4):
            train(hap, c.batch)
            if step < 2 or hap.rank in some:
                act(hap)

    with pytest.raises(CollectiveMismatchError):
        on_ranks(c, random_plan(c, WORLD, 1), lambda hap: body(hap, c))


@pytest.mark.parametrize("call", ["full_state_dict", "full_tensors", "full_gradients"])
def test_a_collective_call_on_some_ranks(call: str) -> None:
    c = case("mlp")

    def body(hap: HAP, c: Case) -> None:
        train(hap, c.batch)
        if hap.rank == 0:
            getattr(hap, call)()
        train(hap, c.batch)

    for text in errors_of(c, random_plan(c, WORLD, 1), body, CollectiveMismatchError):
        assert f"ranks 1, 2 and 3 in step 2, rank 0 in {call}()" in text


def test_a_rank_that_leaves_a_batch_out_and_comes_to_evaluation_first() -> None:
    c = case("conv")

    def body(hap: HAP, c: Case) -> None:
        for _ in range(2 if hap.rank == ODD else 3):
            train(hap, c.batch)
        hap.eval()
        with torch.no_grad():
            hap(**c.batch)

    for text in errors_of(c, even_plan(c), body, BatchMismatchError):
        assert f"at step 3 rank {ODD} called the model in another mode" in text


def test_a_backward_on_some_ranks() -> None:
    c = case("mlp")

    def body(hap: HAP) -> None:
        train(hap, c.batch)
        loss = loss_of(hap(**c.batch))
        if hap.rank != ODD:
            loss.backward()
        train(hap, c.batch)

    with pytest.raises(CollectiveMismatchError, match=r"last: rank 0 in .*step 2, .*rank 2 in step 3"):
        on_ranks(c, even_plan(c), body)


def test_a_second_backward_on_one_rank() -> None:
    c = case("mlp")

    def body(hap: HAP, c: Case) -> None:
        loss = loss_of(hap(**c.batch))
        loss.backward(retain_graph=True)
        if hap.rank == ODD:
            loss.backward()
        train(hap, c.batch)

    for text in errors_of(c, even_plan(c), body, CollectiveMismatchError):
        assert f"ranks 0, 1 and 3 in step 2, rank {ODD} in another backward of step 1" in text


def test_modules_in_another_order() -> None:
    c = case("mlp")
    plan = even_plan(c)
    models = [[copy.deepcopy(c.model) for _ in range(2)] for _ in range(WORLD)]
    _ = plan.theory, plan.digest

    def in_order(modules: list[HAP]) -> None:
        for hap in modules:
            train(hap, c.batch)

    def rank(communicator: Communicator) -> str:
        pair = [
            HAP(m, plan.cluster, plan=plan, process_group=communicator) for m in models[communicator.rank]
        ]
        for hap in pair:
            train(hap, c.batch)
        with pytest.raises(CollectiveMismatchError) as found:
            in_order(pair[::-1] if communicator.rank == ODD else pair)
        return str(found.value)

    for text in run_ranks(WORLD, rank):
        assert f"ranks 0, 1 and 3 in step 2 of HAP module 0, rank {ODD} in step 2 of HAP module 1" in text


def edited(hap: HAP, c: Case) -> None:
    if hap.rank == ODD:
        with torch.no_grad():
            hap.module.get_parameter("a.weight").view(-1)[5] += 1e-12
    for _ in range(ROUND_STEPS):
        hap(**c.batch)


def other_rate(hap: HAP, c: Case) -> None:
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1 if hap.rank != ODD else 0.11)
    for _ in range(3):
        train(hap, c.batch, optimizer)


def own_clipping(hap: HAP, c: Case) -> None:
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    for _ in range(3):
        loss_of(hap(**c.batch)).backward()
        for p in hap.parameters():
            if p.grad is not None:
                p.grad.clamp_(-1e-3 * (hap.rank + 1), 1e-3 * (hap.rank + 1))
        optimizer.step()


def loaded_alone(hap: HAP, c: Case) -> None:
    state = {k: v + 1.0 for k, v in hap.full_state_dict().items()}
    if hap.rank == ODD:
        hap.load_full_state_dict(state)
    hap(**c.batch)


def other_randomness(hap: HAP, c: Case) -> None:
    hap.use_randomness(Randomness(int(hap.rank == ODD), hap.rank, torch.device("cpu")))
    for _ in range(ROUND_STEPS):
        hap(**c.batch)


@pytest.mark.parametrize("body", [edited, other_rate, own_clipping, loaded_alone, other_randomness])
def test_copies_that_part(body: Body) -> None:
    c = case("mlp")
    for text in errors_of(c, even_plan(c), body, ParameterMismatchError):
        if body in (other_rate, loaded_alone):
            assert (
                f"rank {ODD}: {'a step of SGD with lr 0.11' if body is other_rate else 'load_state_dict'}"
                in text
            )
            continue
        assert "a whole copy of it on every rank" in text
        if body is not own_clipping:
            assert f"rank {ODD} held another" in text


def test_a_buffer_that_parts() -> None:
    c = case("conv")

    def body(hap: HAP, c: Case) -> None:
        if hap.rank == ODD:
            hap.module.get_buffer("norm.num_batches_tracked").add_(1)
        for _ in range(ROUND_STEPS):
            hap(**c.batch)

    for text in errors_of(c, even_plan(c), body, ParameterMismatchError):
        assert f"rank {ODD} held another norm.num_batches_tracked" in text


def test_training_as_it_should_be_is_not_disturbed() -> None:
    """Accumulation, evaluation in between, another shape, two losses of one backward, frozen parts."""
    c = case("attention")

    def body(hap: HAP) -> None:
        optimizer = torch.optim.AdamW(hap.parameters(), lr=1e-2)
        for _ in range(3):
            train(hap, c.batch)
            train(hap, c.batch, optimizer)
            hap.eval()
            with torch.no_grad():
                hap(**c.batch)
            hap.train()
            (loss_of(hap(**c.batch)) + loss_of(hap(**c.batch))).backward()
            optimizer.step()
            hap.full_state_dict()

    on_ranks(c, even_plan(c), body)


def test_unchecked() -> None:
    """Every rank may have rows of its own; the same is asked of all ranks."""
    c = case("mlp")
    plan = even_plan(c)

    def body(hap: HAP) -> None:
        train(hap, changed(c.batch, x=c.batch["x"] + hap.rank))

    on_ranks(c, plan, body, check_batches=False)
    models = [copy.deepcopy(c.model) for _ in range(WORLD)]

    def rank(communicator: Communicator) -> str:
        with pytest.raises(OptionError) as found:
            HAP(
                models[communicator.rank], plan.cluster, plan=plan, process_group=communicator,
                check_batches=communicator.rank != ODD,
            )  # fmt: skip
        return str(found.value)

    for text in run_ranks(WORLD, rank):
        assert f"rank {ODD} was made with check_batches=False" in text
