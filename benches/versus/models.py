"""The models of the bench in three sizes, as :class:`~emulated.workloads.Workload`.

Classes and data are those of :mod:`trust.models`. ``tiny`` is for tests. VGG19 is all of it, 139 million
parameters, on images of 32 x 32. In ``small`` a step takes one to two seconds on the fastest of unlike devices; of
the transformers' what does not shrink with the batch (the optimizer, launches) is little also on the slow ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from emulated.workloads import Workload
from trust.models import build
from versus.points import BALANCED

MODELS = ("VGG19", "ViT", "BERT", "BERT-MoE")
OPTIMIZERS: Mapping[str, str] = {
    "VGG19": "momentum",
    "ViT": "adamw",
    "BERT": "adamw",
    "BERT-MoE": "adamw",
    "Llama": "adamw",
    "GPT-2": "adamw",
}
"""By which optimizer each is trained, as ``hetspmd profile --optimizer`` calls it: VGG19 by SGD with momentum, as
its authors did."""

SIZES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "tiny": {
        "VGG19": {"batch": 8, "size": 32, "channels": 64, "hidden": 64},
        "ViT": {"batch": 8, "layers": 1, "width": 64},
        "BERT": {"batch": 12, "tokens": 16, "layers": 2, "width": 64},
        "BERT-MoE": {"batch": 8, "tokens": 12, "layers": 2, "width": 24, "heads": 3},
    },
    "small": {
        "VGG19": {"batch": 16, "size": 32, "channels": 512, "hidden": 4096},
        "ViT": {"batch": 64},
        "BERT": {"batch": 64},
        "BERT-MoE": {"batch": 96},
    },
    "large": {
        "VGG19": {"batch": 32, "size": 32, "channels": 512, "hidden": 4096},
        "ViT": {"batch": 32, "layers": 6, "width": 384},
        "BERT": {"batch": 32, "layers": 4, "width": 512},
        "BERT-MoE": {"batch": 32, "layers": 4, "width": 288, "heads": 9, "experts": 8},
    },
    "fits": {
        "ViT": {"batch": 32, "layers": 4, "width": 384},
        "BERT": {"batch": 32, "tokens": 64, "layers": 4, "width": 384},
        "BERT-MoE": {"batch": 64, "experts": 8},
        "Llama": {"batch": 32, "tokens": 64, "layers": 4, "width": 384},
    },
}
"""Options of the functions of :mod:`trust.models`. ``fits`` is that of :mod:`fits`."""

OVER_BALANCED: Mapping[tuple[str, str], str] = {("small", "VGG19"): "large"}
"""By size and model, the size over a balanced link where it is another: on four equal devices the gradients of
VGG19 took 3.6 times as long as its computing on 8 images over the fastest link that could be emulated when this was
chosen, 4 Gbit/s. Over the other links it has half as many images, on which the fastest device spends more than a
second a step."""


def size_over(link: str, size: str, model: str) -> str:
    """The size of a model over a link, of the points of ``size``."""
    return OVER_BALANCED.get((size, model), size) if link == BALANCED else size


def workload(model: str, size: str) -> Workload:
    """A seeded model and batch. Raises KeyError for a name that there is not."""
    return workload_of(*build(model, **SIZES[size][model]))


def workload_of(network: nn.Module, batch: Mapping[str, Tensor]) -> Workload:
    """A model and its batch with what the bench needs to know of them."""
    return Workload(network, batch, _weights(batch["labels"]), _blocks(network))


def _weights(labels: Tensor) -> Tensor:
    """What each row adds to the loss's denominator: itself, or its labelled tokens. Shape (rows,)."""
    return torch.ones(len(labels)) if labels.dim() == 1 else (labels != -100).sum(1).float()


def _blocks(network: nn.Module) -> tuple[str, ...]:
    """What FSDP gathers at a time: the layers of the longest list of modules; without one, every linear layer."""
    lists = [(name, m) for name, m in network.named_modules() if isinstance(m, nn.ModuleList)]
    if lists:
        name, layers = max(lists, key=lambda pair: len(pair[1]))
        return tuple(f"{name}.{i}" for i in range(len(layers)))
    return tuple(name for name, m in network.named_modules() if isinstance(m, nn.Linear))
