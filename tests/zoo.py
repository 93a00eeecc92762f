"""Small configurations of real models, unchanged from Hugging Face transformers and torchvision.

Each entry of :data:`ZOO` builds ``(model, example, loss)`` on the CPU with seeded weights and data; ``loss`` is
None where the model's output holds it. Dropout is 0 so that a step has one right answer; models with dropout
are tested apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

Entry = tuple[nn.Module, Any, Callable[..., Any] | None]

VOCABULARY, BATCH, TOKENS = 53, 6, 10
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}


def classify(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Any:
    """Cross entropy of a model that returns logits."""
    return F.cross_entropy(model(images), labels)


def tokens(batch: int = BATCH, length: int = TOKENS) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (batch, length))
    labels = ids.clone()
    labels[torch.rand(ids.shape) < 0.4] = -100
    return {"input_ids": ids, "labels": labels}


def images(size: int = 16, classes: int = 7, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))


def bert(attention: str = "sdpa", dropout: float = 0.0) -> Entry:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=40,
        vocab_size=VOCABULARY, max_position_embeddings=16, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, attn_implementation=attention,
    )  # fmt: skip
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[0, 7:] = 0
    return BertForMaskedLM(config), {**tokens(), "attention_mask": mask}, None


def gpt2(attention: str = "sdpa", dropout: float = 0.0) -> Entry:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=24, n_head=3, vocab_size=VOCABULARY, n_positions=16, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, attn_implementation=attention, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), tokens(), None


def llama(attention: str = "sdpa") -> Entry:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=VOCABULARY, max_position_embeddings=16,
        attn_implementation=attention, **IDS,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokens(), None


def vit() -> Entry:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=40, image_size=16,
        patch_size=8, num_labels=7, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    pixels, labels = images()
    return ViTForImageClassification(config), {"pixel_values": pixels, "labels": labels}, None


def vgg19() -> Entry:
    from torchvision.models.vgg import VGG, cfgs, make_layers

    widths = [v if isinstance(v, str) else v // 32 for v in cfgs["E"]]
    model = VGG(make_layers(widths, batch_norm=False), num_classes=7, dropout=0.0)
    model.classifier[0] = nn.Linear(16 * 49, 40)
    model.classifier[3] = nn.Linear(40, 36)
    model.classifier[6] = nn.Linear(36, 7)
    return model, images(32), classify


def resnet50() -> Entry:
    from torchvision.models.resnet import Bottleneck, ResNet

    # Dilation keeps the last images at 4 x 4: batch norm over six numbers would be ill-conditioned.
    dilation = [False, True, True]
    model = ResNet(
        Bottleneck, [3, 4, 6, 3], num_classes=7, width_per_group=2, replace_stride_with_dilation=dilation
    )
    return model, images(32), classify


class RecurrentLM(nn.Module):
    """Embedding, recurrent layer, projection."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.rnn = kind(12, 14, num_layers=2, batch_first=True)
        self.head = nn.Linear(14, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.embedding(input_ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)


def lstm() -> Entry:
    return RecurrentLM(nn.LSTM), tokens(), None


def gru() -> Entry:
    return RecurrentLM(nn.GRU), tokens(), None


class Recommender(nn.Module):
    """DLRM: dense features, embedding bags, pairwise interactions, click probability."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in (11, 23, 6))
        self.top = nn.Sequential(nn.Linear(8 + 6, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, clicks: torch.Tensor) -> torch.Tensor:
        vectors = [self.bottom(dense)] + [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(vectors, 1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))
        row, column = torch.tril_indices(4, 4, offset=-1)
        logits = self.top(torch.cat([vectors[0], pairs[:, row, column]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


def dlrm() -> Entry:
    sparse = torch.stack([torch.randint(0, n, (BATCH, 3)) for n in (11, 23, 6)], 1)
    clicks = torch.randint(0, 2, (BATCH,)).float()
    return Recommender(), (torch.randn(BATCH, 5), sparse, clicks), None


def t5() -> Entry:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=1, num_decoder_layers=1, d_model=24, d_kv=8, num_heads=3, d_ff=40, vocab_size=VOCABULARY,
        dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), tokens(), None


def swin() -> Entry:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16, patch_size=2, embed_dim=12, depths=[2, 1], num_heads=[2, 4], window_size=4,
        num_labels=7, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    pixels, labels = images()
    return SwinForImageClassification(config), {"pixel_values": pixels, "labels": labels}, None


def mobilenet() -> Entry:
    return torchvision.models.mobilenet_v2(num_classes=7, width_mult=0.15, dropout=0.0), images(32), classify


def convnext() -> Entry:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(12, 24, 1), CNBlockConfig(24, None, 1)]
    return ConvNeXt(blocks, num_classes=7, stochastic_depth_prob=0.0), images(32), classify


def small_config(name: str, **options: Any) -> Any:
    """A configuration class of transformers by name, with small sizes."""
    import transformers

    return getattr(transformers, name)(**options)


def causal(config: str, model: str, **options: Any) -> Callable[[], Entry]:
    """A causal language model of the Llama family."""

    def build() -> Entry:
        import transformers

        sizes: dict[str, Any] = {
            "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 48, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
        }  # fmt: skip
        return (
            getattr(transformers, model)(small_config(config, **{**sizes, **IDS, **options})),
            tokens(),
            None,
        )

    return build


def masked(config: str, model: str, **options: Any) -> Callable[[], Entry]:
    """A masked language model of the BERT family."""

    def build() -> Entry:
        import transformers

        sizes: dict[str, Any] = {
            "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40,
            "vocab_size": VOCABULARY, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "pad_token_id": 1,
        }  # fmt: skip
        return getattr(transformers, model)(small_config(config, **{**sizes, **options})), tokens(), None

    return build


def distilbert() -> Entry:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(
        n_layers=2, dim=24, n_heads=3, hidden_dim=40, vocab_size=VOCABULARY, max_position_embeddings=16,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return DistilBertForMaskedLM(config), tokens(), None


def opt() -> Entry:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        num_hidden_layers=2, hidden_size=24, num_attention_heads=3, ffn_dim=40, vocab_size=VOCABULARY,
        max_position_embeddings=32, word_embed_proj_dim=24, dropout=0.0, attention_dropout=0.0, **IDS,
    )  # fmt: skip
    return OPTForCausalLM(config), tokens(), None


def bart() -> Entry:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        encoder_layers=1, decoder_layers=1, d_model=24, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=40, decoder_ffn_dim=40, vocab_size=VOCABULARY, max_position_embeddings=32, dropout=0.0,
        decoder_start_token_id=0, **IDS,
    )  # fmt: skip
    return BartForConditionalGeneration(config), tokens(), None


def clip() -> Entry:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 3, "max_position_embeddings": 16, **IDS,
    }  # fmt: skip
    vision = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 3,
        "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    ids = torch.randint(2, VOCABULARY, (BATCH, TOKENS))
    return CLIPModel(config), {"input_ids": ids, "pixel_values": images()[0], "return_loss": True}, None


def segformer() -> Entry:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[12, 24], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    )  # fmt: skip
    pixels, _ = images()
    return SegformerForSemanticSegmentation(config), {
        "pixel_values": pixels, "labels": torch.randint(0, 5, (BATCH, 16, 16))
    }, None  # fmt: skip


def torchvision_small(name: str, size: int = 32, **options: Any) -> Callable[[], Entry]:
    """A torchvision classifier by name."""

    def build() -> Entry:
        return getattr(torchvision.models, name)(num_classes=7, **options), images(size), classify

    return build


def torch_transformer() -> Entry:
    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 24)
            self.body = nn.Transformer(24, 3, 1, 1, 40, dropout=0.0, batch_first=True)
            self.head = nn.Linear(24, VOCABULARY)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            inputs = self.embedding(source), self.embedding(target)
            hidden = self.body(*inputs, tgt_mask=mask, tgt_is_causal=True)
            return F.cross_entropy(self.head(hidden).transpose(1, 2), target)

    ids = [torch.randint(2, VOCABULARY, (BATCH, n)) for n in (9, 7)]
    return Translate(), tuple(ids), None


def unet() -> Entry:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
            self.middle = nn.Sequential(
                nn.Conv2d(8, 12, 3, 2, 1), nn.InstanceNorm2d(12, affine=True), nn.GELU()
            )
            self.up = nn.ConvTranspose2d(12, 8, 2, 2)
            self.out = nn.Conv2d(16, 3, 1)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            high = self.down(image)
            low = F.interpolate(F.avg_pool2d(self.middle(high), 2), scale_factor=2, mode="bilinear")
            return F.smooth_l1_loss(self.out(torch.cat([high, self.up(low)], 1)), image)

    return UNet(), (torch.randn(BATCH, 3, 16, 16),), None


REQUIRED: dict[str, Callable[[], Entry]] = {
    "bert": bert,
    "bert-eager": lambda: bert("eager"),
    "gpt2": gpt2,
    "gpt2-eager": lambda: gpt2("eager"),
    "llama": llama,
    "llama-eager": lambda: llama("eager"),
    "vit": vit,
    "vgg19": vgg19,
    "resnet50": resnet50,
}

FURTHER: dict[str, Callable[[], Entry]] = {
    "t5": t5,
    "bart": bart,
    "swin": swin,
    "mobilenet-v2": mobilenet,
    "convnext": convnext,
    "lstm": lstm,
    "gru": gru,
    "dlrm": dlrm,
    "distilbert": distilbert,
    "roberta": masked("RobertaConfig", "RobertaForMaskedLM"),
    "electra": masked("ElectraConfig", "ElectraForMaskedLM", embedding_size=16),
    "albert": masked("AlbertConfig", "AlbertForMaskedLM", embedding_size=16),
    "opt": opt,
    "mistral": causal("MistralConfig", "MistralForCausalLM", sliding_window=4),
    "qwen2": causal("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": causal("Qwen3Config", "Qwen3ForCausalLM", head_dim=8),
    "gemma": causal("GemmaConfig", "GemmaForCausalLM", head_dim=8),
    "gemma2": causal("Gemma2Config", "Gemma2ForCausalLM", head_dim=8),
    "phi": causal("PhiConfig", "PhiForCausalLM", resid_pdrop=0.0),
    "gpt-neox": causal("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "clip": clip,
    "segformer": segformer,
    "nn-transformer": torch_transformer,
    "unet": unet,
    "efficientnet-b0": torchvision_small("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0),
    "densenet121": torchvision_small("densenet121"),
    "shufflenet": torchvision_small("shufflenet_v2_x0_5"),
    "squeezenet": torchvision_small("squeezenet1_1", dropout=0.0),
    "regnet": torchvision_small("regnet_y_400mf", 96),
    "mnasnet": torchvision_small("mnasnet0_5", dropout=0.0),
    "googlenet": torchvision_small("googlenet", 64, aux_logits=False, init_weights=False, dropout=0.0),
}

ZOO = {**REQUIRED, **FURTHER}


def build(name: str, dtype: torch.dtype = torch.float32) -> Entry:
    """An entry of the zoo in training mode, seeded, in ``dtype``."""
    torch.manual_seed(0)
    model, example, loss = ZOO[name]()
    cast = lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t  # noqa: E731  # one line beside its use
    values = (
        {k: cast(v) for k, v in example.items()} if isinstance(example, dict) else tuple(map(cast, example))
    )
    return model.to(dtype).train(), values, loss
