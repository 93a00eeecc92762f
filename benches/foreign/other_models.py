"""Models of smaller packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign.registry import Sample, model, without_dropout
from foreign.timm_models import CLASSES, classify, images

BATCH, VOCABULARY, TOKENS = 8, 61, 10


def _images(name: str, package: str, size: int, make: Callable[[], nn.Module]) -> None:
    model(name, package, lambda: Sample(
        without_dropout(make()).train(), [images(size), images(size)], classify))  # fmt: skip


def _of(module: str, kind: str) -> Any:
    return getattr(importlib.import_module(module), kind)


VIT = {
    "image_size": 16,
    "patch_size": 8,
    "num_classes": CLASSES,
    "dim": 24,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 32,
}
NOT_HEADS = {k: v for k, v in VIT.items() if k not in ("heads", "mlp_dim")}
for name, module, kind, options in (
    ("vit", "vit", "ViT", VIT),
    ("simple-vit", "simple_vit", "SimpleViT", VIT),
    ("deepvit", "deepvit", "DeepViT", VIT),
    ("cait", "cait", "CaiT", {**VIT, "cls_depth": 1, "layer_dropout": 0.0}),
    ("parallel-vit", "parallel_vit", "ViT", {**VIT, "num_parallel_branches": 2}),
    ("vit-small-data", "vit_for_small_dataset", "ViT", VIT),
    ("vit-registers", "simple_vit_with_register_tokens", "SimpleViT", VIT),
    ("vit-qk-norm", "simple_vit_with_qk_norm", "SimpleViT", VIT),
    ("look-vit", "look_vit", "LookViT", {**NOT_HEADS, "image_size": 32, "patch_size": 8, "heads": 2,
     "mlp_factor": 1,
     "highres_patch_size": 4, "highres_mlp_factor": 1, "cross_attn_heads": 2, "dim_head": 8}),
):  # fmt: skip
    _images(
        f"vit-pytorch-{name}", "vit_pytorch", options["image_size"],
        lambda module=module, kind=kind, options=options: _of(f"vit_pytorch.{module}", kind)(**options),
    )  # fmt: skip
_images("vit-pytorch-cct", "vit_pytorch", 32, lambda: _of("vit_pytorch.cct", "CCT")(
    img_size=32, embedding_dim=24, n_conv_layers=1, num_layers=1, num_heads=2, mlp_ratio=2, num_classes=CLASSES,
    positional_embedding="learnable", stochastic_depth_rate=0.0))  # fmt: skip
_images("vit-pytorch-nest", "vit_pytorch", 32, lambda: _of("vit_pytorch.nest", "NesT")(
    image_size=32, patch_size=4, dim=12, heads=2, num_hierarchies=2, block_repeats=(1, 1),
    num_classes=CLASSES))  # fmt: skip
_images("vit-pytorch-xcit", "vit_pytorch", 16, lambda: _of("vit_pytorch.xcit", "XCiT")(
    image_size=16, patch_size=8, num_classes=CLASSES, dim=24, depth=1, cls_depth=1, heads=2,
    mlp_dim=32))  # fmt: skip
_images("perceiver", "perceiver_pytorch", 8, lambda: nn.Sequential(Last(), _of("perceiver_pytorch", "Perceiver")(
    num_freq_bands=2, depth=1, max_freq=4.0, num_latents=6, latent_dim=12, latent_heads=2, latent_dim_head=6,
    num_classes=CLASSES)))  # fmt: skip
_images("efficientnet-pytorch", "efficientnet_pytorch", 32, lambda: _efficient())


class Last(nn.Module):
    """Images with their channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


def _efficient() -> nn.Module:
    utils = importlib.import_module("efficientnet_pytorch.utils")
    blocks, params = utils.efficientnet(
        image_size=32, dropout_rate=0.0, drop_connect_rate=0.0, num_classes=CLASSES, width_coefficient=1.0,
        depth_coefficient=1.0,
    )  # fmt: skip
    small = [b._replace(input_filters=i, output_filters=o, num_repeat=1)
             for b, i, o in zip(blocks[:2], (32, 8), (8, 12), strict=True)]  # fmt: skip
    network: nn.Module = _of("efficientnet_pytorch", "EfficientNet")(small, params)
    network.set_swish(memory_efficient=False)
    return network


def _language(name: str, package: str, make: Callable[[], nn.Module]) -> None:
    """A model from tokens to logits."""

    def loss(m: nn.Module, tokens: Tensor) -> Tensor:
        out = m(tokens[:, :-1])
        return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())

    model(name, package, lambda: Sample(
        without_dropout(make()).train(), [(torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1)),) for _ in range(2)],
        loss))  # fmt: skip


def _x(**layers: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        x = importlib.import_module("x_transformers")
        decoder = x.Decoder(dim=24, depth=1, heads=2, attn_dim_head=12, **layers)
        network: nn.Module = x.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=decoder)
        return network

    return make


_language("x-transformers", "x_transformers", _x())
_language("x-transformers-rotary", "x_transformers", _x(rotary_pos_emb=True, use_rmsnorm=True))
_language("x-transformers-alibi", "x_transformers", _x(alibi_pos_bias=True, ff_glu=True))
_language("x-transformers-qk-norm", "x_transformers", _x(attn_qk_norm=True, sandwich_norm=True))
_language("x-transformers-memory", "x_transformers", _x(attn_num_mem_kv=2, rel_pos_bias=True))
_language("local-attention", "local_attention", lambda: _of("local_attention", "LocalTransformer")(
    num_tokens=VOCABULARY, dim=24, depth=1, max_seq_len=16, heads=2, dim_head=12, causal=True,
    local_attn_window_size=5))  # fmt: skip


class MambaLM(nn.Module):
    """mambapy's body between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        mamba = importlib.import_module("mambapy.mamba")
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.body = mamba.Mamba(mamba.MambaConfig(d_model=16, n_layers=1, d_state=4, pscan=False))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embedding(tokens)))
        return out


_language("mambapy", "mambapy", MambaLM)


def _vector(make: Callable[[], nn.Module], extra: Callable[[Any], Tensor]) -> Callable[[], Sample]:
    """A quantizer between two linear layers."""

    def built() -> Sample:
        class Coded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.encoder, self.quantizer, self.decoder = nn.Linear(12, 16), make(), nn.Linear(16, 12)

            def forward(self, x: Tensor) -> Tensor:
                out = self.quantizer(self.encoder(x))
                return F.mse_loss(self.decoder(out[0]), x) + extra(out)

        return Sample(Coded(), [(torch.randn(8, 6, 12),) for _ in range(2)])

    return built


QUANTIZERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("vector-quantize", "VectorQuantize", {"dim": 16, "codebook_size": 12, "kmeans_init": False}),
    (
        "vector-quantize-learned",
        "VectorQuantize",
        {"dim": 16, "codebook_size": 12, "learnable_codebook": True, "ema_update": False},
    ),
    ("residual-vq", "ResidualVQ", {"dim": 16, "codebook_size": 12, "num_quantizers": 2}),
    ("finite-scalar-quantization", "FSQ", {"dim": 16, "levels": [5, 4, 3]}),
    ("lookup-free-quantization", "LFQ", {"dim": 16, "codebook_size": 16}),
)
for name, kind, options in QUANTIZERS:
    make = lambda kind=kind, options=options: _of("vector_quantize_pytorch", kind)(**options)  # noqa: E731  # one line beside its use
    extra: Callable[[Any], Tensor] = (
        (lambda o: torch.zeros(())) if kind == "FSQ" else (lambda o: torch.as_tensor(o[2]).sum())
    )
    model(name, "vector_quantize_pytorch", _vector(make, extra))


def _masks(name: str, kind: str) -> None:
    def built() -> Sample:
        options: dict[str, Any] = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 3,
                                   "encoder_depth": 3}  # fmt: skip
        if kind == "Unet":
            options["decoder_channels"] = (8, 8, 8)
        network = without_dropout(_of("segmentation_models_pytorch", kind)(**options)).train()
        batches = [(torch.randn(4, 3, 32, 32), torch.randint(0, 3, (4, 32, 32))) for _ in range(2)]
        return Sample(network, batches, classify)

    model(name, "segmentation_models_pytorch", built)


_masks("smp-unet", "Unet")
_masks("smp-linknet", "Linknet")
_masks("smp-pspnet", "PSPNet")


def _clip() -> Sample:
    clip = importlib.import_module("open_clip.model")
    network = clip.CLIP(
        16, clip.CLIPVisionCfg(layers=1, width=24, head_width=12, patch_size=8, image_size=16),
        clip.CLIPTextCfg(context_length=10, vocab_size=VOCABULARY, width=24, heads=2, layers=1),
    )  # fmt: skip

    def loss(m: nn.Module, image: Tensor, text: Tensor) -> Tensor:
        a, b, scale = m(image, text)[:3]
        logits = scale * a @ b.T
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return Sample(network, [(torch.randn(8, 3, 16, 16), torch.randint(0, VOCABULARY, (8, 10)))] * 2, loss)


def _tabnet() -> Sample:
    network = _of("pytorch_tabnet.tab_network", "TabNet")(
        8, 3, n_d=8, n_a=8, n_steps=2, virtual_batch_size=16, group_attention_matrix=torch.eye(8)
    )

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out, sparsity = m(x)
        return F.cross_entropy(out, y) - 1e-3 * sparsity

    return Sample(network, [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(2)], loss)


def _flow() -> Sample:
    nf = importlib.import_module("normflows")
    flows: list[nn.Module] = []
    for _ in range(2):
        flows += [
            nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 16, 4], init_zeros=False)),
            nf.flows.Permute(4, mode="swap"),
        ]
    network = nf.NormalizingFlow(nf.distributions.DiagGaussian(4), flows)
    return Sample(network, [(torch.randn(12, 4),) for _ in range(2)], lambda m, x: m.forward_kld(x))


def _ode() -> Sample:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.net(y)
            return out

    def loss(m: nn.Module, y: Tensor, target: Tensor) -> Tensor:
        odeint = _of("torchdiffeq", "odeint")
        return F.mse_loss(odeint(m, y, torch.linspace(0.0, 1.0, 4), method="rk4")[-1], target)

    return Sample(Field(), [(torch.randn(12, 4), torch.randn(12, 4)) for _ in range(2)], loss)


def _mixture(module: str, kind: str, **options: Any) -> Callable[[], Sample]:
    def built() -> Sample:
        network = _of(module, kind)(**options)

        def loss(m: nn.Module, x: Tensor) -> Tensor:
            out = m(x)
            found, extra = out if isinstance(out, tuple) else (out, 0.0)
            return F.mse_loss(found, x) + extra

        return Sample(network, [(torch.randn(8, 8, 16),) for _ in range(2)], loss)

    return built


model("open-clip", "open_clip", _clip)
model("tabnet", "pytorch_tabnet", _tabnet)
model("normalizing-flow", "normflows", _flow)
model("neural-ode", "torchdiffeq", _ode)
model(
    "soft-moe", "soft_moe_pytorch", _mixture("soft_moe_pytorch", "SoftMoE", dim=16, seq_len=8, num_experts=2)
)
model("mixture-of-experts", "mixture_of_experts", _mixture(
    "mixture_of_experts", "MoE", dim=16, num_experts=4, hidden_dim=24,
    second_policy_train="all", second_policy_eval="all"))  # fmt: skip
