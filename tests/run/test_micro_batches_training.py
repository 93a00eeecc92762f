"""HAP with ``micro_batches``: the training loop of a user, equal to one device with the whole batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from evaluations import ask, evaluated, module_of
from program_builder import divided_in_the_loop
from small_plans import cluster
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import (
    DroppedOutputWarning,
    GradientError,
    HetspmdError,
    MemoryLimitError,
    MicroBatchError,
    NanError,
    OptionError,
    PlanError,
)
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.placement import shard
from hetspmd.plan.plan import Plan
from hetspmd.program.micro_batches import in_own_turns
from hetspmd.rules.theory import derive
from hetspmd.run.module import HAP
from hetspmd.trace.trace import trace

DEVICES = cluster(4, 2, 1)


class Model(nn.Module):
    """Two layers, a mean over the labels that count, a counter, and its scores beside the loss."""

    def __init__(self, *, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.last = nn.Embedding(20, 8), nn.Linear(8, 16), nn.Linear(16, 5)
        self.norm, self.dropout = norm or nn.LayerNorm(16), dropout
        self.register_buffer("steps", torch.zeros(()))
        self.seen = 0

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.steps += 1
            self.seen += 1
        h = self.norm(F.gelu(self.first(self.embed(ids))).mean(1))
        scores = self.last(F.dropout(h, self.dropout, self.training))
        return {"loss": F.cross_entropy(scores, labels, ignore_index=0), "scores": scores}


def batch(rows: int, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 20, (rows, 6), generator=draw),
        "labels": torch.randint(0, 5, (rows,), generator=draw),
    }


def trained(run: Any) -> list[torch.Tensor]:
    """Losses of steps of two sizes, an evaluation, gradients by an incoming gradient of 3, counters."""
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
    results: list[torch.Tensor] = []
    for step, rows in enumerate((9, 9, 4, 2, 9)):
        optimizer.zero_grad()
        loss = run(**batch(rows, step))["loss"]
        (3 * loss).backward()
        results.append(loss.detach())
        clip = hetspmd.clip_grad_norm_ if isinstance(run, HAP) else nn.utils.clip_grad_norm_
        results.append(torch.as_tensor(clip(run.parameters(), 0.5)).clone())
        optimizer.step()
    results += evaluated(run, batch(5, 7))
    with torch.no_grad():
        results.append(run(**batch(9, 8))["scores"])
    model = module_of(run)
    results += [model.get_buffer("steps").clone(), torch.tensor(model.seen)]
    full = run.full_state_dict() if isinstance(run, HAP) else run.state_dict()
    return results + [full[name].clone() for name in sorted(full)]


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
@pytest.mark.parametrize("count", [2, 3, 9])
def test_a_training_loop(count: int) -> None:
    asked = ask(Model().double(), trained, cluster=DEVICES, example=batch(9, 0), micro_batches=count)
    assert asked.error() < 1e-9
    training = [plan for plan in asked.plans if plan.graph.training and plan.program.gradients]
    assert [plan.micro_batches for plan in training] == [count, min(count, 4), 2]
    assert all(len(plan.active) > 1 for plan in training[:1])
    assert all(plan.micro_batches == 1 for plan in asked.plans if not plan.program.gradients)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_levels_of_zero(level: int) -> None:
    """With batches of other sizes, whose plans have the first one's shards and collectives in the loop."""
    asked = ask(Model().double(), trained, cluster=DEVICES, example=batch(9, 0), micro_batches=3, zero=level)
    assert asked.error() < 1e-9
    training = [plan for plan in asked.plans if plan.program.gradients]
    assert len(training) > 2
    moved = [len(plan.repeated) for plan in training]
    assert all(moved) if level > 1 else not any(moved)
    if level == 3:
        names = [{p.tensor: p.name for p in plan.graph.parameters} for plan in training]
        of = [
            {own[plan.graph.parameter_of[t]] for t in plan.repeated if t in plan.graph.parameter_of}
            for plan, own in zip(training, names, strict=True)
        ]
        assert of[0] == of[1] == of[2] != set()


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
@pytest.mark.parametrize(("turns", "ratios"), [((1, 3, 2), (0.5, 0.3, 0.2)), ((4, 1, 1), (0.8, 0.0, 0.2))])
def test_devices_in_turns_of_their_own(turns: tuple[int, ...], ratios: tuple[float, ...]) -> None:
    """With batches of other sizes, of which no device takes more turns than it has rows."""
    theory, batches = in_micro_batches(derive(trace(Model().double(), (), batch(9, 0))), 2)
    assert batches is not None
    own = in_own_turns(theory, batches, turns)
    plan = plan_for(theory, DEVICES, divided_in_the_loop(theory, 3), ratios, batches=own)
    asked = ask(Model().double(), trained, cluster=DEVICES, plan=plan)
    assert asked.error() < 1e-9
    training = [plan for plan in asked.plans if plan.graph.training and plan.program.gradients]
    assert training[0].own_turns == turns
    assert len(training) == 3
    for other in training[1:]:
        assert all(n <= most for n, most in zip(other.own_turns, turns, strict=bool(other.own_turns)))


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_in_shards(dim: int) -> None:
    forms = {"first.weight": shard(dim), "last.weight": shard(1 - dim)}
    asked = ask(
        Model().double(),
        trained,
        cluster=cluster(4, 4, 3),
        example=batch(9, 0),
        micro_batches=3,
        constraints=forms,
    )
    assert asked.error() < 1e-9


def on_ranks(body: Callable[[HAP], Any], model: nn.Module | None = None, **options: Any) -> list[Any]:
    models = [copy.deepcopy(model or Model().double()) for _ in range(DEVICES.ranks)]

    def rank(communicator: Any) -> Any:
        given = {"example": batch(9, 0), "micro_batches": 3} | options
        return body(HAP(models[communicator.rank], DEVICES, process_group=communicator, **given))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DroppedOutputWarning)
        return run_ranks(DEVICES.ranks, rank)


def test_outputs_with_rows_come_back_as_none() -> None:
    assert on_ranks(lambda hap: hap(**batch(9, 0))["scores"]) == [None] * 3
    with pytest.warns(DroppedOutputWarning, match=r"1 output with a row for each sample .* torch\.no_grad"):
        hetspmd.compile(Model(), batch(9, 0), DEVICES, micro_batches=3)


def test_gradients_twice() -> None:
    def body(hap: HAP) -> bool:
        loss = hap(**batch(9, 0))["loss"]
        loss.backward(retain_graph=True)
        first = hap.full_gradients()
        loss.backward()
        second = hap.full_gradients()
        return all(torch.equal(2 * first[name], second[name]) for name in first)

    assert on_ranks(body) == [True] * 3


def test_anomaly_mode_finds_nan_in_a_micro_batch() -> None:
    def body(hap: HAP) -> torch.Tensor:
        return hap(**batch(9, 0))["loss"]

    def logarithm(model: nn.Module, **given: torch.Tensor) -> torch.Tensor:
        return model(**given)["scores"].log().mean()

    with torch.autograd.set_detect_anomaly(True):
        assert len(on_ranks(body)) == 3
        with pytest.raises(NanError, match=r"aten.log.default.*test_micro_batches_training.py:\d+ .*on rank"):
            on_ranks(lambda hap: hap(**batch(9, 0)), loss=logarithm)


def test_what_is_not_the_loss_gets_no_gradient() -> None:
    class Sums(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            output = super().forward(ids, labels)
            return {"loss": output["loss"], "sum": output["scores"].sum()}

    def body(hap: HAP) -> str:
        output = hap(**batch(9, 0))
        try:
            (output["loss"] + output["sum"]).backward()
        except GradientError as error:
            return str(error)
        return ""

    assert all("not the loss" in text for text in on_ranks(body, Sums().double()))


def test_dropout_is_drawn_and_the_loss_is_alike_on_all_ranks() -> None:
    losses = on_ranks(lambda hap: float(hap(**batch(9, 0))["loss"].detach()), Model(dropout=0.5).double())
    assert len(set(losses)) == 1


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
def test_verify_compares_dropout_with_what_the_whole_batch_draws() -> None:
    report = hetspmd.verify(Model(dropout=0.3).double(), batch(9, 0), DEVICES, micro_batches=4)
    report.require()
    assert report.random


def test_less_memory_than_the_whole_batch_takes() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model, example = nn.Sequential(nn.Linear(2, 32), *layers), (torch.randn(4096, 2),)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    whole = hetspmd.compile(model, example, DEVICES, loss=loss)
    divided = hetspmd.compile(model, example, DEVICES, loss=loss, micro_batches=8)
    assert max(divided.cost.memory_bytes) < 0.5 * max(whole.cost.memory_bytes)
    limit = f"{int(0.6 * min(n for n in whole.cost.memory_bytes if n))}B"
    devices = [{"name": f"d{i}", "flops": s * 1e6, "memory": limit} for i, s in enumerate((4, 2, 1))]
    short = {"devices": devices, "network": {"bandwidth": "100GB/s", "latency": "1ns"}}
    with pytest.raises(MemoryLimitError):
        hetspmd.compile(model, example, short, loss=loss)
    with pytest.raises(MemoryLimitError, match=r"With micro_batches=\d+ at least"):
        hetspmd.compile(model, example, short, loss=loss)
    fits = hetspmd.compile(model, example, short, loss=loss, micro_batches="auto")
    assert max(fits.cost.memory_bytes) <= fits.cluster.devices[0].memory
    assert fits.micro_batches in (2, 4, 8, 16)
    with pytest.raises(MemoryLimitError):
        hetspmd.compile(model, example, short, loss=loss, micro_batches=fits.micro_batches // 2)
    assert hetspmd.compile(model, example, DEVICES, loss=loss, micro_batches="auto").micro_batches == 1
    normed = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), *layers)
    with pytest.raises(MicroBatchError, match=r"of the whole batch .* In one it does not fit: no program"):
        hetspmd.compile(normed, example, short, loss=loss, micro_batches="auto")


def tells(error: type[HetspmdError], message: str, model: nn.Module | None = None, **options: Any) -> None:
    with pytest.raises(error, match=message):
        hetspmd.compile(model or Model(), batch(9, 0), DEVICES, **({"micro_batches": 2} | options))


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
def test_bad_input_is_named() -> None:
    tells(OptionError, "micro_batches=0: give 'auto' or a number from 1 on", micro_batches=0)
    tells(OptionError, "micro_batches=True: give", micro_batches=True)
    tells(OptionError, r"micro_batches='4'", micro_batches="4")
    tells(MicroBatchError, "micro_batches=10: the batch has 9 samples", micro_batches=10)
    tells(MicroBatchError, "in norm needs div.* of the whole batch", Model(norm=nn.BatchNorm1d(16)))


class Leaves(Model):
    """Keeps the scores of the last batch."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = super().forward(ids, labels)
        self.last_scores = output["scores"].detach()
        return output["loss"]


def test_rows_that_the_model_keeps_are_refused() -> None:
    tells(MicroBatchError, "rows of the batch in an attribute", Leaves())


class Settles(Model):
    """Sets in its first forward what it reads, as models of transformers do."""

    kind: str | None = None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.kind is None:
            self.kind = "classes"
        return super().forward(ids, labels)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
def test_a_plan_serves_the_same_step_in_another_state() -> None:
    """Though it leaves outputs out."""

    def body(hap: HAP) -> int:
        for step in range(3):
            hap(**batch(9, step))["loss"].backward()
        return len(hap._plans.runners())

    assert on_ranks(body, Settles().double()) == [1] * 3
    assert on_ranks(body, Settles().double(), micro_batches=1, loss_only=True) == [1] * 3


class Rows(Model):
    """A weight, or what is kept of the scores, for each sample."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.weights = kept, nn.Parameter(torch.ones(9))
        self.register_buffer("scores", torch.zeros(9, 5))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = super().forward(ids, labels)["scores"]
        if self.kept == "scores":
            self.scores = scores.detach()
            return scores.square().mean()
        return (scores.square().mean(1) * self.weights).sum() + self.weights.square().sum()


def test_rows_of_buffers_and_gradients_are_refused() -> None:
    tells(MicroBatchError, "rows of the batch in scores, .* use one micro-batch", Rows("scores"))
    tells(MicroBatchError, "gradient of weights has a row for each sample", Rows("weights"))


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
def test_tune_measures_plans_in_micro_batches() -> None:
    models = [Model().double() for _ in range(DEVICES.ranks)]

    def rank(communicator: Any) -> list[int]:
        tuned = hetspmd.tune(
            models[communicator.rank],
            batch(9, 0),
            DEVICES,
            micro_batches=3,
            steps=1,
            process_group=communicator,
        )
        assert len(tuned.seconds) > 1
        return [tuned.plan.micro_batches]

    assert run_ranks(DEVICES.ranks, rank) == [[3]] * DEVICES.ranks


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
def test_a_plan_file_keeps_its_micro_batches() -> None:
    plan = hetspmd.compile(Model().double(), batch(9, 0), DEVICES, micro_batches=3)
    again = Plan.from_json(plan.to_json())
    assert again.micro_batches == 3
    assert again.to_json() == plan.to_json()
    assert "Micro-batches: 3, of 3, 3, 3 samples" in str(plan)

    def body(hap: HAP) -> list[int]:
        hap(**batch(9, 0))["loss"].backward()
        hap(**batch(6, 0))["loss"].backward()
        return [plan.micro_batches for plan, _ in hap._plans.runners()]

    for count in (1, 3):
        assert on_ranks(body, plan=again, example=None, micro_batches=count) == [[3, 3]] * 3
    with pytest.raises(OptionError, match="micro_batches=2 with a plan of 3: the plan says how many"):
        on_ranks(body, plan=again, example=None, micro_batches=2)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")
@pytest.mark.parametrize("count", [0, -1, 10, 10**9])
def test_a_damaged_number_of_micro_batches(count: int) -> None:
    from hetspmd.codec.records import encode
    from hetspmd.plan.text import content, file_text

    tree = encode(hetspmd.compile(Model().double(), batch(9, 0), DEVICES, micro_batches=3))
    tree["micro_batches"] = count
    with pytest.raises(PlanError, match="micro-batches"):
        Plan.from_json(file_text(content(tree)))
