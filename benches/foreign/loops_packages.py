"""Loops as packages' own documentation writes them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign.loops_basic import CLASSES, batches, classified, evaluated, gpt2, mlp, ready, sgd, step, steps
from foreign.registry import Sample, loop, train
from foreign.run import Run


def _of(module: str, kind: str) -> Any:
    return getattr(importlib.import_module(module), kind)


def _adapted(name: str, make: Callable[[Any], Any]) -> None:
    """GPT-2 with an adapter of peft: only the adapter is trained."""

    def built() -> Any:
        model, data = gpt2()
        return _of("peft", "get_peft_model")(model, make(importlib.import_module("peft"))), data

    def play(run: Run, made: Any) -> dict[str, Any]:
        model, data = made
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-4)
        wrapped = run.wrap(model, data[0])
        losses = [step(wrapped, optimizer, b) for b in data]
        wrapped.eval()
        with torch.no_grad():
            losses.append(wrapped(**data[0]).loss.clone())
        return {"losses": losses, "state": run.state(wrapped)}

    play.__name__ = f"peft_{name}"
    loop("peft", built)(play)


TASK = {"task_type": "CAUSAL_LM"}
_adapted("lora", lambda p: p.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0, **TASK))
_adapted("dora", lambda p: p.LoraConfig(r=4, target_modules=["c_attn"], use_dora=True, **TASK))
_adapted("ia3", lambda p: p.IA3Config(target_modules=["c_attn"], feedforward_modules=[], **TASK))
_adapted("prompt_tuning", lambda p: p.PromptTuningConfig(num_virtual_tokens=3, **TASK))
_adapted("prefix_tuning", lambda p: p.PrefixTuningConfig(num_virtual_tokens=3, **TASK))
_adapted("vera", lambda p: p.VeraConfig(r=4, target_modules=["c_attn"], save_projection=True, **TASK))


def _denoiser() -> Any:
    from foreign.diffusers_models import UNET

    kinds = {
        "down_block_types": ("DownBlock2D",) * 2,
        "up_block_types": ("UpBlock2D",) * 2,
        "add_attention": False,
    }
    return _of("diffusers", "UNet2DModel")(**{**UNET, **kinds}).train(), [
        torch.randn(8, 3, 8, 8) for _ in range(3)
    ]


@loop("diffusers", _denoiser)
def diffusers_noise_training(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    scheduler = _of("diffusers", "DDPMScheduler")(num_train_timesteps=100)

    def loss(m: nn.Module, noisy: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(m(noisy, t).sample, noise)

    wrapped = run.wrap(model, (data[0], torch.zeros(8, dtype=torch.long), data[0]), loss=loss)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.001, eps=1e-4)
    rate = _of("diffusers.optimization", "get_cosine_schedule_with_warmup")(optimizer, 1, 4)
    losses = []
    for clean in data:
        noise, t = run.randn(*clean.shape), run.integers(100, 8)
        losses.append(step(wrapped, optimizer, (scheduler.add_noise(clean, noise, t), t, noise)))
        rate.step()
    whole, x = run.whole(wrapped).eval(), run.randn(2, 3, 8, 8)
    scheduler.set_timesteps(2)
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(whole(x, t).sample, t, x, generator=run.generator).prev_sample
    return {"losses": losses, "sample": x, "state": run.state(wrapped)}


@loop("diffusers", _denoiser)
def diffusers_ema_model(run: Run, made: Any) -> dict[str, Any]:
    model, data = made

    def loss(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(m(x, t).sample, x)

    wrapped = run.wrap(model, (data[0], torch.zeros(8, dtype=torch.long)), loss=loss)
    optimizer = sgd(wrapped, 0.01)
    average = _of("diffusers.training_utils", "EMAModel")(wrapped.parameters(), decay=0.9)
    losses = []
    for x in data:
        losses.append(step(wrapped, optimizer, (x, run.integers(100, 8))))
        average.step(wrapped.parameters())
    average.copy_to(wrapped.parameters())
    return {"losses": losses, "state": run.state(wrapped)}


@loop("torch_ema", ready)
def torch_ema_average(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer, average = (
        sgd(wrapped),
        _of("torch_ema", "ExponentialMovingAverage")(wrapped.parameters(), decay=0.9),
    )
    losses = steps(wrapped, optimizer, data, average.update)
    wrapped.eval()
    with average.average_parameters(), torch.no_grad():
        losses.append(wrapped(*data[0]).clone())
    return {"losses": losses, "state": run.state(wrapped)}


@loop("timm", ready)
def timm_model_ema(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer, average = sgd(wrapped), _of("timm.utils", "ModelEmaV3")(wrapped, decay=0.9)
    losses = steps(wrapped, optimizer, data, lambda: average.update(wrapped))
    return {"losses": [*losses, evaluated(average.module, data[0])]}


def _graph() -> Any:
    from foreign.graphs import CLASSES as KINDS
    from foreign.graphs import FEATURES, NODES, edges

    model = _of("torch_geometric.nn", "GraphSAGE")(FEATURES, 16, 2, KINDS)
    mask = torch.arange(NODES) % 3 != 0
    return model, (torch.randn(NODES, FEATURES), edges(), torch.randint(0, KINDS, (NODES,)), mask)


@loop("torch_geometric", _graph)
def pyg_node_classification(run: Run, made: Any) -> dict[str, Any]:
    """Planetoid's loop: the whole graph in every step, a mask of weights for the nodes to train on."""
    model, (x, edge_index, labels, mask) = made

    def loss(m: nn.Module, x: Tensor, edge_index: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        each = F.cross_entropy(m(x, edge_index), labels, reduction="none")
        return (each * weight).sum() / weight.sum()

    weight = mask.to(x.dtype)
    wrapped = run.wrap(model, (x, edge_index, labels, weight), loss=loss)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01, weight_decay=5e-4, eps=1e-4)
    losses = [step(wrapped, optimizer, (x, edge_index, labels, weight)) for _ in range(3)]
    wrapped.eval()
    with torch.no_grad():
        losses.append(wrapped(x, edge_index, labels, 1 - weight).clone())
    return {"losses": losses, "state": run.state(wrapped)}


@loop("torch_geometric", _graph)
def pyg_masked_nodes(run: Run, made: Any) -> dict[str, Any]:
    """Nodes picked by a mask of bools: shapes that depend on data."""
    model, batch = made

    def loss(m: nn.Module, x: Tensor, edge_index: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(m(x, edge_index)[mask], labels[mask])

    wrapped = run.wrap(model, batch, loss=loss)
    optimizer = sgd(wrapped)
    return {"losses": [step(wrapped, optimizer, batch) for _ in range(3)], "state": run.state(wrapped)}


def _with_optimizer(name: str, package: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def renamed(run: Run, sample: Sample) -> dict[str, Any]:
        return train(run, sample)

    renamed.__name__ = f"optimizer_{name}"
    loop(package, lambda: Sample(mlp(), batches(3), classified, make))(renamed)


_with_optimizer("lion", "lion_pytorch", lambda ps: _of("lion_pytorch", "Lion")(ps, lr=1e-3))
_with_optimizer(
    "adabelief", "pytorch_optimizer", lambda ps: _of("pytorch_optimizer", "AdaBelief")(ps, lr=1e-3, eps=1e-4)
)
_with_optimizer("lamb", "pytorch_optimizer", lambda ps: _of("pytorch_optimizer", "Lamb")(ps, lr=1e-3))
_with_optimizer("shampoo", "pytorch_optimizer", lambda ps: _of("pytorch_optimizer", "Shampoo")(ps, lr=1e-3))
_with_optimizer("timm-lookahead", "timm", lambda ps: _of("timm.optim", "Lookahead")(
    torch.optim.SGD(ps, lr=0.05), k=2))  # fmt: skip
_with_optimizer("timm-muon", "timm", lambda ps: _of("timm.optim", "Muon")(list(ps), lr=0.01))
_with_optimizer("transformers-adafactor", "transformers", lambda ps: _of("transformers", "Adafactor")(
    ps, lr=1e-3, relative_step=False))  # fmt: skip


@loop("pytorch_optimizer", ready)
def sam_in_two_steps(run: Run, made: Any) -> dict[str, Any]:
    """Sharpness-aware minimization climbs by the norm over all gradients."""
    model, data = made
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = _of("pytorch_optimizer", "SAM")(wrapped.parameters(), base_optimizer=torch.optim.SGD, lr=0.05)
    losses = []
    for batch in data:
        loss = wrapped(*batch)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        wrapped(*batch).backward()
        optimizer.second_step(zero_grad=True)
        losses.append(loss.detach().clone())
    return {"losses": losses, "state": run.state(wrapped)}


@loop("pytorch_metric_learning", ready)
def metric_learning(run: Run, made: Any) -> dict[str, Any]:
    """A proxy loss with parameters of its own, inside."""
    model, data = made
    proxies = _of("pytorch_metric_learning.losses", "ArcFaceLoss")(CLASSES, CLASSES).to(
        torch.get_default_dtype()
    )
    both = nn.ModuleDict({"model": model, "proxies": proxies})

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = m["proxies"](m["model"](x), y)
        return found

    wrapped = run.wrap(both, data[0], loss=loss)
    optimizer = sgd(wrapped)
    return {"losses": [step(wrapped, optimizer, b) for b in data]}


@loop("accelerate", ready)
def accelerate_clipping(run: Run, made: Any) -> dict[str, Any]:
    """Accelerate around the optimizer and the backward; the model is wrapped by ``run`` alone.

    Without its accumulation: it counts steps in the process, of which simulated ranks have one.
    """
    model, data = made
    accelerator = _of("accelerate", "Accelerator")(cpu=True)
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = accelerator.prepare(sgd(wrapped))
    losses = []
    for batch in data:
        loss = wrapped(*batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return {"losses": losses, "state": run.state(wrapped)}


@loop("lightning", ready)
def lightning_manual_optimization(run: Run, made: Any) -> dict[str, Any]:
    """A LightningModule is a module: its ``training_step`` is the loss."""
    model, data = made
    base = _of("lightning", "LightningModule")

    class Lit(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return classified(self.net, x, y)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self(*batch)

    wrapped = run.wrap(Lit(), data[0], loss=lambda m, x, y: m.training_step((x, y), 0))
    optimizer = sgd(wrapped)
    return {"losses": [step(wrapped, optimizer, b) for b in data], "state": run.state(wrapped)}


@loop("torchmetrics", ready)
def torchmetrics_between_steps(run: Run, made: Any) -> dict[str, Any]:
    model, data = made
    metric = _of("torchmetrics.classification", "MulticlassAccuracy")(CLASSES, validate_args=False)
    wrapped = run.wrap(model, data[0], loss=classified)
    optimizer = sgd(wrapped)
    losses = []
    for x, y in data:
        losses.append(step(wrapped, optimizer, (x, y)))
        with torch.no_grad():
            metric.update(run.whole(wrapped).eval()(x), y)
    return {"losses": losses, "accuracy": metric.compute()}
