"""Low-rank adapters that users write themselves (LoRA): a frozen layer, and a product of two factors beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from cases_forward import Body, Made, rows
from harness import Run, called, case
from torch import nn
from torch.nn import functional as F

import hetspmd


class LoRA(nn.Module):
    """A frozen linear layer and a trained low-rank change of its weight, which can be put into it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.B = nn.Parameter(torch.randn(base.out_features, rank) / 10)
        self.scale, self.merged = 2.0, False

    def merge(self, sign: float = 1.0) -> None:
        self.base.weight.data += sign * self.scale * (self.B @ self.A).detach()
        self.merged = sign > 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        return out if self.merged else out + self.scale * (x @ self.A.T) @ self.B.T


class Adapted(Body):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = LoRA(self.first), LoRA(self.second)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.second(torch.relu(self.first(x))), labels)


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRA]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, LoRA))


def trained(wrapped: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = called(wrapped, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def evaluated(model: Any, batch: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        loss: torch.Tensor = called(model, batch).clone()
    model.train()
    return loss


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-4)


def put_in(run: Run, wrapped: Any, model: nn.Module, sign: float) -> None:
    """Merge between two steps. On ranks the product is taken of whole tensors, and each rank loads its part."""
    whole = {} if run.alone else wrapped.full_tensors()
    for name, part in adapters(model):
        if run.alone:
            part.merge(sign)
            continue
        change = sign * part.scale * whole[f"{name}.B"] @ whole[f"{name}.A"]
        key = f"{name}.base.weight"
        wrapped.load_state_dict({key: whole[key] + change}, strict=False)
        part.merged = sign > 0


def merged_and_taken_out(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """A forward, training, evaluation, the same merged, training again, and a second run from what was saved."""
    fresh = copy.deepcopy(model)
    first = evaluated(model, batches[0])
    wrapped = run.wrap(model, batches[0])
    optimizer = adam(wrapped)
    losses = [first, *trained(wrapped, optimizer, batches), evaluated(wrapped, batches[0])]
    put_in(run, wrapped, model, 1.0)
    losses.append(evaluated(wrapped, batches[0]))
    put_in(run, wrapped, model, -1.0)
    losses += trained(wrapped, optimizer, batches)
    state = run.state(wrapped)
    again = run.wrap(fresh, batches[0])
    following = adam(again)
    if run.alone:
        again.load_state_dict(state)
        following.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        again.load_full_state_dict(state)
        steps = hetspmd.full_optimizer_state_dict(wrapped, optimizer)
        hetspmd.load_full_optimizer_state_dict(again, following, steps)
    return {"losses": losses + trained(again, following, batches), "state": run.state(again)}


def merged_in_a_copy(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """A merged copy is evaluated beside the training, as for samples and export."""
    wrapped = run.wrap(model, batches[0])
    losses = trained(wrapped, adam(wrapped), batches)
    whole = copy.deepcopy(model) if run.alone else wrapped.full_module()
    for _, part in adapters(whole):
        part.merge()
    return {"losses": [*losses, evaluated(whole, batches[0])], "merged": dict(whole.state_dict())}


def merged_before(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """An adapter that was trained is put into the base before the model is wrapped; another part is trained on."""
    for _, part in adapters(model):
        part.merge()
        part.base.requires_grad_(True)
    wrapped = run.wrap(model, batches[0])
    return {"losses": trained(wrapped, adam(wrapped), batches), "state": run.state(wrapped)}


def _adapted() -> Made:
    return Adapted(), rows()


for _loop in (merged_and_taken_out, merged_in_a_copy, merged_before):
    _adapted.__name__ = f"lora_of_ones_own_{_loop.__name__}"
    case("tutorials, microsoft/LoRA: adapters written by hand", loop=_loop, slow=True)(_adapted)
