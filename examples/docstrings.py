"""A language model of Python's own documentation, on four unlike workers beside the single device.

    python examples/docstrings.py                            # starts the four workers itself
    torchrun --nproc-per-node 4 examples/docstrings.py

A small GPT-2 from Hugging Face learns the documentation strings of the standard library, one character at a
time. Worker 0 also trains a copy of the model alone and prints both losses; they agree to the digits shown.
The held-out text is the last tenth.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import hetspmd
from launch import launch_workers

CLUSTER = Path(__file__).parent / "clusters" / "four-boards.yaml"
BATCH, TOKENS, CHARACTERS = 24, 64, 128
Example = dict[str, Tensor]


def language_model() -> GPT2LMHeadModel:
    """A GPT-2 of two layers over ASCII, without dropout."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=CHARACTERS,
        n_positions=TOKENS,
        n_embd=96,
        n_layer=2,
        n_head=6,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def documentation() -> str:
    """The documentation strings of the standard library's top-level modules, in the order of their names."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                texts.append(ast.get_docstring(node) or "")
    return "\n\n".join(filter(None, texts))


def load_data() -> tuple[Tensor, Tensor]:
    """Rows of characters, shape (rows, TOKENS): nine tenths to train on, one tenth held out."""
    codes = torch.tensor(list(documentation().encode("ascii", "ignore")))
    rows = codes[: len(codes) // TOKENS * TOKENS].view(-1, TOKENS)
    return rows[: len(rows) * 9 // 10], rows[len(rows) * 9 // 10 :]


def batches(rows: Tensor, steps: int) -> Iterator[Example]:
    """Random batches, the same on every worker."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        yield {"input_ids": ids, "labels": ids}


def train(model: nn.Module, data: Iterable[Example]) -> Iterator[float]:
    """An ordinary training loop; yields the loss of each step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def perplexity(model: nn.Module, rows: Tensor) -> float:
    """Per character, of held-out text."""
    model.eval()
    losses = [model(input_ids=ids, labels=ids).loss * len(ids) for ids in rows.split(64)]
    return torch.exp(torch.stack(losses).sum() / len(rows)).item()


def work(cluster: str, steps: int) -> None:
    """What each worker does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows, held_out = load_data()
    single = language_model()
    first = dist.get_rank() == 0

    model = hetspmd.HAP(copy.deepcopy(single), cluster, example=next(batches(rows, 1)))

    if first:
        print(f"{model.plan}\n\n{'step':>4}  {'four workers':>12}  {'one device':>12}")
    worst = 0.0
    alone = train(single, batches(rows, steps)) if first else None
    for step, loss in enumerate(train(model, batches(rows, steps))):
        if alone is None:
            continue
        reference = next(alone)
        worst = max(worst, abs(loss - reference) / reference)
        if step % 10 == 0:
            print(f"{step:>4}  {loss:>12.4f}  {reference:>12.4f}", flush=True)

    state = model.full_state_dict()
    if first:
        restored = language_model()
        restored.load_state_dict(state)
        print(
            f"\nlargest relative difference of a loss: {worst:.1e}\n"
            f"held-out perplexity per character: {perplexity(restored, held_out):.3f} (four workers), "
            f"{perplexity(single, held_out):.3f} (one device)"
        )
    dist.destroy_process_group()
    if worst > 1e-3:
        raise SystemExit(
            f"the losses differ by {worst:.1e}: the program does not compute what one device does"
        )


def build() -> tuple[nn.Module, Example]:
    """The model and a batch, for ``hetspmd compile examples/docstrings.py --cluster ...``."""
    return language_model(), next(batches(load_data()[0], 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cluster", default=str(CLUSTER), help="cluster file with one device per worker")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options.cluster, options.steps)
    else:
        launch_workers(__file__, hetspmd.Cluster.load(options.cluster).world)
