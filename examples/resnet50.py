"""ResNet-50 with batch norm in training: torchvision's resnet50 as it is, in a module that computes the loss.

Batch norm sees the global batch, as on one device (DistributedDataParallel's sees each rank's own).

    hetspmd compile examples/resnet50.py --cluster examples/clusters/four-unlike.yaml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models import ResNet, resnet50
from torchvision.models.resnet import Bottleneck

Example = dict[str, Tensor]


class Classifier(nn.Module):
    """``forward(images, labels)``: the mean cross entropy of ``network(images)``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.network(images), labels)


def build(batch: int = 64) -> tuple[nn.Module, Example]:
    """ResNet-50 on 224 x 224 images and 1000 classes, on the meta device."""
    with torch.device("meta"):
        model = Classifier(resnet50())
        images = torch.zeros(batch, 3, 224, 224)
        labels = torch.zeros(batch, dtype=torch.int64)
    return model, {"images": images, "labels": labels}


def small(batch: int = 6) -> tuple[nn.Module, Example]:
    """One bottleneck block per stage and 10 classes on 64 x 64 images, with seeded weights and data."""
    torch.manual_seed(0)
    network = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=8)
    images = torch.randn(batch, 3, 64, 64)
    labels = torch.randint(0, 10, (batch,))
    return Classifier(network), {"images": images, "labels": labels}
