"""Lightning: a LightningModule with a scheduler, logged metrics, clipping, validation, checkpoints and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from forked import CLUSTER
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetspmd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Linear(48, 8))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


class Lit(lightning.LightningModule):
    def __init__(self, example: Any, alone: bool, figures: list[float]) -> None:
        super().__init__()
        self.net: Any = Net()
        if not alone:
            self.net = hetspmd.HAP(self.net, CLUSTER, example=example, gather_state=True, gather_outputs=True)
        self.figures = figures

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.net(*batch)["loss"]
        self.log("train_loss", loss)
        self.figures.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        out = self.net(*batch)
        self.log("val_loss", out["loss"])
        self.log("accuracy", (out["logits"].argmax(1) == batch[1]).double().mean())

    def on_validation_epoch_end(self) -> None:
        self.figures.extend(
            float(v) for k, v in sorted(self.trainer.callback_metrics.items()) if k != "train_loss"
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        }


def train(alone: bool, folder: Path) -> dict[str, Any]:
    rank = 0
    if not alone:
        dist.init_process_group("gloo")
        rank = hetspmd.hide_ranks()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 16), torch.randint(0, 8, (48,)))
    where = folder / ("alone" if alone else f"rank{rank}")
    figures: list[float] = []

    def fit(epochs: int, checkpoint: str | None) -> int:
        lightning.seed_everything(1, verbose=False)
        loader = DataLoader(
            data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(epochs)
        )
        lit = Lit(tuple(data[:16]), alone, figures)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, gradient_clip_val=0.5, logger=False,
            default_root_dir=str(where),
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            callbacks=[ModelCheckpoint(dirpath=where, filename=f"epoch{epochs}", enable_version_counter=False)],
        )  # fmt: skip
        more = {} if checkpoint is None else {"ckpt_path": checkpoint, "weights_only": False}
        trainer.fit(lit, loader, DataLoader(data, batch_size=16), **more)
        return sum(p.untyped_storage().nbytes() for p in lit.parameters())

    fit(1, None)
    held = fit(2, str(where / "epoch1.ckpt"))
    state = torch.load(where / "epoch2.ckpt", weights_only=False)
    return {"figures": figures, "held": held, "samples": state["global_step"], "weights": state["state_dict"]}
