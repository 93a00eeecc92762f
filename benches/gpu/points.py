"""Which points are measured, in the order of their worth, and their sizes.

Parts ``eager`` and ``compiled`` are of one GPU: hetspmd beside eager PyTorch, and ``compile=True`` beside
``torch.compile``. Part ``unlike`` is of GPUs with unlike shares: every arm of :mod:`versus.points` but the forced
one. Part ``trust`` is of plans that are forced upon the search there (:mod:`trust.points`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

EAGER, COMPILED, UNLIKE, TRUST = "eager", "compiled", "unlike", "trust"
ONE_GPU = (EAGER, COMPILED)
SEVERAL = (UNLIKE, TRUST)
PARTS = (*ONE_GPU, *SEVERAL)

ARMS: Mapping[str, tuple[str, str]] = {
    EAGER: ("eager", "hetspmd"),
    COMPILED: ("torch.compile", "hetspmd, compiled"),
}
"""PyTorch's and hetspmd's, of the parts on one GPU."""

AUTOCAST, PURE, SINGLE = "autocast", "bf16", "fp32"
"""float32 weights under autocast to bfloat16; bfloat16 weights; float32 everywhere."""
PRECISIONS: Mapping[str, tuple[str, ...]] = {
    EAGER: (AUTOCAST, PURE), COMPILED: (AUTOCAST, PURE), UNLIKE: (AUTOCAST, SINGLE), TRUST: (AUTOCAST, SINGLE),
}  # fmt: skip

REAL, FEW = "real", "few"
"""The batch of ordinary training on one GPU; two to four rows, where the host limits eager PyTorch."""

SHARES = ("50:25:12:12", "40:20:20:20")
"""Percents of the GPU's multiprocessors of each rank."""

ONE_GPU_MODELS: Mapping[str, Mapping[str, int]] = {
    "BERT": {"batch": 64, "tokens": 128, "layers": 12, "width": 768, "head": 64, "vocabulary": 30522},
    "GPT-2": {"batch": 8, "tokens": 1024, "layers": 12, "width": 768, "head": 64, "vocabulary": 50257},
    "ViT": {"batch": 64, "layers": 12, "width": 768, "head": 64, "size": 224, "patch": 16, "classes": 1000},
    "ResNet-50": {"batch": 128, "size": 224, "width": 64, "classes": 1000},
    "VGG19": {"batch": 64, "size": 224, "channels": 512, "hidden": 4096, "classes": 1000},
    "BERT-MoE": {
        "batch": 64, "tokens": 128, "layers": 12, "width": 768, "heads": 12, "experts": 6, "vocabulary": 30522,
    },
    "Llama": {
        "batch": 4, "tokens": 1024, "layers": 16, "width": 2048, "head": 64, "queries": 4, "hidden": 8192,
        "vocabulary": 128256, "tied": 1,
    },
}  # fmt: skip
"""Options of the functions of :mod:`trust.models`; Llama's are those of 1.2 billion parameters."""

FEW_ROWS: Mapping[str, int] = {
    "BERT": 4, "GPT-2": 2, "ViT": 4, "ResNet-50": 4, "VGG19": 4, "BERT-MoE": 4, "Llama": 2,
}  # fmt: skip

FEW_TOKENS = 128
"""Tokens of each row where there are few rows."""

UNLIKE_MODELS: Mapping[str, Mapping[str, int]] = {
    "BERT": ONE_GPU_MODELS["BERT"],
    "VGG19": ONE_GPU_MODELS["VGG19"],
    "BERT-MoE": {**ONE_GPU_MODELS["BERT-MoE"], "layers": 6},
    "ViT": ONE_GPU_MODELS["ViT"],
    "GPT-2": {**ONE_GPU_MODELS["GPT-2"], "batch": 32, "tokens": 256},
}
"""Without ResNet-50: DDP normalizes each rank's rows by their own statistics, so that its step is another one."""

SMALL: Mapping[str, Mapping[str, int]] = {
    "BERT": {"batch": 12, "tokens": 16, "layers": 2, "width": 64},
    "GPT-2": {"batch": 8, "tokens": 16, "layers": 1, "width": 64},
    "ViT": {"batch": 8, "layers": 1, "width": 64},
    "ResNet-50": {"batch": 4, "size": 32},
    "VGG19": {"batch": 8, "size": 32, "channels": 64, "hidden": 64},
    "BERT-MoE": {"batch": 8, "tokens": 12, "layers": 2, "width": 24, "heads": 3},
    "Llama": {"batch": 4, "tokens": 16, "layers": 1, "width": 64},
}
"""Of ``--small``, which tries the bench itself."""

NEEDS: Mapping[str, str] = {
    "BERT": "transformers", "GPT-2": "transformers", "ViT": "transformers", "Llama": "transformers",
    "ResNet-50": "torchvision", "VGG19": "torchvision",
}  # fmt: skip
"""The package that has the class of a model."""


class Key(NamedTuple):
    """A point. ``at`` is the batch of the parts on one GPU, and the shares of the others."""

    part: str
    model: str
    precision: str
    at: str

    def __str__(self) -> str:
        return ", ".join(self)


def size_of(key: Key, small: bool) -> dict[str, int]:
    """The options of the point's model."""
    if small:
        return dict(SMALL[key.model])
    if key.part not in ONE_GPU:
        return dict(UNLIKE_MODELS[key.model])
    size = dict(ONE_GPU_MODELS[key.model])
    if key.at == FEW:
        size["batch"] = FEW_ROWS[key.model]
        if "tokens" in size:
            size["tokens"] = FEW_TOKENS
    return size


def every(shares: Sequence[str] = SHARES) -> list[Key]:
    """All points, in the order in which they are measured."""
    one = [
        Key(part, model, precision, at)
        for part in ONE_GPU
        for at in (REAL, FEW)
        for precision in PRECISIONS[part]
        for model in ONE_GPU_MODELS
    ]
    several = [
        Key(part, model, precision, of)
        for part in SEVERAL
        for of in shares
        for precision in PRECISIONS[part]
        for model in UNLIKE_MODELS
    ]
    return one + several


def names(shares: Sequence[str] = SHARES) -> list[str]:
    """What ``--only`` may name."""
    precisions = dict.fromkeys(p for of in PRECISIONS.values() for p in of)
    return [*PARTS, *ONE_GPU_MODELS, *precisions, REAL, FEW, *shares]


def wanted(key: Key, only: Sequence[str] | None, shares: Sequence[str] = SHARES) -> bool:
    """Whether the names leave a point: of each kind, one of those named, if any is."""
    precisions = {p for of in PRECISIONS.values() for p in of}
    kinds = (
        (key.part, PARTS), (key.model, ONE_GPU_MODELS), (key.precision, precisions), (key.at, (REAL, FEW, *shares)),
    )  # fmt: skip
    for name, kind in kinds:
        named = [n for n in only or () if n in kind]
        if named and name not in named:
            return False
    return True
