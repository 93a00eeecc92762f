"""Reports about training loops: clipping, accumulation, schedules, evaluation, averages, copies, resuming."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cases_forward import Body, Made, only_x, rows
from harness import Run, called, case
from torch import nn
from torch.nn import functional as F

import hetspmd


class Classifier(Body):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.second(torch.relu(self.norm(self.first(x)))), labels)


Loop = Callable[[Run, nn.Module, Sequence[Any]], dict[str, Any]]


def loop(report: str, **facts: Any) -> Callable[[Loop], Loop]:
    """Add a loop over the classifier to the corpus, under the loop's name."""

    def add(body: Loop) -> Loop:
        def make() -> Made:
            return Classifier(), rows()

        make.__name__ = body.__name__
        case(report, loop=body, **facts)(make)
        return body

    return add


def step(wrapped: Any, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = called(wrapped, batch)
    loss.backward()
    optimizer.step()
    return loss.detach().clone()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@loop("pytorch#170862, torchtitan#766: torch's own clip_grad_norm_")
def clipped_by_torch(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        called(wrapped, batch).backward()
        norms.append(nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1))
        optimizer.step()
    return {"norms": norms, "state": run.state(wrapped)}


@loop("pytorch#72548: gradients clipped by value")
def clipped_by_value(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    for batch in batches:
        optimizer.zero_grad()
        called(wrapped, batch).backward()
        nn.utils.clip_grad_value_(wrapped.parameters(), 0.01)
        optimizer.step()
    return {"state": run.state(wrapped)}


@loop("transformers#34242: gradients of several batches are summed, loss over their number")
def accumulated(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        for batch in batches:
            (called(wrapped, batch) / len(batches)).backward()
        run.clip(wrapped, 0.5)
        optimizer.step()
    return {"state": run.state(wrapped)}


@loop("fairscale#601: groups of parameters with rates of their own, and a schedule")
def groups_and_a_schedule(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01}], lr=0.05
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.01], total_steps=8)
    wrapped = run.wrap(model, batches[0])
    losses = []
    for batch in batches:
        losses.append(step(wrapped, optimizer, batch))
        schedule.step()
    return {"losses": losses, "state": run.state(wrapped)}


@loop("VISSL#474: layers that thaw in the middle of training")
def layers_that_thaw(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    model.first.requires_grad_(False)
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    losses = [step(wrapped, optimizer, batch) for batch in batches]
    model.first.requires_grad_(True)
    losses += [step(wrapped, optimizer, batch) for batch in batches]
    return {"losses": losses, "state": run.state(wrapped)}


@loop("Lightning#16914: evaluation between epochs, in three ways")
def evaluation_between_epochs(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    losses = []
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        losses += [step(wrapped, optimizer, batch) for batch in batches]
        wrapped.eval()
        with context():
            losses += [called(wrapped, batch).detach().clone() for batch in batches]
        wrapped.train()
    return {"losses": losses, "state": run.state(wrapped)}


@loop("pytorch-lightning#16815: stopped, and resumed from whole states")
def resumed(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    def start(fresh: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
        return run.wrap(fresh, batches[0]), torch.optim.AdamW(fresh.parameters(), lr=0.05, amsgrad=True)

    untouched = copy.deepcopy(model)
    wrapped, optimizer = start(model)
    losses = [step(wrapped, optimizer, batch) for batch in batches]
    file = io.BytesIO()
    state = optimizer.state_dict() if run.alone else hetspmd.full_optimizer_state_dict(wrapped, optimizer)
    torch.save({"model": run.state(wrapped), "optimizer": state}, file)
    file.seek(0)
    saved = torch.load(file)
    again, optimizer = start(untouched)
    if run.alone:
        again.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    else:
        again.load_full_state_dict(saved["model"])
        hetspmd.load_full_optimizer_state_dict(again, optimizer, saved["optimizer"])
    losses += [step(again, optimizer, batch) for batch in batches]
    return {"losses": losses, "state": run.state(again)}


@loop("pytorch#136228: the best state is kept and loaded again; dimensions do not divide")
def the_best_state_is_loaded_again(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    step(wrapped, optimizer, batches[0])
    best = run.state(wrapped)
    losses = [step(wrapped, optimizer, batch) for batch in batches]
    (wrapped.load_state_dict if run.alone else wrapped.load_full_state_dict)(best)
    return {"losses": [*losses, step(wrapped, optimizer, batches[0])], "state": run.state(wrapped)}


@loop("pytorch#55876: a second backward through one graph")
def a_second_backward(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    for batch in batches:
        optimizer.zero_grad(set_to_none=False)
        loss = called(wrapped, batch)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()
    return {"state": run.state(wrapped)}


@loop("pytorch#19024: weights are clamped after each step")
def weights_are_clamped(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    losses = []
    for batch in batches:
        losses.append(step(wrapped, optimizer, batch))
        for p in wrapped.parameters():
            p.data.clamp_(-0.1, 0.1)
    return {"losses": losses, "state": run.state(wrapped)}


@loop("pytorch#117742: decay by hand, on gradients")
def decay_by_hand(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    for batch in batches:
        optimizer.zero_grad()
        called(wrapped, batch).backward()
        with torch.no_grad():
            for p in wrapped.parameters():
                p.grad.add_(p, alpha=0.01)
        optimizer.step()
    return {"state": run.state(wrapped)}


@loop("fairscale#776: two parts with optimizers of their own")
def two_optimizers(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0])
    first, second = sgd(model.first), torch.optim.Adam(model.second.parameters(), lr=0.01)
    for k, batch in enumerate(batches):
        wrapped.zero_grad()
        called(wrapped, batch).backward()
        (first if k % 2 else second).step()
    return {"state": run.state(wrapped)}


@loop("facebookresearch/fairscale#776: a file is written from the state dict", refused=r"full_state_dict\(\)")
def a_file_from_the_state_dict(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0], constraints={"first.*": "shard(0)"})
    torch.save(wrapped.state_dict(), io.BytesIO())
    return {}


@loop("pytorch#82070: the module is copied for an average", refused=r"full_|copy")
def the_module_is_copied(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0], constraints={"first.*": "shard(0)"})
    return {"copy": copy.deepcopy(wrapped.module)(*batches[0])}


@loop("pytorch#117742: the sharded module is called itself", refused=r"hap\(|call")
def the_module_is_called(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0], constraints={"first.*": "shard(0)"})
    return {"loss": wrapped.module(*batches[0])}


@loop("Megatron-LM#5961: an optimizer that looks at whole matrices", refused=r"Muon|LBFGS")
def an_optimizer_of_whole_matrices(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0], constraints={"first.*": "shard(0)"})
    optimizer = torch.optim.LBFGS(wrapped.parameters())
    loss = called(wrapped, batches[0])
    loss.backward()
    optimizer.step(lambda: loss)
    return {}


@loop(
    "accelerate#2769: every rank has rows of its own",
    refused=r"was given another x|every rank was given another",
)
def rows_of_its_own(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, optimizer = run.wrap(model, batches[0]), sgd(model)
    step(wrapped, optimizer, batches[0])
    x, labels = batches[1]
    shift = 0 if run.communicator is None else run.communicator.rank
    return {"loss": step(wrapped, optimizer, (x.roll(shift, 0), labels))}


def adversarial(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """Both networks in one module, and a loss of its own for each turn."""
    judge = sgd(model.judge, 0.05)
    maker = sgd(model.maker, 0.05)

    def judged(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(-m.judge(x)).mean() + F.softplus(m.judge(m.maker(x).detach())).mean()

    def fooled(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(-m.judge(m.maker(x))).mean()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor, turn: str) -> torch.Tensor:
            return (judged if turn == "judge" else fooled)(self.inner, x)

    wrapped = run.wrap(Both(), (*batches[0], "judge"))
    losses = []
    for batch in batches:
        for optimizer, turn in ((judge, "judge"), (maker, "maker")):
            wrapped.zero_grad()
            loss = wrapped(*batch, turn)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
    return {"losses": losses, "state": run.state(wrapped)}


@case("fairscale#776, pytorch#19024: two networks in turns", loop=adversarial)
def two_networks_in_turns() -> Made:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
            self.judge = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.judge(self.maker(x))

    return Two(), only_x()


def one_after_the_other(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped = run.wrap(model, batches[0], loss=lambda m, x: {"loss": m(x).mean(), "y": m(x)})
    wrapped(*batches[0])["y"].sum().backward()
    return {}


@case(
    "pytorch#55876: a gradient through an output that is not the loss",
    loop=one_after_the_other,
    refused=r"not the loss",
)
def a_gradient_through_an_output() -> Made:
    return nn.Linear(12, 12), only_x()


class Followed(nn.Module):
    """A network, and a copy of it that the loop moves."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 7))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = self.target(x + 1)
        return (self.online(x) - goal).square().mean()


@case("BYOL, DQN: a target network in the model, moved by the loop",
      loop=lambda run, model, batches: _moved(run, model, batches))  # fmt: skip
def a_target_network_in_the_model() -> Made:
    return Followed(), only_x()


def _moved(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    wrapped, losses = run.wrap(model, batches[0]), []
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        loss = wrapped(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
        with torch.no_grad():
            pairs = zip(model.target.parameters(), model.online.parameters(), strict=True)
            for a, b in pairs:
                a.lerp_(b, 0.1)
    return {"losses": losses, "state": run.state(wrapped)}
