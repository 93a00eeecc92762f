"""A loop of Accelerate: ``prepare``, ``accumulate``, ``backward``, ``clip_grad_norm_``, ``gather_for_metrics``, and
``save_state`` with ``load_state``, over a BERT of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from forked import CLUSTER
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import hetspmd

CONFIG = BertConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
)  # fmt: skip


def train(alone: bool, folder: Path) -> dict[str, Any]:
    rank = 0
    if not alone:
        dist.init_process_group("gloo")
        rank = hetspmd.hide_ranks()
    set_seed(0)
    tokens, labels = torch.randint(0, 64, (48, 8)), torch.randint(0, 3, (48,))
    rows = [{"input_ids": t, "labels": k} for t, k in zip(tokens, labels, strict=True)]
    where = folder / ("alone" if alone else f"rank{rank}")
    figures: list[float] = []

    def run(epoch: int, *, resume: bool) -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        set_seed(1)
        loader, held = DataLoader(rows, batch_size=8, shuffle=True), DataLoader(rows[:16], batch_size=8)
        model: Any = BertForSequenceClassification(CONFIG)
        if not alone:
            example = next(iter(held))
            model = hetspmd.HAP(model, CLUSTER, example=example, gather_state=True, gather_outputs=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        model, optimizer, loader, held, schedule = accelerator.prepare(
            model, optimizer, loader, held, schedule
        )
        if resume:
            accelerator.load_state(str(where))
        set_seed(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                figures.append(loss.item())
                if accelerator.sync_gradients:
                    figures.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        for batch in held:
            with torch.no_grad():
                out = model(**batch)
            found, true = accelerator.gather_for_metrics((out.logits.argmax(-1), batch["labels"]))
            figures.extend([float((found == true).sum()), out.loss.item()])
        accelerator.save_state(str(where))
        return accelerator.get_state_dict(model), sum(
            p.untyped_storage().nbytes() for p in model.parameters()
        )

    run(0, resume=False)
    weights, held = run(1, resume=True)
    return {
        "figures": figures,
        "held": held,
        "samples": sorted(p.name for p in where.iterdir()),
        "weights": dict(weights),
    }
