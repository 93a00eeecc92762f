"""The traced graph, run on one device, equals eager PyTorch on real models."""

from __future__ import annotations

import copy

import pytest
import torch

from hetspmd.dist.random import Randomness
from hetspmd.rules.theory import derive
from hetspmd.run.guard import expected, match
from hetspmd.trace.losses import find_loss
from hetspmd.trace.trace import split_example
from hetspmd.verify.comparison import largest_error
from hetspmd.verify.precision import all_in, retyped_graph
from hetspmd.verify.reference import run_reference
from workbench import CPU, randomness, traced

MODELS = (
    "bert",
    "gpt2-eager",
    "llama",
    "vit",
    pytest.param("resnet50", marks=pytest.mark.slow),
    "bert-moe",
    "t5",
    "dlrm",
    "unet",
)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.MissingRuleWarning")
@pytest.mark.parametrize("name", MODELS)
def test_one_step(name: str) -> None:
    entry = traced(name)
    args, kwargs = split_example(entry.example)
    graph = retyped_graph(entry.theory.graph, torch.float64)
    model = copy.deepcopy(entry.model)
    inputs, why = match(expected(graph), args, kwargs)
    assert inputs is not None, why
    before = {n: b.clone() for n, b in model.named_buffers()}
    with all_in(torch.float64):
        output = model(*args, **kwargs) if entry.loss is None else entry.loss(model, *args, **kwargs)
        loss = find_loss(output)
        assert loss is not None
        loss.backward()
    got = run_reference(
        derive(graph), dict(model.named_parameters()), before, inputs, randomness=randomness()
    )
    assert got.loss is not None
    assert largest_error({"loss": got.loss}, {"loss": loss})[0] < 1e-12
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(want) <= set(got.gradients) | {n for p in graph.parameters for n in p.names}
    assert largest_error({n: got.gradients[n] for n in want}, want, 1e-12)[0] < 1e-9
    after = dict(model.named_buffers())
    for name_, value in got.buffers.items():
        assert largest_error({"b": value}, {"b": after[name_]}, 0.0)[0] < 1e-12
    changed = {n for n, b in after.items() if not torch.equal(b, before[n])}
    assert changed <= set(got.buffers)


def test_dropout_scales_what_it_keeps() -> None:
    from torch import nn

    from hetspmd.trace.trace import trace

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(40))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = nn.functional.dropout(x * self.w, 0.25)
            return y.sum(), y

    model, x = Net(), torch.ones(500, 40)
    theory = derive(trace(model, (x,), {}))
    drawn = Randomness(3, 0, CPU, reference=True)
    drawn.begin_step()
    found = run_reference(theory, dict(model.named_parameters()), {}, [x], randomness=drawn)
    (y,) = (v for t, v in found.outputs.items() if t != theory.graph.loss)
    assert sorted(set(y.flatten().tolist())) == pytest.approx([0.0, 4 / 3])
    assert float((y > 0).double().mean()) == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(found.gradients["w"], y.sum(0))
