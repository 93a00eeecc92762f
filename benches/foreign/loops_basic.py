"""Loops over one model: what training scripts do between the steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hetspmd
from foreign.registry import loop
from foreign.run import Run

ROWS, WIDTH, CLASSES = 16, 12, 5
Batch = tuple[Tensor, Tensor]


def classified(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of logits."""
    return F.cross_entropy(m(x), y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))


def batches(count: int = 4, rows: int = ROWS) -> list[Batch]:
    return [(torch.randn(rows, WIDTH), torch.randint(0, CLASSES, (rows,))) for _ in range(count)]


def ready() -> tuple[nn.Module, list[Batch]]:
    return mlp(), batches()


def resnet() -> tuple[nn.Module, list[Batch]]:
    from torchvision.models.resnet import BasicBlock, ResNet

    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
    network.layer2, network.layer3, network.layer4 = nn.Identity(), nn.Identity(), nn.Identity()
    network.fc = nn.Linear(64, CLASSES)
    return network, [(torch.randn(8, 3, 32, 32), torch.randint(0, CLASSES, (8,))) for _ in range(3)]


def gpt2() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    from foreign.transformers_text import GPT, built, lm_batch

    return built("GPT2", "GPT2LMHeadModel", GPT), [lm_batch() for _ in range(3)]


def step(wrapped: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """One step; its loss."""
    optimizer.zero_grad()
    loss: Tensor = wrapped(**batch).loss if isinstance(batch, dict) else wrapped(*batch)
    loss.backward()
    optimizer.step()
    return loss.detach().clone()


def steps(
    wrapped: Any,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Any],
    after: Callable[[], object] = lambda: None,
) -> list[Tensor]:
    """A step for each batch, and ``after`` behind each; the losses."""
    losses = []
    for batch in data:
        losses.append(step(wrapped, optimizer, batch))
        after()
    return losses


def evaluated(model: Any, batch: Any) -> Tensor:
    """The loss of a batch in evaluation, in which the model is left."""
    model.eval()
    with torch.no_grad():
        loss: Tensor = model(*batch).clone()
    return loss


def sgd(model: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@loop("torchvision", resnet)
def ema_of_a_resnet(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer, average = sgd(wrapped), copy.deepcopy(wrapped)

    @torch.no_grad()
    def follow() -> None:
        for a, p in zip(average.parameters(), wrapped.parameters(), strict=True):
            a.lerp_(p, 0.1)

    losses = [*steps(wrapped, optimizer, data, follow), evaluated(average, data[0])]
    return {"losses": losses, "state": run.state(average)}


@loop("torch", ready)
def averaged_model_of_torch(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped)
    average = AveragedModel(wrapped, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses = steps(wrapped, optimizer, data, lambda: average.update_parameters(wrapped))
    return {"losses": [*losses, evaluated(average, data[0])]}


@loop("torch", ready)
def gradient_accumulation(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped)
    losses = []
    for first in (0, 2):
        optimizer.zero_grad()
        for batch in data[first : first + 2]:
            loss = wrapped(*batch) / 2
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
    return {"losses": losses, "state": run.state(wrapped)}


@loop("transformers", gpt2)
def clipping_and_cosine(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0])
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, eps=1e-4)
    schedule = CosineAnnealingLR(optimizer, 4)
    losses, norms = [], []
    for batch in data:
        optimizer.zero_grad()
        loss = wrapped(**batch).loss
        loss.backward()
        norms.append(torch.as_tensor(nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)).clone())
        optimizer.step()
        schedule.step()
        losses.append(loss.detach().clone())
    return {"losses": losses, "norms": norms, "rate": schedule.get_last_lr(), "state": run.state(wrapped)}


@loop("torch", ready)
def clipping_by_value(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = wrapped(*batch)
        loss.backward()
        nn.utils.clip_grad_value_(wrapped.parameters(), 0.01)
        optimizer.step()
        losses.append(loss.detach().clone())
    return {"losses": losses, "state": run.state(wrapped)}


@loop("torch", ready)
def one_cycle(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped)
    schedule = OneCycleLR(optimizer, max_lr=0.2, total_steps=6)
    losses = steps(wrapped, optimizer, data, schedule.step)
    return {"losses": losses, "momentum": optimizer.param_groups[0]["momentum"], "state": run.state(wrapped)}


@loop("torch", ready)
def plateau_after_evaluations(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped, 2.0)
    schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    losses = []
    for batch in data:
        losses.append(step(wrapped, optimizer, batch))
        losses.append(evaluated(wrapped, data[-1]))
        wrapped.train()
        schedule.step(losses[-1].item())
    return {"losses": losses, "rate": optimizer.param_groups[0]["lr"]}


@loop("transformers", gpt2)
def autocast_bfloat16(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        wrapped = run.wrap(model, data[0])
    optimizer = sgd(wrapped, 0.01)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().float())
    return {"losses": losses}


@loop("torch", ready)
def grad_scaler(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped)
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=256.0)
        if run.alone
        else hetspmd.GradScaler("cpu", init_scale=256.0)
    )
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = wrapped(*batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach().clone())
    return {"losses": losses, "scale": scaler.get_scale(), "state": run.state(wrapped)}


@loop("torch", ready)
def checkpoint_and_resume(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    fresh = copy.deepcopy(model)
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, eps=1e-4)
    losses = steps(wrapped, optimizer, data[:2])
    file = io.BytesIO()
    torch.save({"model": run.state(wrapped), "optimizer": run.optimizer_state(wrapped, optimizer)}, file)
    file.seek(0)
    saved = torch.load(file)
    again = run.wrap(fresh, data[0], loss=classified)
    run.load(again, saved["model"])
    following = torch.optim.AdamW(again.parameters(), lr=0.01, eps=1e-4)
    run.load_optimizer(again, following, saved["optimizer"])
    losses += [step(again, following, b) for b in data[2:]]
    return {"losses": losses, "state": run.state(again)}


@loop("torchvision", resnet)
def freeze_then_unfreeze(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("fc."))
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.05)
    losses = [step(wrapped, optimizer, data[0])]
    for p in wrapped.parameters():
        p.requires_grad_(True)
    optimizer = sgd(wrapped)
    losses += steps(wrapped, optimizer, data[1:])
    return {"losses": losses, "state": run.state(wrapped)}


def _growing() -> Any:
    return mlp(), [b for rows in (6, 10, 16) for b in batches(1, rows)]


@loop("torch", _growing)
def curriculum_of_growing_batches(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped)
    return {"losses": steps(wrapped, optimizer, data), "state": run.state(wrapped)}


@loop("transformers", gpt2)
def generation_between_steps(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0])
    optimizer = sgd(wrapped)
    losses, written = [], []
    for batch in data:
        losses.append(step(wrapped, optimizer, batch))
        whole = run.whole(wrapped).eval()
        with torch.no_grad():
            written.append(whole.generate(data[0]["input_ids"][:2, :4], max_new_tokens=3, do_sample=False))
    return {"losses": losses, "written": written}


@loop("transformers", gpt2)
def groups_without_weight_decay(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0])
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
    return {"losses": steps(wrapped, optimizer, data), "state": run.state(wrapped)}


class Tasks(nn.Module):
    """One body, two heads, and the logarithms of the tasks' variances."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU())
        self.kind, self.value = nn.Linear(24, CLASSES), nn.Linear(24, 1)
        self.scales = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        kind, value = F.cross_entropy(self.kind(hidden), y), self.value(hidden).square().mean()
        total = (torch.stack([kind, value]) * torch.exp(-self.scales) + self.scales).sum()
        return {"total": total, "kind": kind, "value": value}


@loop("torch", lambda: (Tasks(), batches()))
def multi_task_with_learned_weights(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss="total")
    optimizer = sgd(wrapped)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        out = wrapped(*batch)
        out["total"].backward()
        optimizer.step()
        losses.append({k: v.detach().clone() for k, v in out.items()})
    return {"losses": losses, "state": run.state(wrapped)}


def _with_optimizer(name: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Four steps with an optimizer of torch."""

    def play(run: Run, made: Any) -> dict[str, Any]:
        model, data = made
        wrapped = run.wrap(model, data[0], loss=classified)
        optimizer = make(wrapped.parameters())
        return {"losses": steps(wrapped, optimizer, data), "state": run.state(wrapped)}

    play.__name__ = f"optimizer_{name}"
    loop("torch", ready)(play)


_with_optimizer("adagrad", lambda ps: torch.optim.Adagrad(ps, lr=0.01, eps=1e-4))
_with_optimizer("nadam", lambda ps: torch.optim.NAdam(ps, lr=0.01, eps=1e-4))
_with_optimizer("rprop", lambda ps: torch.optim.Rprop(ps, lr=0.001))
_with_optimizer("adafactor", lambda ps: torch.optim.Adafactor(ps, lr=0.01))


@loop("torch", ready)
def lbfgs_with_a_closure(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = torch.optim.LBFGS(wrapped.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = wrapped(*data[0])
        loss.backward()
        return loss

    return {"losses": [torch.as_tensor(optimizer.step(closure)).detach().clone() for _ in range(2)]}


def _checkpointed() -> Any:
    model, data = gpt2()
    model.gradient_checkpointing_enable()
    return model, data


@loop("transformers", _checkpointed)
def gradient_checkpointing(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0])
    optimizer = sgd(wrapped)
    return {"losses": steps(wrapped, optimizer, data), "state": run.state(wrapped)}


@loop("torch", ready)
def noise_on_the_gradients(run: Run, made: Any) -> dict[str, Any]:
    """Hooks on parameters that lie in shards."""
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped)
    for p in wrapped.parameters():
        p.register_hook(lambda g: g * 0.5)
    return {"losses": steps(wrapped, optimizer, data), "state": run.state(wrapped)}


@loop("torch", ready)
def early_stopping_with_the_best_state(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped, 0.5)
    losses, best = list[Tensor](), (float("inf"), dict[str, Tensor]())
    for batch in data:
        losses.append(step(wrapped, optimizer, batch))
        value = evaluated(wrapped, data[-1]).item()
        wrapped.train()
        if value < best[0]:
            best = (value, run.state(wrapped))
    run.load(wrapped, best[1])
    losses.append(step(wrapped, optimizer, data[0]))
    return {"losses": losses, "best": best[0]}
