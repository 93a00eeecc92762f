"""Every example is a TARGET: it builds, its small configuration trains, and its real size needs no memory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hetspmd import Cluster
from hetspmd.trace.losses import find_loss
from hetspmd.trace.trace import split_example, trace

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = ("bert", "bert_moe", "gpt2", "llama", "resnet50", "vgg19", "vit")
PARAMETERS = {
    "bert": 109_514_298,
    "gpt2": 124_439_808,
    "vit": 86_567_656,
    "llama": 1_100_048_384,
    "vgg19": 143_667_240,
    "resnet50": 25_557_032,
}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MODELS)
def test_small_trains_and_is_seeded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(name, monkeypatch)
    model, example = module.small()
    args, kwargs = split_example(example)
    loss = find_loss(model(*args, **kwargs))
    assert loss is not None
    assert loss.isfinite()
    loss.backward()
    assert sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None) > 0
    again, same = module.small()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(example[k], same[k]) for k in example)


@pytest.mark.parametrize("name", MODELS)
def test_real_size_is_on_the_meta_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = load(name, monkeypatch).build()
    assert all(p.is_meta for p in model.parameters())
    assert all(t.is_meta for t in example.values())
    if name in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("experts", [3, 4, 6])
def test_gate_sends_each_token_to_its_two_best_experts(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("bert_moe", monkeypatch)
    tokens, capacity = 10, 10
    gate = module.Top2Gate(8, experts, capacity)
    x = torch.randn(2, tokens, 8)
    combine, balance = gate(x)
    weights = torch.softmax(gate.score(x), -1)
    best = weights.topk(2, -1)
    found = combine.sum(-1).topk(2, -1)
    assert torch.equal(found.indices, best.indices)
    torch.testing.assert_close(found.values, best.values / best.values.sum(-1, keepdim=True))
    torch.testing.assert_close(combine.sum((-1, -2)), torch.ones(2, tokens))
    assert ((combine > 0).sum(1) <= 1).all(), "two tokens share a slot"
    assert balance >= 1 / experts


def test_a_full_expert_takes_no_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("bert_moe", monkeypatch)
    gate = module.Top2Gate(8, 3, 4)
    x = torch.randn(1, 1, 8).expand(1, 10, 8)  # all tokens want the same two experts
    dispatch = gate(x)[0] > 0
    assert sorted(dispatch.sum((1, 3))[0].tolist()) == [0, 4, 4]
    assert dispatch[0, 4:].sum() == 0, "first come, first served"


def test_experts_compute_what_a_loop_over_tokens_does(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("bert_moe", monkeypatch)
    layer = module.Experts(8, 16, 3, 10).double()
    x = torch.randn(2, 10, 8, dtype=torch.float64)
    y, _ = layer(x)
    weights = torch.softmax(layer.gate.score(x), -1)
    for b in range(2):
        for t in range(10):
            best = weights[b, t].topk(2)
            total = torch.zeros(8, dtype=torch.float64)
            for value, e in zip(best.values / best.values.sum(), best.indices, strict=True):
                hidden = torch.nn.functional.gelu(x[b, t] @ layer.w1_EDH[e] + layer.b1_EH[e])
                total += value * (hidden @ layer.w2_EHD[e] + layer.b2_ED[e])
            torch.testing.assert_close(y[b, t], total)


@pytest.mark.parametrize("path", sorted((EXAMPLES / "clusters").iterdir()), ids=lambda p: p.name)
def test_cluster_files_are_right(path: Path) -> None:
    cluster = Cluster.load(path)
    assert cluster.world == {"four": 4, "eight": 8, "hap": 64}[path.stem.split("-")[0]]


@pytest.mark.parametrize("name", ["digits", "docstrings"])
def test_demos_are_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = load(name, monkeypatch).build()
    graph = trace(model, (), example)
    assert graph.loss is not None


def test_documentation_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("docstrings", monkeypatch)
    train, held_out = module.load_data()
    assert train.shape[1] == held_out.shape[1] == module.TOKENS
    assert len(train) > 5000
    assert int(train.max()) < module.CHARACTERS
