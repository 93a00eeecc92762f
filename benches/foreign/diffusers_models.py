"""The networks of diffusers: U-Nets, transformers, autoencoders and controls, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign.registry import Sample, model, without_dropout

BATCH = 8
UNET: dict[str, Any] = {
    "sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}  # fmt: skip
CROSS = {**UNET, "cross_attention_dim": 12, "attention_head_dim": 4}


def _noise(size: int = 8, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def _times() -> Tensor:
    return torch.randint(0, 1000, (BATCH,))


def denoised(network: nn.Module, sample: Tensor, timestep: Tensor, target: Tensor, **more: Any) -> Tensor:
    """The loss of noise prediction."""
    out = network(sample, timestep=timestep, **more)
    return F.mse_loss(out.sample if hasattr(out, "sample") else out[0], target)


def _denoiser(name: str, kind: str, options: dict[str, Any], more: Callable[[], dict[str, Any]]) -> None:
    def built() -> Sample:
        import diffusers

        network = without_dropout(getattr(diffusers, kind)(**options)).train()
        channels = options.get("in_channels", 3)
        batches = [
            {
                "sample": _noise(channels=channels),
                "timestep": _times(),
                "target": _noise(channels=channels),
                **more(),
            }
            for _ in range(2)
        ]
        return Sample(network, batches, denoised)

    model(f"diffusers-{name}", "diffusers", built)


_denoiser("unet2d", "UNet2DModel", {**UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
          "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}, dict)  # fmt: skip
_denoiser("unet2d-classes", "UNet2DModel", {**UNET, "num_class_embeds": 5, "add_attention": False,
          "down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")},
          lambda: {"class_labels": torch.randint(0, 5, (BATCH,))})  # fmt: skip
_denoiser("unet2d-condition", "UNet2DConditionModel",
          {**CROSS, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
           "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
          lambda: {"encoder_hidden_states": torch.randn(BATCH, 5, 12)})  # fmt: skip
_denoiser("dit", "DiTTransformer2DModel", {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4,
          "out_channels": 4, "num_layers": 1, "sample_size": 8, "patch_size": 2, "norm_num_groups": 4,
          "num_embeds_ada_norm": 1000}, lambda: {"class_labels": torch.randint(0, 5, (BATCH,))})  # fmt: skip
_denoiser("uvit2d-pixart", "PixArtTransformer2DModel", {"num_attention_heads": 2, "attention_head_dim": 8,
          "in_channels": 4, "out_channels": 4, "num_layers": 1, "sample_size": 8, "patch_size": 2,
          "cross_attention_dim": 16, "caption_channels": 12, "norm_num_groups": 4},
          lambda: {"encoder_hidden_states": torch.randn(BATCH, 5, 12),
                   "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}})  # fmt: skip


def _sd3() -> Sample:
    import diffusers

    network = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10,
        pos_embed_max_size=8,
    )  # fmt: skip

    def loss(m: nn.Module, target: Tensor, **batch: Any) -> Tensor:
        return F.mse_loss(m(**batch).sample, target)

    batches = [{
        "hidden_states": _noise(channels=4), "encoder_hidden_states": torch.randn(BATCH, 5, 12),
        "pooled_projections": torch.randn(BATCH, 10), "timestep": _times(), "target": _noise(channels=4),
    } for _ in range(2)]  # fmt: skip
    return Sample(network.train(), batches, loss)


def _flux() -> Sample:
    import diffusers

    network = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip

    def loss(m: nn.Module, target: Tensor, **batch: Any) -> Tensor:
        return F.mse_loss(m(**batch).sample, target)

    batches = [{
        "hidden_states": torch.randn(BATCH, 9, 4), "encoder_hidden_states": torch.randn(BATCH, 5, 12),
        "pooled_projections": torch.randn(BATCH, 10), "timestep": torch.rand(BATCH), "img_ids": torch.randn(9, 3),
        "txt_ids": torch.zeros(5, 3), "target": torch.randn(BATCH, 9, 4),
    } for _ in range(2)]  # fmt: skip
    return Sample(network.train(), batches, loss)


def _autoencoder(kind: str, options: dict[str, Any]) -> Callable[[], Sample]:
    def built() -> Sample:
        import diffusers

        network = getattr(diffusers, kind)(**options).train()

        def loss(m: nn.Module, x: Tensor) -> Tensor:
            return F.mse_loss(m(x).sample, x)

        return Sample(network, [(_noise(16),), (_noise(16),)], loss)

    return built


BLOCKS = {"block_out_channels": (8, 8), "down_block_types": ("DownEncoderBlock2D",) * 2,
          "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "norm_num_groups": 4}  # fmt: skip
model("diffusers-sd3", "diffusers", _sd3)
model("diffusers-flux", "diffusers", _flux)
model("diffusers-autoencoder-kl", "diffusers", _autoencoder("AutoencoderKL", BLOCKS))
model("diffusers-vq", "diffusers", _autoencoder("VQModel", {**BLOCKS, "num_vq_embeddings": 16}))
model("diffusers-tiny-autoencoder", "diffusers", _autoencoder("AutoencoderTiny", {
    "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
    "num_decoder_blocks": (1, 1), "upsampling_scaling_factor": 2}))  # fmt: skip
