"""Image classifiers of timm, narrow and shallow; each family once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from foreign.registry import Sample, model, without_dropout

CLASSES, BATCH = 7, 8


def classify(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a classifier."""
    return F.cross_entropy(network(images), labels)


def images(size: int, channels: int = 3, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, channels, size, size), torch.randint(0, CLASSES, (batch,))


NARROW = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)}
VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
TABLE: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("vit_tiny_patch16_224", 16, VIT),
    ("deit3_small_patch16_224", 16, VIT),
    ("deit_tiny_distilled_patch16_224", 16, VIT),
    ("beit_base_patch16_224", 16, VIT),
    ("eva02_tiny_patch14_224", 16, {**VIT, "embed_dim": 48, "num_heads": 3}),
    ("cait_xxs24_224", 16, {**VIT, "depth_token_only": 1}),
    ("xcit_nano_12_p8_224", 16, {**VIT, "cls_attn_layers": 1}),
    ("swin_tiny_patch4_window7_224", 32, {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (2, 1),
     "num_heads": (2, 2)}),
    ("swinv2_tiny_window8_256", 32, {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (2, 1),
     "num_heads": (2, 2)}),
    ("twins_svt_small", 64, {"img_size": 64, "embed_dims": (12, 12, 16, 16), "num_heads": (2, 2, 2, 2),
     "depths": (1, 1, 1, 1), "wss": (4, 4, 4, 2)}),
    ("pvt_v2_b0", 32, {"embed_dims": (8, 12), "depths": (1, 1), "num_heads": (1, 2), "mlp_ratios": (2, 2),
     "sr_ratios": (2, 1)}),
    ("convnext_atto", 64, {"dims": (8, 8, 12, 12), "depths": (1, 1, 1, 1)}),
    ("convnextv2_atto", 64, {"dims": (8, 8, 12, 12), "depths": (1, 1, 1, 1)}),
    ("resnet10t", 64, NARROW),
    ("resnetv2_18", 32, {"layers": (1, 1), "channels": (8, 16), "stem_chs": 8}),
    ("seresnet18", 64, NARROW),
    ("ecaresnet26t", 64, NARROW),
    ("res2net50_26w_4s", 64, NARROW),
    ("resnest14d", 64, NARROW),
    ("skresnet18", 64, {"layers": (1, 1, 1, 1), "channels": (32, 32, 32, 32)}),
    ("densenet121", 32, {"growth_rate": 4, "block_config": (2, 2)}),
    ("visformer_tiny", 32, {"img_size": 32, "init_channels": 8, "embed_dim": 24, "depth": (1, 1, 1),
     "num_heads": 3}),
    ("crossvit_tiny_240", 32, {"img_size": 32, "patch_size": (8, 16), "embed_dim": (16, 16), "num_heads": (2, 2),
     "depth": ((1, 1, 0),)}),
    ("coat_lite_tiny", 32, {"img_size": 32, "embed_dims": (16, 16, 16, 16), "serial_depths": (1, 1, 1,
     1), "num_heads": 8}),
    ("tnt_s_legacy_patch16_224", 32, {"img_size": 32, "embed_dim": 24, "inner_dim": 8, "depth": 1,
     "num_heads_inner": 2,
     "num_heads_outer": 3}),
    ("levit_128s", 32, {"img_size": 32, "embed_dim": (16, 16), "key_dim": 8, "num_heads": (2, 2), "depth": (1, 1)}),
    ("edgenext_xx_small", 64, {"dims": (8, 8, 16, 16), "depths": (1, 1, 2, 1), "heads": (2, 2, 2, 2)}),
    ("fastvit_t8", 64, {"layers": (1, 1), "embed_dims": (8, 16)}),
    ("starnet_s1", 32, {"base_dim": 8, "depths": (1, 1)}),
    ("mambaout_femto", 32, {"depths": (1, 1), "dims": (8, 16)}),
)  # fmt: skip


def _add(name: str, size: int, options: dict[str, Any]) -> None:
    def make() -> Sample:
        import timm

        network = without_dropout(timm.create_model(name, num_classes=CLASSES, **options)).train()
        return Sample(network, [images(size), images(size)], classify)

    model(f"timm-{name}", "timm", make)


for row in TABLE:
    _add(*row)


def _class(name: str, module: str, size: int, make: Callable[[Any], nn.Module]) -> None:
    """A class of ``timm.models.MODULE`` with its own arguments, where no registered name can be made small."""

    def built() -> Sample:
        network = without_dropout(make(importlib.import_module(f"timm.models.{module}"))).train()
        return Sample(network, [images(size), images(size)], classify)

    model(f"timm-{name}", "timm", built)


PATCHES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "num_blocks": 1, "num_classes": CLASSES}
STEM = {"stem_size": 8, "num_features": 16, "num_classes": CLASSES}


def _efficient(*blocks: str) -> Callable[[Any], nn.Module]:
    return lambda m: m.EfficientNet(importlib.import_module("timm.models._efficientnet_builder").decode_arch_def(
        [[b] for b in blocks]), **STEM)  # fmt: skip


_class("mlp-mixer", "mlp_mixer", 16, lambda m: m.MlpMixer(**PATCHES))
_class(
    "gmlp",
    "mlp_mixer",
    16,
    lambda m: m.MlpMixer(**PATCHES, mlp_ratio=2, mlp_layer=m.GatedMlp, block_layer=m.SpatialGatingBlock),
)
_class(
    "resmlp",
    "mlp_mixer",
    16,
    lambda m: m.MlpMixer(**PATCHES, mlp_ratio=2, block_layer=m.ResBlock, norm_layer=m.Affine),
)
_class("convmixer", "convmixer", 28, lambda m: m.ConvMixer(16, 1, kernel_size=3, num_classes=CLASSES))
_class("poolformer", "metaformer", 64, lambda m: m.MetaFormer(
    depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=CLASSES))  # fmt: skip
_class("focalnet", "focalnet", 32, lambda m: m.FocalNet(embed_dim=8, depths=(1, 1), num_classes=CLASSES))
_class("vovnet", "vovnet", 64, lambda m: m.VovNet({
    "stem_chs": [8, 8, 8], "stage_conv_chs": [8, 8, 8, 8], "stage_out_chs": [16, 16, 16, 16], "attn": "",
    "layer_per_block": 2, "block_per_stage": [1, 1, 1, 1], "residual": False, "depthwise": False},
    num_classes=CLASSES))  # fmt: skip
_class("dla", "dla", 64, lambda m: m.DLA([1, 1, 1, 1, 1, 1], [8, 8, 8, 8, 16, 16], num_classes=CLASSES))
_class("efficientnet-blocks", "efficientnet", 32,
       _efficient("ds_r1_k3_s1_e1_c8_se0.25", "ir_r1_k3_s2_e3_c12", "ir_r1_k5_s1_e3_c16_se0.25"))  # fmt: skip
_class("edge-residual", "efficientnet", 32, _efficient("er_r1_k3_s2_e2_c12", "cn_r1_k3_s1_c16"))
_class("regnet", "regnet", 64, lambda m: m.RegNet(m.RegNetCfg(
    depth=4, w0=8, wa=9.0, wm=2.0, group_size=8, se_ratio=0.25, stem_width=8), num_classes=CLASSES))  # fmt: skip
_class("nfnet", "nfnet", 64, lambda m: m.NormFreeNet(m.NfCfg(
    depths=(1, 1, 1, 1), channels=(8, 8, 16, 16), stem_type="3x3", stem_chs=8, group_size=8, bottle_ratio=0.5,
    num_features=16), num_classes=CLASSES))  # fmt: skip
_class("maxvit", "maxxvit", 64, lambda m: m.MaxxVit(m.MaxxVitCfg(
    embed_dim=(8, 16), depths=(1, 1), block_type=("M", "M"), stem_width=8,
    transformer_cfg=m.MaxxVitTransformerCfg(dim_head=8, window_size=(4, 4), grid_size=(4, 4))), img_size=64,
    num_classes=CLASSES))  # fmt: skip
