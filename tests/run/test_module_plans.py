"""HAP with states of its own: state dicts, further plans for other batches and modes, plan files."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import lone, loss_of, on_ranks
from small_models import MLP, Case, case
from small_plans import cluster, random_plan
from torch import nn

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import (
    GradientError,
)  # fmt: skip
from hetspmd.optimize.compiler import compile as compile_model
from hetspmd.run.module import HAP


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
        return loss.item(), again, len(hap._plans.entries), shapes == [p.shape for p in hap.parameters()]

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
    assert len(hap._plans.entries) == 2


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


class Reading(Mapping[str, Any]):
    """A checkpoint whose tensors exist from when they are asked for."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state, self.alive, self.most = state, 0, 0
        self.asked: Counter[str] = Counter()

    def __getitem__(self, key: str) -> torch.Tensor:
        made = self.state[key].clone()
        self.asked[key] += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(made.untyped_storage(), self._dead)
        return made

    def _dead(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


@pytest.mark.parametrize("meta", [False, True])
def test_a_checkpoint_is_read_one_tensor_at_a_time(meta: bool) -> None:
    c = case("mlp")
    want = c.model.state_dict()
    with torch.no_grad():
        want = {k: v + 1.0 for k, v in want.items()}
    other = Case(copy.deepcopy(c.model).to("meta" if meta else "cpu"), c.batch, c.theory)

    def body(hap: HAP) -> tuple[Reading, dict[str, torch.Tensor]]:
        state = Reading(want)
        assert not any(hap.load_full_state_dict(state))
        return state, hap.full_tensors()

    for state, tensors in on_ranks(other, random_plan(c, 3, 2), body):
        assert (state.most, state.alive) == (1, 0)
        assert set(state.asked.values()) == {1}
        assert set(state.asked) == set(want)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, want[name])


def test_a_checkpoint_that_does_not_fit_is_refused_when_it_is_read() -> None:
    c = case("mlp")
    hap = lone(c)
    good = hap.full_state_dict()
    with pytest.raises(RuntimeError, match=r"a\.weight has shape \[2, 2\], the model's is"):
        hap.load_full_state_dict(Reading({**good, "a.weight": torch.zeros(2, 2)}))
    with pytest.raises(RuntimeError, match=r"a\.bias is a float, not a tensor"):
        hap.load_full_state_dict({**good, "a.bias": 1.0})
    with pytest.raises(RuntimeError, match=r"Missing key.*a\.bias"):
        hap.load_full_state_dict(Reading({k: v for k, v in good.items() if k != "a.bias"}))


def test_of_a_file_that_is_mapped_shards_are_read(tmp_path: Path) -> None:
    c = case("mlp")
    path = tmp_path / "state.pt"
    torch.save({k: v + 1.0 for k, v in c.model.state_dict().items()}, path)

    def body(hap: HAP) -> dict[str, torch.Tensor]:
        hap.load_full_state_dict(torch.load(path, mmap=True))
        return hap.full_tensors()

    for tensors in on_ranks(c, random_plan(c, 3, 2), body):
        for name, value in c.model.state_dict().items():
            assert torch.equal(tensors[name], value + 1.0)


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


def test_a_plan_file(tmp_path: Any) -> None:
    c = case("mlp")
    plan = random_plan(c, 1, 3)
    plan.save(tmp_path / "plan.json")
    hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=tmp_path / "plan.json")
    assert hap.plan.digest == plan.digest
    assert loss_of(hap(**c.batch)).item() == pytest.approx(loss_of(c.model(**c.batch)).item(), rel=1e-12)
