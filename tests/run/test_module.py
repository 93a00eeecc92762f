"""HAP as a user meets it: like DistributedDataParallel, with shards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from small_models import MLP, Attention, Case, case
from small_plans import cluster, random_plan
from torch import nn

from hetspmd.compiler import compile as compile_model
from hetspmd.errors import (
    BatchMismatchError,
    DeviceError,
    ExampleError,
    GradientError,
    PlanMismatchError,
    TraceError,
    WorldSizeError,
)  # fmt: skip
from hetspmd.forms import is_sharded
from hetspmd.plan import Plan
from hetspmd.run.communicator import Communicator
from hetspmd.run.module import HAP
from hetspmd.run.simulate import run_ranks

T = TypeVar("T")
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def on_ranks(c: Case, plan: Plan, body: Callable[[HAP], T], **options: Any) -> list[T]:
    models = [copy.deepcopy(c.model) for _ in range(plan.world)]
    _ = plan.theory, plan.digest

    def rank(communicator: Communicator) -> T:
        model = models[communicator.rank]
        return body(HAP(model, plan.cluster, plan=plan, process_group=communicator, **options))

    return run_ranks(plan.world, rank)


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["loss"]  # type: ignore[no-any-return]
    return output[0] if isinstance(output, tuple) else output


def lone(c: Case, **options: Any) -> HAP:
    return HAP(copy.deepcopy(c.model), cluster(1), example=c.batch, **options)


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
        return seen, hap.full_tensors(), min(p.numel() for p in hap.parameters())

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
        return {n: tuple(p.shape) for n, p in hap.module.named_parameters()}

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
    assert torch.equal(hap.module.a.grad, hap.module.b.grad)  # type: ignore[arg-type]


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
    assert len(hap._entries) == 1


def test_full_state_dict_round_trip() -> None:
    c = case("conv")
    want = c.model.state_dict()
    first, second = random_plan(c, 3, 2), random_plan(c, 2, 5)

    def save(hap: HAP) -> dict[str, Any]:
        return hap.full_state_dict()

    for state in on_ranks(c, first, save):
        assert list(state) == list(want)
        assert all(torch.equal(state[k], want[k]) for k in want)
    fresh = case("conv")
    with torch.no_grad():
        for p in fresh.model.parameters():
            p.zero_()

    def load(hap: HAP) -> dict[str, Any]:
        hap.load_full_state_dict(want)
        return hap.full_state_dict(rank0_only=True)

    states = on_ranks(fresh, second, load)
    assert states[1] == {}
    c.model.load_state_dict(states[0])
    assert all(torch.equal(states[0][k], want[k]) for k in want)


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    c = case("mlp")
    hap = lone(c)
    good = hap.full_state_dict()
    with pytest.raises(RuntimeError, match=r"a\.weight has shape \[2, 2\]"):
        hap.load_full_state_dict({**good, "a.weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match=r"Missing key.*a\.bias"):
        hap.load_full_state_dict({k: v for k, v in good.items() if k != "a.bias"})
    report = hap.load_full_state_dict({**good, "more": torch.zeros(1)}, strict=False)
    assert report.unexpected_keys == ["more"]


def test_another_batch_gets_its_own_plan_with_the_same_shards() -> None:
    c = case("mlp")
    plan = compile_model(c.model, c.batch, cluster(1, 3), constraints={"a.weight": "shard(0)"})
    other = {"x": torch.randn(4, 6, dtype=torch.float64), "labels": torch.tensor([1, 2, 0, -100])}
    want = loss_of(c.model(**other)).item()

    def body(hap: HAP) -> tuple[float, float, int, bool]:
        shapes = [p.shape for p in hap.parameters()]
        loss = loss_of(hap(labels=other["labels"], x=other["x"]))
        loss.backward()
        again = loss_of(hap(**other)).item()
        hap(**c.batch)
        return loss.item(), again, len(hap._entries), shapes == [p.shape for p in hap.parameters()]

    for loss, again, entries, same in on_ranks(c, plan, body):
        assert loss == pytest.approx(want, rel=1e-12)
        assert again == loss
        assert entries == 2
        assert same


def test_evaluation_has_no_dropout_and_needs_no_labels() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            logits = self.b(self.drop(torch.relu(self.a(x))))
            return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)

    model = Classifier()
    x, labels = torch.randn(6, 6), torch.randint(0, 3, (6,))
    c = Case(model, {"x": x, "labels": labels}, case("mlp").theory)
    plan = compile_model(model, c.batch, cluster(2, 1))
    single = copy.deepcopy(model).eval()

    def body(hap: HAP) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        first, second = (hap(x=x, labels=labels)[0].detach() for _ in range(2))
        hap.eval()
        with torch.no_grad():
            logits = hap(x=x)
        loss = hap(x=x, labels=labels)[0]
        loss.backward()
        return first, second, logits, loss.detach(), hap.module.a.weight.grad is not None

    for first, second, logits, loss, trained in on_ranks(c, plan, body, gather_outputs=True):
        assert not torch.equal(first, second), "training drops"
        torch.testing.assert_close(logits, single(x).detach())
        torch.testing.assert_close(loss, single(x, labels)[0].detach())
        assert trained


def test_an_output_without_a_loss_refuses_gradients() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            logits = self.a(x)
            return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)

    x, labels = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    hap = HAP(Optional(), cluster(1), example={"x": x, "labels": labels})
    hap.eval()
    logits = hap(x=x)
    torch.testing.assert_close(logits.detach(), hap.module.a(x).detach())
    with pytest.raises(GradientError, match="not the loss"):
        logits.sum().backward()


def test_frozen_later_gets_its_own_plan() -> None:
    c = case("mlp")
    hap = lone(c)
    hap.module.a.weight.requires_grad_(False)
    loss_of(hap(**c.batch)).backward()
    assert hap.module.a.weight.grad is None
    assert hap.module.a.bias.grad is not None
    assert len(hap._entries) == 2


def test_a_batch_that_cannot_be_planned_for() -> None:
    c = case("mlp")
    hap = lone(c)
    with pytest.raises(BatchMismatchError, match="x is float64"):
        hap(x=torch.zeros(9, 7, dtype=torch.float64), labels=c.batch["labels"])
    with pytest.raises(BatchMismatchError, match="keyword arguments"):
        hap(x=c.batch["x"])
    with pytest.raises(BatchMismatchError, match="requires a gradient"):
        hap(x=c.batch["x"].clone().requires_grad_(), labels=c.batch["labels"])


def test_a_plain_value_in_the_batch_is_part_of_the_plan() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return (x * self.w * factor).sum()

    x = torch.rand(2, 3)
    hap = HAP(Scaled(), cluster(1), example={"x": x, "factor": 2.0})
    assert hap(x=x, factor=2.0).item() == pytest.approx(2 * x.sum().item())
    assert hap(x=x, factor=3.0).item() == pytest.approx(3 * x.sum().item())
    assert hap(x=x).item() == pytest.approx(x.sum().item())


def test_a_loss_function() -> None:
    model = nn.Linear(4, 2)
    x = torch.randn(5, 4)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    want = loss(copy.deepcopy(model), x).item()
    hap = HAP(model, cluster(1), example=(x,), loss=loss)
    value = hap(x)
    value.backward()
    assert value.item() == pytest.approx(want)
    assert hap.module.weight.grad is not None


def test_world_size_is_checked_before_anything_else() -> None:
    model = MLP()
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(WorldSizeError, match="cluster has 3 devices, the process group 1"):
        HAP(model, cluster(1, 1, 1), example={"nonsense": 1})
    assert [p.data_ptr() for p in model.parameters()] == before


def test_ranks_with_different_plans_are_told() -> None:
    c = case("mlp")
    plans = [random_plan(c, 3, seed) for seed in (2, 2, 4)]

    def body(communicator: Communicator) -> str:
        plan = plans[communicator.rank]
        with pytest.raises(PlanMismatchError, match=r"on ranks \[0, 1\].*on ranks \[2\]") as caught:
            HAP(MLP().double(), plan.cluster, plan=plan, process_group=communicator)
        return str(caught.value)

    assert len(set(run_ranks(3, body))) == 1


def test_rank_zeros_error_is_raised_everywhere() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w).sum() if x.sum() > 0 else self.w.sum()

    def body(communicator: Communicator) -> str:
        with pytest.raises(TraceError) as caught:
            HAP(Branches(), cluster(1, 1), example=(torch.ones(3),), process_group=communicator)
        return str(caught.value)

    messages = run_ranks(2, body)
    assert messages[0] == messages[1]


def test_a_plan_for_another_model_or_cluster() -> None:
    c = case("mlp")
    plan = random_plan(c, 1, 0)
    with pytest.raises(PlanMismatchError, match=r"scale: float64\[10\], this one has float32\[10\]"):
        HAP(MLP(), plan.cluster, plan=plan)
    with pytest.raises(PlanMismatchError, match="does not have it"):
        HAP(Attention().double(), plan.cluster, plan=plan)
    with pytest.raises(PlanMismatchError, match="another cluster"):
        HAP(copy.deepcopy(c.model), cluster(7), plan=plan)


def test_a_model_on_two_devices() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(DeviceError, match="several devices"):
        HAP(model, cluster(1), example=(torch.zeros(1, 2),))


def test_neither_plan_nor_example() -> None:
    with pytest.raises(ExampleError, match="example="):
        HAP(MLP(), cluster(1))


def test_a_meta_model_is_made_in_shards() -> None:
    c = case("mlp")
    plan = random_plan(c, 2, 4)
    want = c.model.state_dict()
    meta = Case(copy.deepcopy(c.model).to("meta"), c.batch, c.theory)

    def body(hap: HAP) -> tuple[float, int]:
        hap.load_full_state_dict(want)
        return loss_of(hap(**c.batch)).item(), sum(p.numel() for p in hap.parameters())

    loss = loss_of(c.model(**c.batch)).item()
    for value, _ in on_ranks(meta, plan, body):
        assert value == pytest.approx(loss, rel=1e-12)


def test_ranks_start_from_rank_zero() -> None:
    c = case("mlp")
    plan = random_plan(c, 3, 2)
    _ = plan.theory, plan.digest

    def body(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = MLP().double()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float(communicator.rank + 1))
        return HAP(model, plan.cluster, plan=plan, process_group=communicator).full_tensors()

    for tensors in run_ranks(3, body):
        assert all((t == 1.0).all() for t in tensors.values())


def test_it_cannot_be_copied_or_pickled() -> None:
    hap = lone(case("mlp"))
    with pytest.raises(TypeError, match="full_state_dict"):
        copy.deepcopy(hap)
    with pytest.raises(TypeError, match="full_state_dict"):
        pickle.dumps(hap)


def test_a_plan_file(tmp_path: Any) -> None:
    c = case("mlp")
    plan = random_plan(c, 1, 3)
    plan.save(tmp_path / "plan.json")
    hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=tmp_path / "plan.json")
    assert hap.plan.digest == plan.digest
    assert loss_of(hap(**c.batch)).item() == pytest.approx(loss_of(c.model(**c.batch)).item(), rel=1e-12)


def test_ranks_with_batches_of_their_own_are_refused() -> None:
    """A loader that still deals out rows, as for DistributedDataParallel, must not train silently wrong."""
    c = case("mlp")
    plan = random_plan(c, 3, 1)

    def body(hap: HAP) -> str:
        batch = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in c.batch.items()}
        if hap.rank == 2:
            batch["x"] = batch["x"] + 1
        with pytest.raises(BatchMismatchError) as caught:
            hap(**batch)
        return str(caught.value)

    for message in on_ranks(c, plan, body):
        assert "rank 2 was given another x than rank 0" in message
        assert "same global batch" in message
