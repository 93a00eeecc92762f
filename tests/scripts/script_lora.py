"""PEFT: LoRA over a Llama, whose adapter is saved, loaded and trained on, then merged to write a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import CLUSTER
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hetspmd

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=32, max_position_embeddings=16, use_cache=False, pad_token_id=0,
)  # fmt: skip
LORA = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_proj"], modules_to_save=["lm_head"]
)


def train(alone: bool, folder: Path) -> dict[str, Any]:
    if not alone:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(1, 64, (24, 8))
    where = folder / ("alone" if alone else "ranks")

    def base() -> Any:
        torch.manual_seed(1)
        return LlamaForCausalLM(CONFIG)

    def wrapped(model: Any) -> tuple[Any, torch.optim.Optimizer]:
        if not alone:
            model = hetspmd.HAP(model, CLUSTER, example={"input_ids": tokens[:8], "labels": tokens[:8]})
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    figures: list[float] = []
    model, optimizer = wrapped(get_peft_model(base(), LORA))
    for epoch in range(2):
        if epoch:
            moments = optimizer.state_dict() if alone else hetspmd.full_optimizer_state_dict(model, optimizer)
            whole = model if alone else model.full_module()
            if alone or dist.get_rank() == 0:
                whole.save_pretrained(where)
            if not alone:
                dist.barrier()
            model, optimizer = wrapped(PeftModel.from_pretrained(base(), where, is_trainable=True))
            if alone:
                optimizer.load_state_dict(moments)
            else:
                hetspmd.load_full_optimizer_state_dict(model, optimizer, moments)
        for rows in tokens.split(8):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            figures += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            figures.append(model(input_ids=tokens[:8], labels=tokens[:8]).loss.item())
        model.train()
    held = sum(p.untyped_storage().nbytes() for p in model.parameters())
    merged = (model if alone else model.full_module()).merge_and_unload()
    mask = torch.ones_like(tokens[:2, :4])
    samples = merged.generate(tokens[:2, :4], attention_mask=mask, max_new_tokens=4, do_sample=False)
    return {"figures": figures, "held": held, "samples": samples.tolist(), "weights": merged.state_dict()}
