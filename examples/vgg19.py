"""VGG19: torchvision's vgg19 as it is, in a module that computes the loss.

Its fully connected layers hold most of the parameters and little of the work, so this is where a program
other than data parallelism gains most.

    hetspmd compile examples/vgg19.py --cluster examples/clusters/four-unlike.yaml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models import VGG, vgg19
from torchvision.models.vgg import cfgs, make_layers

Example = dict[str, Tensor]


class Classifier(nn.Module):
    """``forward(images, labels)``: the mean cross entropy of ``network(images)``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.network(images), labels)


def build(batch: int = 64) -> tuple[nn.Module, Example]:
    """VGG19 on 224 x 224 images and 1000 classes, on the meta device."""
    with torch.device("meta"):
        model = Classifier(vgg19())
        images = torch.zeros(batch, 3, 224, 224)
        labels = torch.zeros(batch, dtype=torch.int64)
    return model, {"images": images, "labels": labels}


def small(batch: int = 6) -> tuple[nn.Module, Example]:
    """A narrow VGG19 on 32 x 32 images with seeded weights and data, no dropout."""
    torch.manual_seed(0)
    layers = [width if width == "M" else int(width) // 16 for width in cfgs["E"]]
    network = VGG(make_layers(layers), num_classes=10, dropout=0.0)
    network.classifier[0] = nn.Linear(512 // 16 * 7 * 7, 64)
    network.classifier[3] = nn.Linear(64, 64)
    network.classifier[6] = nn.Linear(64, 10)
    images = torch.randn(batch, 3, 32, 32)
    labels = torch.randint(0, 10, (batch,))
    return Classifier(network), {"images": images, "labels": labels}
