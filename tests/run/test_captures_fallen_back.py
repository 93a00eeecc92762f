"""HAP(..., cuda_graphs=...) where a step is not as it was captured: the bits are those of a run without."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from captures import accumulated, both, equal, gradients, plan_of, sgd, steps_of
from ranks import loss_of
from small_models import Case, case
from small_plans import cluster
from torch import fx

import hetspmd
from hetspmd.dist.communicator import LoneCommunicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.errors import CudaGraphsWarning, OptionError
from hetspmd.run import captured_regions as captured
from hetspmd.run.capturing import Reasons
from hetspmd.run.module import HAP
from hetspmd.run.simulated_capture import SimulatedCapturer

aten = torch.ops.aten
CPU = torch.device("cpu")


@contextmanager
def said_once(why: str) -> Iterator[None]:
    """Of captures, one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CudaGraphsWarning)
        yield
    texts = [str(w.message) for w in caught if w.category is CudaGraphsWarning]
    assert len(texts) <= 1
    assert not texts or why in texts[0]


def step(hap: HAP, c: Case, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    """A step; the loss as it was given."""
    hap.zero_grad()
    loss = loss_of(hap(**c.batch))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss


def test_a_forward_before_the_backward() -> None:
    def body(hap: HAP, c: Case) -> Any:
        optimizer, found = sgd(hap), []
        for kept in (1, 1, 1, 2, 3, 1):
            hap.zero_grad()
            losses = [loss_of(hap(**c.batch)) for _ in range(kept)]
            for loss in (*losses[1:], losses[0]):
                loss.backward()
                found += gradients(hap)
            optimizer.step()
            found += losses
        return [f if f is None else f.detach() for f in found]

    with said_once("before the backward"):
        hap = both(case("attention"), body)
    assert steps_of(hap) == {"": 6, captured.PENDING: 3}


def test_forwards_without_a_backward() -> None:
    """They end with the last reference to what they gave."""

    def body(hap: HAP, c: Case) -> Any:
        return [loss_of(hap(**c.batch)).item() for _ in range(4)] + [step(hap, c).item() for _ in range(3)]

    assert steps_of(both(case("attention"), body)) == {"": 7}


def test_gradients_that_accumulate_and_a_graph_that_is_kept() -> None:
    assert steps_of(both(case("attention"), accumulated)) == {"": 10}


def test_parameters_and_buffers_at_another_place() -> None:
    def body(hap: HAP, c: Case) -> Any:
        optimizer, found = sgd(hap), []
        for number in range(8):
            weight = next(hap.module.conv.parameters())
            if number == 3:
                with torch.no_grad():
                    weight.data = weight.data.clone() * 1.5
            if number == 4:
                hap.module.norm.running_mean = hap.module.norm.running_mean.clone() + 1.0
            if number == 5:
                hap.load_state_dict(copy.deepcopy(hap.full_state_dict()))
            if number == 6:
                weight.data = weight.data.flip(0).transpose(2, 3)
            found.append(step(hap, c, optimizer).detach())
        return found, hap.full_tensors()

    assert steps_of(both(case("conv"), body)) == {"": 8}


def test_parameters_that_change_before_the_backward() -> None:
    """As ever, they are refused: the backward reads them."""

    def body(hap: HAP, c: Case) -> Any:
        found = [step(hap, c).detach() for _ in range(3)]
        loss = loss_of(hap(**c.batch))
        with torch.no_grad():
            hap.module.b.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss
        return found + [step(hap, c).detach() for _ in range(2)]

    assert steps_of(both(case("mlp"), body)) == {"": 6}


def test_parameters_that_always_move() -> None:
    def body(hap: HAP, c: Case) -> Any:
        optimizer, found = sgd(hap), []
        before = []
        for _ in range(captured.MOST_VARIANTS + 3):
            weight = hap.module.a.weight
            before.append(weight.data)
            weight.data = weight.data.clone()
            found.append(step(hap, c, optimizer).detach())
        return found, hap.full_tensors()

    with said_once("a new place again and again"):
        hap = both(case("mlp"), body)
    assert steps_of(hap) == {"": captured.MOST_VARIANTS, captured.MOVING: 3}


def test_averages_take_turns() -> None:
    """A copy has the plans of the module; exchanged weights come back."""

    def body(hap: HAP, c: Case) -> Any:
        optimizer, average, found = sgd(hap), copy.deepcopy(hap), []
        for _ in range(4):
            found.append(step(hap, c, optimizer).detach())
            with torch.no_grad():
                for a, p in zip(average.parameters(), hap.parameters(), strict=True):
                    a.lerp_(p, 0.5)
                found += [loss_of(average(**c.batch)), loss_of(hap(**c.batch))]
            for a, p in zip(average.parameters(), hap.parameters(), strict=True):
                a.data, p.data = p.data, a.data
            found.append(step(hap, c).detach())
            for a, p in zip(average.parameters(), hap.parameters(), strict=True):
                a.data, p.data = p.data, a.data
        return found

    assert steps_of(both(case("attention", dropout=0.0), body)) == {"": 16}


def test_other_generators_and_other_states_of_them() -> None:
    def body(hap: HAP, c: Case) -> Any:
        found = [step(hap, c).detach() for _ in range(3)]
        state = hap._runtime.randomness.get_state()
        found += [step(hap, c).detach() for _ in range(2)]
        hap._runtime.randomness.set_state(state)
        again = [step(hap, c).detach() for _ in range(2)]
        equal(again, found[-2:])
        hap.use_randomness(Randomness(5, 0, CPU))
        found += [step(hap, c).detach() for _ in range(2)]
        hap.use_randomness(Randomness(5, 0, CPU, reference=True))
        found += [step(hap, c).detach() for _ in range(2)]
        hap.use_randomness(Randomness(5, 0, CPU))
        return found + [step(hap, c).detach() for _ in range(2)]

    hap = both(case("attention"), body)
    assert steps_of(hap) == {"": 11, captured.REFERENCE: 2}


def test_another_batch() -> None:
    """Each shape has a plan and captures of its own; evaluation comes between forward and backward."""

    def body(hap: HAP, c: Case) -> Any:
        optimizer, found = sgd(hap), []
        for _ in range(3):
            for rows in (9, 9, 5):
                batch = {k: v[:rows] for k, v in c.batch.items()}
                hap.zero_grad()
                loss = loss_of(hap(**batch))
                hap.eval()
                with torch.no_grad():
                    found.append(loss_of(hap(**c.batch)).clone())
                with torch.inference_mode():
                    found.append(loss_of(hap(**c.batch)).clone())
                hap.train()
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
        return [torch.tensor(f.item()) for f in found]

    hap = both(case("mlp"), body)
    assert [sum(p.steps.values()) for p in hap.cuda_graphs_report().plans] == [6, 18, 3]
    assert all(p.captured == p.stretches and set(p.steps) == {""} for p in hap.cuda_graphs_report().plans)


def test_inference_first() -> None:
    def body(hap: HAP, c: Case) -> Any:
        hap.eval()
        found = []
        inference = torch.inference_mode
        for context in (inference, inference, torch.no_grad, nullcontext, inference):
            with context():
                batch = {k: v.clone() for k, v in c.batch.items()}
                found.append(loss_of(hap(**batch)).item())
        return found

    both(case("conv"), body)


def test_hooks_see_gradients_that_stay() -> None:
    def body(hap: HAP, c: Case) -> Any:
        seen, whole = [], []
        parameter = hap.module.a.weight
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        parameter.register_hook(lambda g: seen.append(g) or g * 2)
        hetspmd.on_full_gradient(hap, hap.module.b.weight, lambda g: whole.append(g.clone()))
        for _ in range(4):
            step(hap, c)
        return seen, whole

    both(case("mlp"), body)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_recordings_and_anomalies_run_as_they_are() -> None:
    def body(hap: HAP, c: Case) -> Any:
        found = [step(hap, c).detach() for _ in range(3)]
        with hap.record():
            found += [step(hap, c).detach() for _ in range(2)]
        with torch.autograd.detect_anomaly():
            found.append(step(hap, c).detach())
        loss = loss_of(hap(**c.batch))
        with torch.autograd.detect_anomaly():
            loss.backward()
        return found + [step(hap, c).detach() for _ in range(2)] + gradients(hap)

    counted = {"": 6, captured.RECORDED: 2, captured.ANOMALY: 1}
    assert steps_of(both(case("mlp"), body)) == counted


def test_mixed_precision() -> None:
    c, plan = case("mlp", torch.float32), None
    found = []
    for asked in (SimulatedCapturer(), False):
        with torch.autocast("cpu", torch.bfloat16):
            options = {"plan": plan, "check_plan": False} if plan else {"example": c.batch}
            hap = HAP(copy.deepcopy(c.model), cluster(1), cuda_graphs=asked, **options)
            plan = hap.plan
        hap.run_lowered()
        optimizer, scaler, mine = sgd(hap), hetspmd.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(hap(**c.batch))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            mine += [loss.detach(), *gradients(hap), scaler.get_scale()]
            scaler.step(optimizer)
            scaler.update()
        found.append(mine)
    equal(*found)


def looks_at_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


looks_at_a_value.__module__ = "hetspmd.rules.of_a_user"


def made(graph: fx.Graph, constants: Any = ()) -> tuple[Any, SimulatedCapturer, Reasons]:
    """A forward alone, as a program's."""

    class Program:
        forward, backward = fx.GraphModule(dict(constants), graph), None

    capturer, reasons = SimulatedCapturer(), Reasons()
    runtime = Runtime(LoneCommunicator(), Randomness(0, 0, CPU))
    return captured.Captures(Program(), runtime, capturer, reasons, threading.Lock()), capturer, reasons  # type: ignore[arg-type]  # Program has what is asked of one


def run(captures: Any, x: torch.Tensor) -> Any:
    (graph,) = captures._graphs
    held = captures.begin(graph, [], [])
    outputs = held.copies(captures.graph(graph, held)(captures._runtime, *held.inputs([x])))
    held.release()
    captures.leave()
    return outputs


def test_calls_that_look_at_values_run_as_they_are() -> None:
    graph = fx.Graph()
    graph.placeholder("runtime")
    x = graph.placeholder("x")
    y = graph.call_function(looks_at_a_value, (graph.call_function(aten.sin.default, (x,)),))
    graph.output([graph.call_function(aten.neg.default, (y,))])
    captures, capturer, _ = made(graph)
    with said_once("looks at values"):
        for value in (1.0, 2.0, 3.0, 4.0):
            sine = torch.tensor([value, 0.5]).sin()
            equal(run(captures, torch.tensor([value, 0.5])), [-(sine * sine.sum())])
    assert capturer.captures == 0
    assert "sin_default to neg_default: aten._local_scalar_dense" in captures.report().refused[0]


def test_what_lies_elsewhere_is_read_where_it_is() -> None:
    """A value that comes from between the stretches, and one that is a piece of other memory each time."""
    graph = fx.Graph()
    graph.placeholder("runtime")
    x = graph.placeholder("x")
    y = graph.call_function(aten.exp.default, (graph.call_function(aten.sin.default, (x,)),))
    pieces = [torch.ones(4, dtype=torch.float64) * i for i in range(4)]
    there = graph.call_function(lambda value: value if len(pieces) % 2 else value.clone(), (y,))
    graph.output(
        [graph.call_function(aten.add_.Tensor, (graph.call_function(aten.neg.default, (there,)), y))]
    )
    captures, *_ = made(graph)
    with said_once("lay elsewhere"):
        for _ in range(4):
            value = torch.randn(4, dtype=torch.float64)
            (found,) = run(captures, value)
            equal(found, -value.sin().exp() + value.sin().exp())
            pieces.pop()


def test_errors_have_their_place() -> None:
    c = case("attention")
    wrong = {**c.batch, "ids": c.batch["ids"] + 100}
    notes = []
    for asked in (SimulatedCapturer(), False):
        model, plan = copy.deepcopy(c.model), plan_of(c)
        hap = HAP(model, plan.cluster, plan=plan, cuda_graphs=asked, check_plan=False)
        with pytest.raises(IndexError) as error:
            hap(**wrong)
        notes.append(error.value.__notes__)
    assert notes[0] == notes[1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cuda_graphs": "yes"}, "cuda_graphs is True, False or 'auto', not 'yes'"),
        ({"cuda_graphs": True}, "CUDA graphs are of GPUs, and this is cpu; leave it out"),
        (
            {"cuda_graphs": SimulatedCapturer(), "compile": True},
            "what torch.compile has made is not captured yet",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], why: str) -> None:
    c = case("mlp")
    with pytest.raises(OptionError) as error:
        HAP(copy.deepcopy(c.model), cluster(1), example=c.batch, **options)
    assert why in str(error.value)


def test_auto_says_why_not() -> None:
    c = case("mlp")
    hap = HAP(copy.deepcopy(c.model), cluster(1), plan=plan_of(c), cuda_graphs="auto", check_plan=False)
    assert str(hap.cuda_graphs_report()) == "no CUDA graphs: CUDA graphs are of GPUs, and this is cpu"
    step(hap, c)
