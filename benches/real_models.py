"""Training steps and clusters to search: models of real size on the meta device, small ones, and devices.

A training step is traced once a run; what is measured starts from its background theory.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))

import zoo  # noqa: E402  # after the path is set
from hetspmd.cluster.cluster import Cluster  # noqa: E402  # after the path is set
from hetspmd.rules.theory import Theory, derive  # noqa: E402  # after the path is set
from hetspmd.trace.trace import split_example, trace  # noqa: E402  # after the path is set

CLUSTERS = {
    "8 equal": (1.0,) * 8,
    "4:2:1:1": (4.0, 2.0, 1.0, 1.0),
    "2 V100 + 6 P100": (1.6,) * 2 + (1.0,) * 6,
    "1 + 15 slow": (8.0,) + (1.0,) * 15,
}
"""Relative speeds."""

Entry = tuple[Any, Any]


def cluster(speeds: Sequence[float], *, real: bool = True) -> Cluster:
    """Devices of the given relative speeds: of the size of a P100 on 10 Gbit/s; for small models so slow that
    dividing them pays."""
    flops, intensity = (7.5e12, 14.0) if real else (2e8, 14.0)
    devices: list[dict[str, Any]] = [
        {"name": f"d{i}", "flops": s * flops, "memory_bandwidth": s * flops / intensity}
        for i, s in enumerate(speeds)
    ]
    network = {"bandwidth": 1.3e9, "latency": 5e-5} if real else {"bandwidth": 2e9, "latency": 1e-6}
    return Cluster.load({"devices": devices, "network": network})


def example(name: str) -> Entry:
    """``examples/NAME.py`` at its real size."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entry: Entry = module.build()
    return entry


def vit(layers: int = 24, batch: int = 64) -> Entry:
    """ViT large, 224 x 224 images."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096,
        num_labels=1000, problem_type="single_label_classification",
    )  # fmt: skip
    with torch.device("meta"):
        model = ViTForImageClassification(config)
        images, labels = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64)
    return model, {"pixel_values": images, "labels": labels}


def llama(layers: int = 32, batch: int = 8, tokens: int = 4096) -> Entry:
    """The shape of Llama-3-8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


REAL: dict[str, Callable[[], Entry]] = {
    "BERT base": lambda: example("bert"),
    "GPT-2": lambda: example("gpt2"),
    "ViT, 24 layers": vit,
    "Llama-3-8B, 32 layers": llama,
    "VGG19": lambda: example("vgg19"),
    "ResNet-50": lambda: example("resnet50"),
    "BERT-MoE": lambda: example("bert_moe"),
}

SMALL = ("bert", "gpt2", "llama", "vit", "vgg19", "resnet50", "dlrm")
"""Of tests/zoo.py."""


def _theory(model: Any, example: Any, loss: Any = None) -> Theory:
    args, kwargs = split_example(example)
    return derive(trace(model, args, kwargs, loss=loss))


@cache
def real(name: str) -> Theory:
    """The background theory of a training step of :data:`REAL`."""
    return _theory(*REAL[name]())


@cache
def llama_of(layers: int) -> Theory:
    """The same of Llama-3-8B's shape with another depth."""
    return _theory(*llama(layers))


@cache
def small(name: str) -> Theory:
    """The same of a model of tests/zoo.py."""
    return _theory(*zoo.build(name))
