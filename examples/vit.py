"""Vision transformer, classification: Hugging Face's ViTForImageClassification as it is.

hetspmd compile examples/vit.py --cluster examples/clusters/four-unlike.yaml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

Example = dict[str, Tensor]


def build(batch: int = 64) -> tuple[nn.Module, Example]:
    """ViT base, 224 x 224 images and 1000 classes, on the meta device."""
    with torch.device("meta"):
        model = ViTForImageClassification(
            ViTConfig(num_labels=1000, problem_type="single_label_classification")
        )
        images = torch.zeros(batch, 3, 224, 224)
        labels = torch.zeros(batch, dtype=torch.int64)
    return model, {"pixel_values": images, "labels": labels}


def small(batch: int = 6) -> tuple[nn.Module, Example]:
    """Two layers on 16 x 16 images with seeded weights and data."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=96, image_size=16,
        patch_size=4, num_labels=10, problem_type="single_label_classification",
    )  # fmt: skip
    images = torch.randn(batch, 3, 16, 16)
    labels = torch.randint(0, 10, (batch,))
    return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}
