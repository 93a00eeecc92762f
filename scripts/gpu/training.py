"""Is training on several GPUs, or several ranks of one, that of one device? Prints a line a case; exit 1 if not.

    python scripts/gpu/share.py --shares 50,25,12,12 -- python scripts/gpu/training.py
    torchrun --nproc-per-node 4 scripts/gpu/training.py

Every case trains a model whose matrices lie in shards of 4 : 2 : 1 : 1: clipping, a schedule, evaluation of fewer
rows, a whole state saved and loaded into one device's model, and steps after loading; in float32, under autocast
to bfloat16, and in float16 with a gradient scaler. What one device makes of the same script is computed beside it
on every rank. Losses and norms must be equal to it, and bit for bit equal on all ranks. Then come calls that must
be refused by name. ``--device cpu`` tries the script itself, over gloo.
"""

# ruff: noqa: E402  # the benches are put on the path first
from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

sys.path[:0] = [str(Path(__file__).parents[2] / "benches")]

import hetspmd
from hetspmd.errors import BatchMismatchError, DeviceError, HetspmdError, ShardError
from trust.models import build

SPEEDS = (4, 2, 1, 1)
CLUSTER = {
    "devices": [{"flops": f"{s} GFLOP/s", "memory": "16GiB", "memory_bandwidth": "10GB/s"} for s in SPEEDS],
    "network": {"bandwidth": "100Gbit/s", "latency": "1us"},
}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What is trained, how, and how far it may be from one device, as a part of the value."""

    name: str
    model: str
    options: dict[str, int]
    optimizer: Callable[..., Optimizer]
    tolerance: float
    dtype: torch.dtype | None = None
    double: bool = False

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext() if self.dtype is None else torch.autocast(device.type, self.dtype)


GPT = {"batch": 16, "tokens": 32, "layers": 2, "width": 64}
CASES = [
    Case("GPT-2, float32", "GPT-2", GPT, lambda p: AdamW(p, lr=1e-3, eps=1e-4), 1e-4),
    Case("GPT-2, fused AdamW", "GPT-2", GPT, lambda p: AdamW(p, lr=1e-3, eps=1e-4, fused=True), 1e-4),
    Case("GPT-2, Adam one by one", "GPT-2", GPT, lambda p: Adam(p, lr=1e-3, eps=1e-4, foreach=False), 1e-4),
    Case("BERT-MoE, float32", "BERT-MoE", {}, lambda p: SGD(p, lr=0.1, momentum=0.9), 1e-4),
    Case("ResNet-50, float64", "ResNet-50", {}, lambda p: SGD(p, lr=0.01), 1e-6, double=True),
    Case("GPT-2, bfloat16", "GPT-2", GPT, lambda p: AdamW(p, lr=1e-3, eps=1e-4), 2e-2, torch.bfloat16),
    Case("GPT-2, float16", "GPT-2", GPT, lambda p: AdamW(p, lr=1e-3, eps=1e-4), 2e-2, torch.float16),
]


def built(case: Case, device: torch.device) -> tuple[nn.Module, Batch]:
    """The case's model and batch; statistics of batches are too sensitive to rounding for float32."""
    model, batch = build(case.model, **case.options)
    model = (model.double() if case.double else model).to(device)
    for name, value in batch.items():
        batch[name] = (value.double() if case.double and value.is_floating_point() else value).to(device)
    return model, batch


class Script:
    """A training script of one model, which does not know whether it is a HAP."""

    def __init__(self, case: Case, model: nn.Module, batch: Batch) -> None:
        device = next(iter(batch.values())).device
        self.case, self.model, self.batch, self.device = case, model, batch, device
        self.optimizer = case.optimizer(model.parameters())
        self.schedule = CosineAnnealingLR(self.optimizer, 20)
        enabled = case.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=enabled)

    def train(self, steps: int) -> list[float]:
        """The loss and the gradients' norm of each step."""
        found: list[float] = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            with self.case.autocast(self.device):
                loss = self.model(**self.batch)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            found += [loss.item(), float(norm)]
        return found

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss of the first five rows."""
        self.model.eval()
        with self.case.autocast(self.device):
            loss = self.model(**{name: value[:5] for name, value in self.batch.items()})
        self.model.train()
        return float(loss)


def matrices_in_shards(model: nn.Module) -> dict[str, str]:
    """Constraints of a compile that divide every matrix."""
    named = model.named_parameters()
    return {name: "shard(0)" for name, p in named if p.dim() == 2 and p.shape[0] >= len(SPEEDS)}


def compared(case: Case, device: torch.device) -> str:
    """What is wrong with the case, or nothing."""
    model, batch = built(case, device)
    one = Script(case, copy.deepcopy(model), batch)
    want = [*one.train(3), one.evaluate(), *one.train(2), one.evaluate()]

    hap = hetspmd.HAP(model, CLUSTER, example=batch, constraints=matrices_in_shards(model))
    layout = hap.plan.parameter_layout()
    if not any(0 < max(extents) < sum(extents) for _, extents in layout.values()):
        return "no parameter is divided"
    script = Script(case, hap, batch)
    found = [*script.train(3), script.evaluate()]
    state = copy.deepcopy(hap.full_state_dict())
    moments = copy.deepcopy(hetspmd.full_optimizer_state_dict(hap, script.optimizer))
    whole, _ = built(case, device)
    whole.load_state_dict(state)
    apart = abs(Script(case, whole, batch).evaluate() - found[-1])
    if not apart <= case.tolerance * abs(found[-1]):
        return f"one device's model with the saved state is {apart:.3g} apart"
    script.train(1)
    hap.load_full_state_dict(state)
    hetspmd.load_full_optimizer_state_dict(hap, script.optimizer, moments)
    script.schedule.last_epoch -= 1
    for group, rate in zip(script.optimizer.param_groups, script.schedule._get_closed_form_lr(), strict=True):
        group["lr"] = rate
    found += [*script.train(2), script.evaluate()]
    return differs(found, want, case.tolerance)


def differs(found: list[float], want: list[float], tolerance: float) -> str:
    """Where the ranks' numbers part from one device's or from each other's; prints the largest error."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if any(of != found for of in everyone):
        return f"the ranks part: {everyone}"
    if not all(math.isfinite(value) for value in (*found, *want)):
        return f"{found} where one device has {want}"
    error = max(abs(f - w) / max(abs(w), 1e-6) for f, w in zip(found, want, strict=True))
    say(f"   largest relative error {error:.2e} of {len(want)} losses and norms, the last {found[-1]:.17g}")
    return "" if error <= tolerance else f"{found} where one device has {want}"


def refusals(device: torch.device) -> list[str]:
    """Which of the calls that must be refused are not."""
    case = CASES[0]
    model, on_host = build(case.model, **case.options)
    batch = {name: value.to(device) for name, value in on_host.items()}
    hap = hetspmd.HAP(model.to(device), CLUSTER, example=batch, constraints=matrices_in_shards(model))
    hap(**batch).backward()
    weight = max(hap.parameters(), key=lambda p: p.numel())

    def another_batch() -> None:
        changed = {name: (value + 1) % 4 if dist.get_rank() == 1 else value for name, value in batch.items()}
        for _ in range(2):  # a GPU's inputs are compared one step later
            hap(**changed).backward()

    calls: dict[str, tuple[type[HetspmdError], Callable[[], Any]]] = {
        "a norm of a shard": (ShardError, lambda: weight.data.norm()),
        "a product of shards": (ShardError, lambda: torch.mm(weight, weight.T)),
        "a state dict of shards": (HetspmdError, lambda: hap.module.state_dict()),
        "another batch on rank 1": (BatchMismatchError, another_batch),
    }
    if device.type != "cpu":
        calls["a batch on the host"] = (DeviceError, lambda: hap(**on_host))
    failures = []
    for name, (kind, call) in calls.items():
        try:
            call()
            failures.append(f"{name} was not refused")
        except kind as error:
            say(f"   {name}: {type(error).__name__}: {str(error)[:100]}")
    return failures


ODD = {**GPT, "tokens": 30}
ELSEWHERE = [
    Case("GPT-2, float32", "GPT-2", ODD, lambda p: AdamW(p, lr=1e-3, eps=1e-4), 1e-4),
    Case("GPT-2, float64", "GPT-2", ODD, lambda p: AdamW(p, lr=1e-3, eps=1e-4), 1e-6, double=True),
    Case("GPT-2, bfloat16", "GPT-2", ODD, lambda p: AdamW(p, lr=1e-3, eps=1e-4), 2e-2, torch.bfloat16),
    Case("BERT with a mask, float32", "BERT", {"batch": 8}, lambda p: AdamW(p, lr=1e-3, eps=1e-4), 1e-4),
]


def planned_elsewhere(case: Case, device: torch.device) -> str:
    """A plan of a model on the CPU, which runs on the GPUs; what is wrong, or nothing."""
    host = torch.device("cpu")
    model, batch = built(case, host)
    if case.model == "BERT":
        seen = torch.ones_like(batch["input_ids"])
        seen[::2, -3:] = 0
        batch["attention_mask"] = seen
    with case.autocast(host):
        plan = hetspmd.compile(model, batch, CLUSTER, constraints=matrices_in_shards(model))
    batch = {name: value.to(device) for name, value in batch.items()}
    model = model.to(device)
    want = Script(case, copy.deepcopy(model), batch).train(2)
    return differs(Script(case, hetspmd.HAP(model, CLUSTER, plan=plan), batch).train(2), want, case.tolerance)


def attempted(name: str, what: Callable[[], str]) -> bool:
    """Whether it went wrong."""
    began = time.monotonic()
    try:
        wrong = what()
    except (HetspmdError, RuntimeError) as error:
        wrong = f"{type(error).__name__}: {error}"
    say(f"{'WRONG' if wrong else 'ok'} {name} ({time.monotonic() - began:.1f} s) {wrong}")
    return bool(wrong)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="cases whose names have this")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    failed = False
    for case in CASES:
        if options.only in case.name:
            failed |= attempted(case.name, partial(compared, case, device))
    for case in ELSEWHERE:
        if options.only in (title := f"{case.name}, planned on a CPU"):
            failed |= attempted(title, partial(planned_elsewhere, case, device))
    refused = refusals(device)
    say(f"{'WRONG' if refused else 'ok'} refusals {refused or ''}")
    dist.destroy_process_group()
    return 1 if failed or refused else 0


if __name__ == "__main__":
    sys.exit(main())
