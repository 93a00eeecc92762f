"""Models with datasets, trained by a loader of own rows or by torch's DataLoader on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from small_models import MLP, Attention, Residual
from small_plans import cluster
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hetspmd
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import derive
from hetspmd.run.module import HAP
from hetspmd.search import constraints as known
from hetspmd.trace.trace import trace

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
WORLD = 4
SPEEDS = (4, 2, 1, 0.1)
SEED = 5
OPTIMIZERS = ("SGD", "AdamW")


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Samples that are dicts. ``asked`` are the indices that were loaded in this process."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.asked.append(index)
        return {name: column[index] for name, column in self.columns.items()}


@dataclass
class Training:
    """A model, its samples, and how it is made distributed."""

    model: nn.Module
    rows: Rows
    batch_size: int
    options: dict[str, Any] = field(default_factory=dict)
    speeds: Sequence[float] = SPEEDS

    @property
    def example(self) -> dict[str, torch.Tensor]:
        return {name: column[: self.batch_size] for name, column in self.rows.columns.items()}

    def hap(self, communicator: Any = None, **others: Any) -> HAP:
        options = {"example": self.example, "process_group": communicator, "batch": "own", **self.options}
        return HAP(copy.deepcopy(self.model), cluster(*self.speeds), **{**options, **others})


def columns(count: int, **shapes: Any) -> Rows:
    """Random columns: of a shape, or integers up to a number, ``(shape, number)``."""
    draw = torch.Generator().manual_seed(3)
    found = {}
    for name, shape in shapes.items():
        if shape and isinstance(shape[0], tuple):
            found[name] = torch.randint(
                shape[2] if len(shape) > 2 else 0, shape[1], (count, *shape[0]), generator=draw
            )
        else:
            found[name] = torch.randn(count, *shape, generator=draw, dtype=torch.float64)
    return Rows(**found)


def mlp() -> Training:
    torch.manual_seed(0)
    return Training(MLP().double(), columns(23, x=(6,), labels=((), 5)), 9)


def data_parallel() -> Training:
    """In uneven parts; the last rank takes part and has no row."""
    training = mlp()
    training.options |= {"plan": _data_parallel_plan(), "example": None}
    return training


@cache
def _data_parallel_plan() -> Plan:
    training = mlp()
    theory = derive(trace(training.model, (), training.example))
    plan = plan_for(theory, cluster(*SPEEDS), known.data_parallel(theory), ((0.5, 0.3, 0.19, 0.01),))
    assert not plan.idle
    return plan


def tensor_parallel() -> Training:
    """Its inputs are whole on every rank, its layers divided."""
    torch.manual_seed(0)
    forced = {"x": "replicated", "labels": "replicated", "a.weight": "shard(0)", "b.weight": "shard(1)"}
    rows = columns(23, x=(6,), labels=((), 5))
    return Training(MLP().double(), rows, 9, {"constraints": forced})


def resnet() -> Training:
    torch.manual_seed(0)
    return Training(Residual().double(), columns(17, image=(3, 6, 6), labels=((), 5)), 7)


def micro_batches() -> Training:
    torch.manual_seed(0)
    model = Scores().double()
    return Training(model, columns(23, x=(6,), labels=((), 5)), 9, {"micro_batches": 3})


class Scores(nn.Module):
    """As many labels count as are not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.b(torch.tanh(self.a(x)))
        return nn.functional.cross_entropy(logits, labels, ignore_index=0)


def attention() -> Training:
    torch.manual_seed(0)
    model = Attention(dropout=0.0).double()
    return Training(model, columns(14, ids=((5,), 11), labels=((5,), 11)), 6)


def gpt2() -> Training:
    """Labels of which some do not count."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8, attn_pdrop=0.0,
                        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    rows = columns(11, input_ids=((6,), 20), labels=((6,), 20, -4))
    rows.columns["labels"][rows.columns["labels"] < 0] = -100
    return Training(Causal(GPT2LMHeadModel(config)).double(), rows, 5)


class Causal(nn.Module):
    """A language model's loss in its own precision (transformers takes float32)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def bert() -> Training:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=16, max_position_embeddings=8, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0, num_labels=3)  # fmt: skip
    rows = columns(11, input_ids=((6,), 30), attention_mask=((6,), 2), labels=((), 3))
    rows.columns["attention_mask"][:, :2] = 1
    return Training(BertForSequenceClassification(config).double(), rows, 5)


TRAININGS: dict[str, Callable[[], Training]] = {
    f.__name__: f for f in (mlp, data_parallel, tensor_parallel, resnet, micro_batches, attention, gpt2, bert)
}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """To the longest: as many columns as the largest label says."""
    longest = 1 + max(int(s["labels"]) for s in samples)
    return {
        "x": torch.stack([s["x"][:longest] for s in samples]),
        "labels": torch.stack([s["labels"] for s in samples]),
    }


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if hasattr(output, "keys") else output[0]


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in module.parameters() if p.requires_grad]
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2)


def epochs(
    module: nn.Module, batches: Any, optimizer: torch.optim.Optimizer, count: int = 2
) -> list[torch.Tensor]:
    losses = []
    for _ in range(count):
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(module(**batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses


def on_one_device(training: Training, optimizer: str = "SGD") -> dict[str, Any]:
    model = copy.deepcopy(training.model)
    generator = torch.Generator().manual_seed(SEED)
    batches = DataLoader(training.rows, training.batch_size, shuffle=True, generator=generator)
    losses = epochs(model, batches, optimizer_of(optimizer, model))
    return {"losses": losses, "final": model.state_dict()}


def on_a_rank(training: Training, communicator: Any = None, **workers: Any) -> dict[str, Any]:
    """The same with own rows, by SGD and, from the beginning again, by AdamW; also which samples SGD loaded."""
    hap = training.hap(communicator)
    start = hap.full_state_dict()
    found: dict[str, Any] = {"rank": hap.rank}
    for optimizer in OPTIMIZERS:
        hap.load_full_state_dict(start)
        rows = Rows(**training.rows.columns)
        batches = hetspmd.loader(
            rows, hap, batch_size=training.batch_size, shuffle=True, seed=SEED, **workers
        )
        losses = epochs(hap, batches, optimizer_of(optimizer, hap))
        found[optimizer] = {"losses": losses, "final": hap.full_state_dict()}
        found.setdefault("asked", rows.asked)
    return found


def check_all(got: dict[str, Any], training: Training) -> None:
    for optimizer in OPTIMIZERS:
        check(got[optimizer], on_one_device(training, optimizer))


def check(got: dict[str, Any], want: dict[str, Any]) -> None:
    torch.testing.assert_close(got["losses"], want["losses"], **CLOSE)
    assert got["final"].keys() == want["final"].keys()
    for name, tensor in want["final"].items():
        torch.testing.assert_close(got["final"][name], tensor, **CLOSE)
