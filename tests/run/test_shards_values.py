"""What is computed from shards outside of the model is element by element, or refused with the line to write."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import X, net, on_four
from torch import nn
from torch.nn import functional as F

from hetspmd.errors import ShardError
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import Shard

NORM = torch.norm
"""A name that was taken before the first HAP."""

LOOKS: dict[str, Callable[[Any], Any]] = {
    "torch.norm": lambda w: torch.norm(w),
    "torch.linalg.norm": lambda w: torch.linalg.norm(w),
    "torch.linalg.vector_norm": lambda w: torch.linalg.vector_norm(w),
    "torch.linalg.svdvals": lambda w: torch.linalg.svdvals(w),
    "torch.linalg.matrix_norm": lambda w: torch.linalg.matrix_norm(w, 2),
    "torch.mean": lambda w: torch.mean(w),
    "torch.sum of a product": lambda w: torch.sum(w * w),
    "torch.einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "data": lambda w: w.data.norm(),
    "detach": lambda w: w.detach().abs().max(),
    "abs": lambda w: w.abs().sum(),
    "torch.lerp": lambda w: torch.lerp(w, w, 0.5).sum(),
    "a name taken before": lambda w: NORM(w),
    "torch.equal": lambda w: torch.equal(w, w.detach()),
    "a convolution": lambda w: F.conv1d(torch.ones(1, 24, 5).double(), w[:, :, None]),
    "rows that happen to fit": lambda w: w.view(6, -1),
    "a cumulative sum": lambda w: w.cumsum(0),
    "power": lambda w: (w**2).mean(),
    "matmul": lambda w: w @ w.T,
    "transposed": lambda w: w.T,
    "an index": lambda w: w[0],
    "a slice": lambda w: w[:3],
    "rows": list,
    "flat": lambda w: w.view(-1),
    "normalize": lambda w: F.normalize(w, dim=0),
    "numpy": lambda w: w.detach().numpy(),
    "numbers": lambda w: w.tolist(),
    "not a number": lambda w: torch.isnan(w).any(),
    "of exponents": lambda w: torch.exp(w).sum(),
    "of signs": lambda w: torch.sign(w).mean(),
    "of gates": lambda w: torch.sigmoid(w).sum(),
    "clamped": lambda w: torch.clamp(w, min=0.0).sum(),
    "zeros": lambda w: (w == 0).sum(),
    "torch.ne": lambda w: torch.ne(w, 0).all(),
    "torch.flatten": lambda w: torch.flatten(w),
    "torch.cat": lambda w: torch.cat([w, w]),
    "torch.stack": lambda w: torch.stack([w, w.detach()]),
    "torch.log_softmax": lambda w: torch.log_softmax(w, 0),
    "torch.chunk": lambda w: torch.chunk(w, 2),
    "torch.unique": lambda w: torch.unique(w),
    "F.linear": lambda w: F.linear(X, w),
    "adaptive clipping": lambda w: w.detach().norm(dim=-1, keepdim=True),
}
PENALTIES: dict[str, Callable[[HAP], Any]] = {
    "squares": lambda hap: sum(p.pow(2).sum() for p in hap.parameters()),
    "absolute values": lambda hap: sum(torch.abs(p).sum() for p in hap.parameters()),
    "a norm": lambda hap: torch.linalg.norm(hap.module.a.weight),
    "orthogonality": lambda hap: (hap.module.a.weight @ hap.module.a.weight.T - torch.eye(24)).norm(),
    "what it was": lambda hap: F.mse_loss(hap.module.a.weight, hap.module.a.weight.detach().clone()),
    "a vector": lambda hap: nn.utils.parameters_to_vector(hap.parameters()).norm(),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda w: w.data.__setitem__(0, 0.0),
    "rows": lambda w: w.data.__setitem__(slice(0, 12), 0.5),
    "a column of the parameter": lambda w: torch.no_grad()(lambda: w.__setitem__((slice(None), 1), 0.0))(),
    "index_fill_": lambda w: w.data.index_fill_(0, torch.tensor([0]), 1.0),
    "fill_diagonal_": lambda w: w.data.fill_diagonal_(1.0),
    "triu_": lambda w: w.data.triu_(),
    "eye_": lambda w: nn.init.eye_(w),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(torch.zeros(500).double(), [w]),
}
DRAWS: dict[str, Callable[[Any], Any]] = {
    "data.normal_": lambda w: w.data.normal_(0.0, 0.02),
    "orthogonal_": lambda w: nn.init.orthogonal_(w),
    "sparse_": lambda w: nn.init.sparse_(w, 0.5),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w),
    "noise": lambda w: torch.no_grad()(lambda: w.add_(torch.randn_like(w)))(),
    "torch.normal": lambda w: torch.normal(w, 0.1),
    "normal of data": lambda w: torch.normal(w.data, 0.1),
    "dropout": lambda w: F.dropout(w, 0.5),
    "noise of data": lambda w: w.data.add_(torch.rand_like(w.data)),
}
FILES: dict[str, Callable[[Any], Any]] = {
    "data": lambda w: w.data,
    "a clone": lambda w: w.data.clone(),
    "on the CPU": lambda w: w.detach().cpu(),
    "in float16": lambda w: w.half(),
    "an average": lambda w: 0.9 * w.detach() + 0.1 * w.detach(),
}


def told(uses: dict[str, Callable[[Any], Any]], given: Callable[[HAP], Any]) -> dict[str, list[str]]:
    """What every rank is told, by use."""

    def body(hap: HAP) -> dict[str, str]:
        texts = {}
        for name, use in uses.items():
            before = {n: p.detach().clone() for n, p in hap.module.named_parameters()}
            with pytest.raises(ShardError) as error:
                use(given(hap))
            texts[name] = str(error.value)
            for n, p in hap.module.named_parameters():
                torch.testing.assert_close(p.detach(), before[n], msg=f"{name} has changed {n}")
        return texts

    found = on_four(body)
    return {name: [texts[name] for texts in found] for name in uses}


@pytest.mark.parametrize(
    ("uses", "line"),
    [
        (LOOKS, "Write hap.full_tensors()['a.weight']"),
        (
            WRITES,
            "whole = hap.full_tensors()['a.weight'], change it, then hap.load_state_dict({'a.weight': whole}",
        ),
        (DRAWS, "Initialize the model before HAP"),
        (
            {n: lambda w, of=of: torch.save({"w": of(w)}, io.BytesIO()) for n, of in FILES.items()},
            "hap.full_state_dict()",
        ),
        ({n: lambda w, of=of: pickle.dumps(of(w)) for n, of in FILES.items()}, "hap.full_state_dict()"),
    ],
    ids=["looks", "writes", "draws", "files", "pickles"],
)
def test_what_mixes_elements_is_refused(uses: dict[str, Callable[[Any], Any]], line: str) -> None:
    for name, texts in told(uses, lambda hap: hap.module.a.weight).items():
        assert all(line in text for text in texts), (name, texts)


def test_a_penalty_outside_of_the_model_is_refused() -> None:
    """Its value, and mostly its gradient, would be of this rank's part."""
    for name, texts in told(PENALTIES, lambda hap: hap).items():
        assert all("as a penalty, belongs into the model or into loss=" in text for text in texts), name


def test_so_is_one_in_the_closure_of_a_step() -> None:
    def body(hap: HAP) -> None:
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = hap(X) + 0.1 * sum(p.abs().sum() for p in hap.parameters())
            loss.backward()
            return loss

        with pytest.raises(ShardError, match=r"\.sum\(\) would see no more"):
            optimizer.step(closure)
        hap(X)
        assert all(type(p) is Shard for p in hap.parameters() if p.dim() == 2), "an error ends the step"

    on_four(body)


class Signs(torch.optim.Optimizer):
    """A foreign optimizer that writes to ``data`` and flattens it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p.data)
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.data.view(-1).add_(state["mean"].view(-1).sign(), alpha=-0.01)


def averaged(model: nn.Module) -> list[float]:
    """An average of weights by hand, put into the model and taken out again."""
    named = dict(model.named_parameters())
    average = {name: p.data.clone() for name, p in named.items()}
    optimizer, losses = Signs(named.values()), []
    for _ in range(3):
        optimizer.zero_grad()
        model(X).backward()
        optimizer.step()
        for name, p in named.items():
            average[name].mul_(0.9).add_(p.data, alpha=0.1)
            average[name] -= 0.01 * (average[name] - p.detach())
    kept = {name: p.detach().clone() for name, p in named.items()}
    for values in (average, copy.deepcopy(kept)):
        for name, p in named.items():
            p.data.copy_(values[name])
        losses.append(model(X).item())
    for name, p in named.items():
        p.data = kept[name] * 0.5
    assert all(type(state["mean"]) is torch.Tensor for state in optimizer.state.values())
    return [*losses, model(X).item()]


def by_data(model: nn.Module) -> list[float]:
    """Values that are set, clipped and compared."""
    weight: Any = getattr(model, "module", model).a.weight
    weight.data[:] = 0.1
    losses = [model(X).item()]
    weight.data.copy_(net().a.weight.detach())
    losses.append(model(X).item())
    with torch.no_grad():
        weight[...] = torch.where(weight > 0.05, weight, -weight).clamp(-0.2, 0.2)
    losses.append(model(X).item())
    nn.init.constant_(weight, 0.01)
    return [*losses, model(X).item()]


@pytest.mark.parametrize("use", [averaged, by_data], ids=lambda use: use.__name__)
def test_what_is_element_by_element_is_that_of_one_device(use: Callable[[nn.Module], list[float]]) -> None:
    want = use(net())
    for found in on_four(use):
        assert found == pytest.approx(want, rel=1e-10)


def test_values_stand_for_parameters() -> None:
    def body(hap: HAP) -> list[float]:
        with_others = torch.func.functional_call(hap, {n: p * 2 for n, p in hap.named_parameters()}, (X,))
        hap.module.a.weight = nn.Parameter(hap.module.a.weight.data * 0.5)
        loss = hap(X)
        loss.backward()
        hap.module.a.weight = nn.Parameter(hap.module.a.weight)
        return [with_others.item(), loss.item(), hap(X).item()]

    one = net()
    doubled = torch.func.functional_call(one, {n: p * 2 for n, p in one.named_parameters()}, (X,)).item()
    one.a.weight.data.mul_(0.5)
    for found in on_four(body):
        assert found == pytest.approx([doubled, one(X).item(), one(X).item()], rel=1e-10)


def test_they_can_be_printed_copied_and_compared() -> None:
    def body(hap: HAP) -> None:
        weight = hap.module.a.weight
        assert "Parameter containing" in repr(weight)
        assert repr(weight.data).startswith("ShardValues(")
        torch.testing.assert_close(copy.deepcopy(weight.data), weight.detach())
        with pytest.raises(ShardError, match=r"\.norm\(\) would see no more"):
            copy.deepcopy(weight.data).norm()

    on_four(body)


def test_functions_of_torch_are_left_as_they_are() -> None:
    """A HAP module puts nothing in their place but what is named here."""
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
import torch
from torch import nn
import torch.nn.functional as F
places = torch, torch.Tensor, torch.linalg, torch.special, F, nn.init, torch.autograd, nn.utils, torch.distributed
before = [dict(vars(place)) for place in places]
from divided import X, on_four
on_four(lambda hap: hap(X).backward())
print(*sorted(n for place, old in zip(places, before) for n, v in old.items()
              if callable(v) and vars(place).get(n) is not v))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].split() == [
        "manual_seed",
        "register_hook",
    ]  # which the trace looks at
