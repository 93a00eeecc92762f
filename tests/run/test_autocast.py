"""Mixed precision as users of DistributedDataParallel write it: autocast around the call, pure bfloat16, scaling.

Two programs that round to bfloat16 in another order differ by its rounding. So each is compared with the step in
float64: the ranks' error may be a small multiple of the single device's own, and on one device the matrix
products are equal bit for bit. That the sharded program is the right one is proved apart from rounding, by
``verify`` in float64.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import lone, loss_of, on_ranks
from small_models import Case, case
from small_plans import cluster, random_plan, segmented_plan
from torch import nn

import hetspmd
from hetspmd.errors import BatchMismatchError
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import derive
from hetspmd.run.module import HAP
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import verify

WORLD = 3
NAMES = ("mlp", "conv", "attention")


def bf16(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


def mixed(name: str, **options: Any) -> Case:
    """A model with float32 parameters and the theory of its step under autocast."""
    c = case(name, torch.float32, **options)
    with bf16():
        return Case(c.model, c.batch, derive(trace(c.model, (), c.batch), strict=True))


def single(c: Case, dtype: torch.dtype | None, *, autocast: bool) -> dict[str, torch.Tensor]:
    """Loss and gradients of one device."""
    model = copy.deepcopy(c.model)
    batch = c.batch
    if dtype is not None:
        model = model.to(dtype)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model(**batch))
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """By tensor, relative to the largest element (of the loss: to itself)."""
    assert set(got) == set(want)
    peak = max(float(v.abs().max()) for k, v in want.items() if k != "loss")
    scale = {k: float(want[k].abs()) if k == "loss" else peak for k in want}
    return {k: float((got[k].double() - want[k]).abs().max()) / scale[k] for k in want}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [2, 5, 6, 0])
def test_ranks_are_as_exact_as_one_device(name: str, seed: int) -> None:
    """Random uneven programs, with empty shards; parameters and gradients stay float32."""
    options = {"dropout": 0.0} if name == "attention" else {}
    c = mixed(name, **options)
    plan = random_plan(c, WORLD, seed) if seed else segmented_plan(c, WORLD)
    truth = single(c, torch.float64, autocast=False)
    alone = errors(single(c, None, autocast=True), truth)
    full = errors(single(c, None, autocast=False), truth)
    assert max(alone.values()) > 30 * max(full.values()), "autocast rounds, float32 does not"

    def body(hap: HAP) -> tuple[dict[str, torch.Tensor], set[torch.dtype], int]:
        with bf16():
            loss = loss_of(hap(**c.batch))
        loss.backward()
        dtypes = {p.grad.dtype for p in hap.parameters() if p.grad is not None}
        return {"loss": loss.detach(), **hap.full_gradients()}, dtypes, len(hap._plans.entries)

    for got, dtypes, entries in on_ranks(c, plan, body):
        assert dtypes == {torch.float32}
        assert entries == 1, "the plan is that of the step under autocast"
        found = errors(got, truth)
        assert max(found.values()) <= 4 * max(alone.values())
        assert max(found.values()) > 3 * max(full.values()), "bfloat16 is computed in"


@pytest.mark.parametrize("name", NAMES)
def test_the_program_is_right_in_float64(name: str) -> None:
    c = mixed(name)
    for seed in (2, 5):
        plan = random_plan(c, WORLD, seed)
        assert plan.graph.autocast == "bfloat16"
        report = verify(c.model, c.batch, plan.cluster, plan=plan)
        assert report.ok, report.text


def test_verify_under_autocast_compiles_under_it() -> None:
    c = case("mlp", torch.float32)
    with bf16():
        report = verify(c.model, c.batch, cluster(2, 1))
        assert report.ok, report.text
        assert torch.is_autocast_enabled("cpu")


def test_one_device_gives_the_same_products_bit_by_bit() -> None:
    c = case("mlp", torch.float32)
    with bf16():
        hap = lone(c)
        got = hap(**c.batch)
        want = c.model(**c.batch)
    assert got["logits"].dtype == want["logits"].dtype == torch.bfloat16
    assert torch.equal(got["logits"], want["logits"])
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-6, atol=0.0)  # a mean is a sum and a count
    got["loss"].backward()
    want["loss"].backward()
    for name, p in c.model.named_parameters():
        mine = hap.module.get_parameter(name).grad
        assert (mine is None) == (p.grad is None)
        if mine is not None and p.grad is not None:
            torch.testing.assert_close(mine, p.grad, rtol=2**-8, atol=1e-7)


def test_backward_may_be_called_inside() -> None:
    c = case("mlp", torch.float32)
    gradients = []
    for inside in (False, True):
        with bf16():
            hap = lone(c)
            loss = loss_of(hap(**c.batch))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append({n: p.grad for n, p in hap.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])


def test_each_state_has_a_plan_of_its_own() -> None:
    """Made outside autocast, called inside, in float16 and outside again; the shards stay."""
    c = case("mlp", torch.float32)
    plan = random_plan(c, WORLD, 2)

    def body(hap: HAP) -> list[tuple[str, int, tuple[torch.Size, ...]]]:
        seen = []
        for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                output = hap(**c.batch)
            output["loss"].backward()
            shapes = tuple(p.shape for p in hap.parameters())
            seen.append((str(output["logits"].dtype), len(hap._plans.entries), shapes))
        return seen

    for seen in on_ranks(c, plan, body):
        dtypes = [dtype.removeprefix("torch.") for dtype, _, _ in seen]
        assert dtypes == ["float32", "bfloat16", "float16", "float32", "bfloat16"]
        assert [entries for _, entries, _ in seen] == [1, 2, 3, 3, 3]
        assert len({shapes for _, _, shapes in seen}) == 1


def test_evaluation_under_autocast() -> None:
    c = case("conv", torch.float32)
    model = copy.deepcopy(c.model).eval()

    def body(hap: HAP) -> torch.Tensor:
        hap.eval()
        with torch.no_grad(), bf16():
            return loss_of(hap(**c.batch))

    with torch.no_grad(), bf16():
        want = loss_of(model(**c.batch))
    for got in on_ranks(c, random_plan(c, WORLD, 3), body):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.0)


def test_a_plan_file_remembers(tmp_path: Path) -> None:
    c = case("mlp", torch.float32)
    with bf16():
        plan = hetspmd.compile(c.model, c.batch, cluster(1))
    plan.save(tmp_path / "plan.json")
    hap = HAP(copy.deepcopy(c.model), cluster(1), plan=tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").digest == plan.digest
    with bf16():
        output = hap(**c.batch)
    assert output["logits"].dtype == torch.bfloat16
    assert len(hap._plans.entries) == 1


def test_ranks_in_different_states_are_told() -> None:
    c = case("mlp", torch.float32)
    plan = random_plan(c, 2, 2)

    def body(hap: HAP) -> None:
        with bf16(torch.float16 if hap.rank else torch.bfloat16):
            hap(**c.batch)

    with pytest.raises(BatchMismatchError, match="rank 0 runs under autocast bfloat16, rank 1 under float16"):
        on_ranks(c, plan, body)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_in_bfloat16(name: str) -> None:
    """``model.to(torch.bfloat16)``: everything is bfloat16, the gradients too."""
    options = {"dropout": 0.0} if name == "attention" else {}
    c = case(name, torch.bfloat16, **options)
    truth = single(c, torch.float64, autocast=False)
    alone = max(errors(single(c, None, autocast=False), truth).values())

    def body(hap: HAP) -> dict[str, torch.Tensor]:
        loss = loss_of(hap(**c.batch))
        loss.backward()
        assert all(p.grad.dtype == torch.bfloat16 for p in hap.parameters() if p.grad is not None)
        optimizer = torch.optim.AdamW(hap.parameters(), lr=1e-3)
        optimizer.step()
        return {"loss": loss.detach(), **hap.full_gradients()}

    for seed in (2, 5):
        for got in on_ranks(c, random_plan(c, WORLD, seed), body):
            assert max(errors(got, truth).values()) <= 4 * alone


class Growing(nn.Module):
    """A gradient overflows in one row of the weight only, at a large scale of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 3), 0.5))
        self.b = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sum(0)[:, None] * self.a).sum() + (self.b * self.b).sum()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler", [hetspmd.GradScaler, torch.amp.GradScaler])
def test_scaled_steps_are_skipped_together(fused: bool, scaler: type[torch.amp.GradScaler]) -> None:
    """Rank by rank the same steps are taken, though only one rank's shard overflows, as on one device; torch's own
    scaler, too."""
    torch.manual_seed(0)
    x = torch.rand(6, 4)
    x[:, 3] = 3e33
    model = Growing()
    c = Case(model, {"x": x}, derive(trace(model, (), {"x": x})))

    def train(module: nn.Module, scaler: torch.amp.GradScaler) -> tuple[list[float], list[torch.Tensor]]:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-36, fused=fused)
        scales = []
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(module(x=x)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [p.detach() for p in module.parameters()]

    alone = copy.deepcopy(model)
    want, final = train(alone, torch.amp.GradScaler("cpu", init_scale=2.0**17))
    assert want[0] < 2.0**17, "the first step overflows"
    assert want[-1] == want[-2], "the last one does not"

    def body(hap: HAP) -> tuple[list[float], dict[str, torch.Tensor], tuple[int, ...]]:
        scales, _ = train(hap, scaler("cpu", init_scale=2.0**17))
        return scales, hap.full_tensors(), tuple(hap.module.a.shape)

    found = 0
    for seed in range(12):
        plan = random_plan(c, 2, seed)
        results = on_ranks(c, plan, body)
        found += plan.parameter_layout()["a"][0] == 2
        for scales, tensors, _ in results:
            assert scales == want
            torch.testing.assert_close(tensors["a"], final[0])
            torch.testing.assert_close(tensors["b"], final[1])
    assert found, "in some plan the rows of the weight lie on different ranks"
