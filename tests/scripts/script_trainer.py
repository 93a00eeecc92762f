"""Hugging Face Trainer over a GPT-2: evaluation with metrics, clipping, a cosine schedule, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import CLUSTER
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hetspmd

CONFIG = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0, use_cache=False,
)  # fmt: skip


def train(alone: bool, folder: Path) -> dict[str, Any]:
    rank = 0
    if not alone:
        dist.init_process_group("gloo")
        rank = hetspmd.hide_ranks()
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (24, 12))
    rows = [{"input_ids": t, "labels": t} for t in tokens]
    where = folder / ("alone" if alone else f"rank{rank}")
    arguments = {
        "output_dir": str(where), "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
        "num_train_epochs": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1,
        "lr_scheduler_type": "cosine", "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "epoch",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0,
        "label_names": ["labels"],
    }  # fmt: skip

    def metrics(found: Any) -> dict[str, float]:
        return {"right": float((found.predictions.argmax(-1) == found.label_ids).sum())}

    def trainer() -> Any:
        torch.manual_seed(1)
        model: Any = GPT2LMHeadModel(CONFIG)
        if not alone:
            example = {"input_ids": tokens[:8], "labels": tokens[:8]}
            model = hetspmd.HAP(model, CLUSTER, example=example, gather_state=True, gather_outputs=True)
        args = TrainingArguments(**arguments)
        return Trainer(
            model=model, args=args, train_dataset=rows, eval_dataset=rows[:16], compute_metrics=metrics
        )

    first = trainer()
    first.train()
    again = trainer()
    again.train(resume_from_checkpoint=str(where / "checkpoint-3"))
    whole = again.model if alone else again.model.full_module()
    whole.save_pretrained(folder / ("final-alone" if alone else "final"))  # rank 0 writes
    if not alone:
        dist.barrier()
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right")
    logs = [*first.state.log_history, *again.state.log_history]
    figures = [entry[key] for entry in logs for key in kept if key in entry]
    weights = GPT2LMHeadModel.from_pretrained(folder / ("final-alone" if alone else "final")).state_dict()
    return {
        "figures": figures,
        "held": sum(p.untyped_storage().nbytes() for p in again.model.parameters()),
        "samples": sorted(p.name for p in where.glob("checkpoint-*")),
        "weights": weights,
    }
