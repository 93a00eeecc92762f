"""A residual network of torchvision with an average of its weights (EMA), label smoothing outside of the model,
momentum and a one-cycle schedule; the average is evaluated and saved, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import CLUSTER
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

import hetspmd

criterion = nn.CrossEntropyLoss(label_smoothing=0.1)


def with_loss(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    logits = model(x)
    return {"loss": criterion(logits, y), "logits": logits}


def train(alone: bool, folder: Path) -> dict[str, Any]:
    if not alone:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3, 16, 16), torch.randint(0, 10, (24,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))

    def step(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return with_loss(model, x, y) if alone else model(x, y)

    def fresh() -> tuple[Any, Any, torch.optim.Optimizer, Any]:
        torch.manual_seed(2)
        model: Any = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
        if not alone:
            model = hetspmd.HAP(model, CLUSTER, example=data[:8], loss=with_loss, gather_outputs=True)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True
        )
        return model, average, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10)

    def evaluate(model: nn.Module) -> list[float]:
        model.eval()
        right = total = 0.0
        with torch.no_grad():
            for x, y in DataLoader(data, batch_size=8):
                out = step(model, x, y)
                right += (out["logits"].argmax(1) == y).sum().item()
                total += out["loss"].item()
        model.train()
        return [right, total]

    figures: list[float] = []
    model, average, optimizer, schedule = fresh()
    for epoch in range(2):
        if epoch:
            path = folder / f"{'alone' if alone else 'ranks'}-checkpoint.pt"
            rest = schedule.state_dict(), average.n_averaged
            if alone:
                torch.save(
                    (model.state_dict(), average.module.state_dict(), optimizer.state_dict(), *rest), path
                )
            else:
                weights, averaged = model.full_state_dict(), average.module.full_state_dict()
                moments = hetspmd.full_optimizer_state_dict(model, optimizer)
                if dist.get_rank() == 0:
                    torch.save((weights, averaged, moments, *rest), path)
                dist.barrier()
            weights, averaged, moments, scheduled, count = torch.load(path)
            model, average, optimizer, schedule = fresh()
            model.load_state_dict(weights)
            average.module.load_state_dict(averaged)
            average.n_averaged.copy_(count)
            schedule.load_state_dict(scheduled)
            if alone:
                optimizer.load_state_dict(moments)
            else:
                hetspmd.load_full_optimizer_state_dict(model, optimizer, moments)
        for x, y in loader:
            optimizer.zero_grad()
            loss = step(model, x, y)["loss"]
            loss.backward()
            figures += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
        figures += [*evaluate(model), *evaluate(average)]
    kept = average.module if alone else average.module.full_module()
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    return {
        "figures": figures,
        "held": held,
        "samples": int(average.n_averaged),
        "weights": kept.state_dict(),
    }
