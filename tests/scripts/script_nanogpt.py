"""After nanoGPT: a GPT of one's own with tied weights, two groups of weight decay, accumulation, a cosine
schedule by hand, an evaluation that draws batches, checkpoints and samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import CLUSTER
from torch import Tensor, nn
from torch.nn import functional as F

import hetspmd

BLOCK, WORDS, WIDTH, HEADS = 8, 40, 16, 4
ACCUMULATED, STEPS, WARMUP, HIGH, LOW = 2, 6, 2, 1e-2, 1e-3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in self.c_attn(x).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h, self.ln_f = nn.ModuleList([Block()]), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=HIGH, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(self, idx: Tensor, new: int) -> Tensor:
        for _ in range(new):
            logits, _ = self(idx[:, -BLOCK:])
            top, _ = torch.topk(logits[:, -1, :], 5)
            chances = logits[:, -1, :].masked_fill(logits[:, -1, :] < top[:, [-1]], -float("inf")).softmax(-1)
            idx = torch.cat((idx, torch.multinomial(chances, num_samples=1)), dim=1)
        return idx


def rate(step: int) -> float:
    if step < WARMUP:
        return HIGH * (step + 1) / (WARMUP + 1)
    return LOW + 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) * (HIGH - LOW)


def train(alone: bool, folder: Path) -> dict[str, Any]:
    if not alone:
        dist.init_process_group("gloo")
    text = torch.arange(600) * 7 % 37 + torch.arange(600) % 3

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - BLOCK - 1, (8,))
        rows = torch.stack([text[i : i + BLOCK + 1] for i in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(1337)
        model = GPT()
        if alone:
            return model, model.configure_optimizers()
        hap = hetspmd.HAP(model, CLUSTER, example=(torch.zeros(8, BLOCK, dtype=torch.long),) * 2, loss=1)
        return hap, model.configure_optimizers()

    figures: list[float] = []
    model, optimizer = fresh()
    for step in range(STEPS):
        if step == STEPS // 2:  # saved, and resumed in a new model
            path = folder / f"{'alone' if alone else 'ranks'}-checkpoint.pt"
            if alone:
                torch.save((model.state_dict(), optimizer.state_dict()), path)
                model, optimizer = fresh()
                weights, moments = torch.load(path)
                model.load_state_dict(weights)
                optimizer.load_state_dict(moments)
            else:
                state = model.full_state_dict(), hetspmd.full_optimizer_state_dict(model, optimizer)
                if dist.get_rank() == 0:
                    torch.save(state, path)
                dist.barrier()
                model, optimizer = fresh()
                weights, moments = torch.load(path)
                model.load_full_state_dict(weights)
                hetspmd.load_full_optimizer_state_dict(model, optimizer, moments)
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                figures += [model(*batch())[1].item() for _ in range(2)]
            model.train()
        for _ in range(ACCUMULATED):
            loss = model(*batch())[1] / ACCUMULATED
            loss.backward()
            figures.append(loss.item())
        figures.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    whole = model if alone else model.full_module()
    torch.manual_seed(3)
    samples = whole.eval().generate(torch.zeros(2, 1, dtype=torch.long), 12).tolist()
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    return {"figures": figures, "held": held, "samples": samples, "weights": whole.state_dict()}
