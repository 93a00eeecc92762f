"""Vision, audio, multimodal and time series models of Hugging Face transformers, small."""

from __future__ import annotations

from typing import Any

import torch

from foreign.registry import Sample, model
from foreign.transformers_text import BATCH, COMMON, HEADS, WIDTH, Batch, built, ids

LABELS = 5
VISION: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 40,
    "image_size": 16, "patch_size": 8, "num_labels": LABELS,
}  # fmt: skip
SWIN: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
    "num_labels": LABELS,
}  # fmt: skip
STAGES: dict[str, Any] = {"num_labels": LABELS, "hidden_sizes": [8, 12, 16, 16], "depths": [1, 1, 1, 1]}
SPEECH: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "intermediate_size": 40, "conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 4],
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
    "num_labels": LABELS, "classifier_proj_size": 8,
}  # fmt: skip
SERIES: dict[str, Any] = {
    "context_length": 12, "prediction_length": 4, "patch_length": 4, "patch_stride": 4, "num_input_channels": 2,
    "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24,
}  # fmt: skip


def pixels(size: int = 16, count: int = BATCH) -> torch.Tensor:
    return torch.randn(count, 3, size, size)


def _images(size: int) -> Batch:
    return lambda: {"pixel_values": pixels(size), "labels": torch.randint(0, LABELS, (BATCH,))}


def _masks(size: int) -> Batch:
    return lambda: {"pixel_values": pixels(size), "labels": torch.randint(0, LABELS, (BATCH, size, size))}


def _speech() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 160), "labels": torch.randint(0, LABELS, (BATCH,))}


def _ctc() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 320), "labels": torch.randint(1, 12, (BATCH, 4))}


def _pairs() -> dict[str, Any]:
    mask = torch.ones(BATCH, 10, dtype=torch.long)
    return {"input_ids": ids(), "attention_mask": mask, "pixel_values": pixels(), "return_loss": True}


def _series() -> dict[str, Any]:
    return {"past_values": torch.randn(BATCH, 12, 2), "future_values": torch.randn(BATCH, 4, 2)}


def _mel() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 8, 40), "labels": ids(length=6)}


def _boxes() -> dict[str, Any]:
    labels = [
        {"class_labels": torch.randint(0, LABELS, (2,)), "boxes": torch.rand(2, 4) * 0.3 + 0.3}
        for _ in range(BATCH)
    ]
    return {"pixel_values": pixels(32), "labels": labels}


def _question() -> dict[str, Any]:
    mask = torch.ones(BATCH, 10, dtype=torch.long)
    return {
        "input_ids": ids(),
        "attention_mask": mask,
        "pixel_values": pixels(),
        "labels": torch.rand(BATCH, LABELS),
    }


def _two_towers(vision: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": {**COMMON, "eos_token_id": 60}, "vision_config": vision, "projection_dim": 16}


TABLE: tuple[tuple[str, str, dict[str, Any], Batch], ...] = (
    ("ViT", "ViTForImageClassification", VISION, _images(16)),
    ("DeiT", "DeiTForImageClassification", VISION, _images(16)),
    ("Beit", "BeitForImageClassification", {**VISION, "use_relative_position_bias": True}, _images(16)),
    ("Dinov2", "Dinov2ForImageClassification", {**VISION, "mlp_ratio": 2}, _images(16)),
    ("ViTMSN", "ViTMSNForImageClassification", VISION, _images(16)),
    ("Ijepa", "IJepaForImageClassification", VISION, _images(16)),
    ("Swin", "SwinForImageClassification", SWIN, _images(32)),
    ("Swinv2", "Swinv2ForImageClassification", SWIN, _images(32)),
    ("ConvNext", "ConvNextForImageClassification", STAGES, _images(64)),
    ("ConvNextV2", "ConvNextV2ForImageClassification", STAGES, _images(64)),
    ("ResNet", "ResNetForImageClassification", {**STAGES, "embedding_size": 8, "layer_type": "basic"}, _images(64)),
    ("RegNet", "RegNetForImageClassification",
     {**STAGES, "hidden_sizes": [8, 8, 16, 16], "embedding_size": 8, "groups_width": 8}, _images(64)),
    ("PoolFormer", "PoolFormerForImageClassification", STAGES, _images(64)),
    ("Segformer", "SegformerForSemanticSegmentation", {**STAGES, "num_attention_heads": [1, 2, 2, 2],
     "sr_ratios": [4, 2, 1, 1], "decoder_hidden_size": 16, "mlp_ratios": [2, 2, 2, 2]}, _masks(32)),
    ("MobileViT", "MobileViTForImageClassification", {"hidden_sizes": [16, 24, 24], "neck_hidden_sizes":
     [4, 8, 8, 16, 16, 16, 16], "num_attention_heads": 2, "image_size": 64, "num_labels": LABELS}, _images(64)),
    ("Levit", "LevitForImageClassification", {"image_size": 64, "hidden_sizes": [16, 16, 16],
     "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8], "num_labels": LABELS},
     _images(64)),
    ("Cvt", "CvtForImageClassification", {"embed_dim": [8, 12, 16], "num_heads": [1, 2, 2], "depth": [1, 1, 1],
     "mlp_ratio": [2.0, 2.0, 2.0], "attention_drop_rate": [0.0] * 3, "drop_rate": [0.0] * 3,
      "drop_path_rate": [0.0] * 3,
     "num_labels": LABELS}, _images(32)),
    ("ViTMAE", "ViTMAEForPreTraining", {**VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
     "decoder_num_attention_heads": 2, "decoder_intermediate_size": 24},
     lambda: {"pixel_values": pixels(), "noise": torch.rand(BATCH, 4)}),
    ("DPT", "DPTForSemanticSegmentation", {**VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
     "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "image_size": 32}, _masks(32)),
    ("CLIP", "CLIPModel", _two_towers(VISION), _pairs),
    ("Siglip", "SiglipModel", {"text_config": {**COMMON, "max_position_embeddings": 16},
     "vision_config": VISION}, _pairs),
    ("Blip", "BlipModel", _two_towers(VISION), _pairs),
    ("Vilt", "ViltForQuestionAnswering", {**COMMON, **VISION}, _question),
    ("Wav2Vec2", "Wav2Vec2ForSequenceClassification", SPEECH, _speech),
    ("Wav2Vec2", "Wav2Vec2ForCTC", SPEECH, _ctc),
    ("Hubert", "HubertForSequenceClassification", SPEECH, _speech),
    ("WavLM", "WavLMForSequenceClassification", SPEECH, _speech),
    ("UniSpeech", "UniSpeechForSequenceClassification", SPEECH, _speech),
    ("ASTransformer", "ASTForAudioClassification", {**VISION, "max_length": 16, "num_mel_bins": 16,
     "frequency_stride": 8, "time_stride": 8},
     lambda: {"input_values": torch.randn(BATCH, 16, 16), "labels": torch.randint(0, LABELS, (BATCH,))}),
    ("Whisper", "WhisperForConditionalGeneration", {"vocab_size": 61, "d_model": WIDTH, "encoder_layers": 1,
     "decoder_layers": 1, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "encoder_attention_heads": HEADS,
     "decoder_attention_heads": HEADS, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16,
     "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
      "use_cache": False}, _mel),
    ("PatchTST", "PatchTSTForPrediction", SERIES, _series),
    ("PatchTSMixer", "PatchTSMixerForPrediction", {**SERIES, "num_layers": 1}, _series),
    ("Detr", "DetrForObjectDetection", {"use_timm_backbone": False, "backbone": None, "d_model": 16,
     "backbone_config": {"model_type": "resnet", "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                         "embedding_size": 8, "layer_type": "basic", "out_features": ["stage4"]},
     "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 4,
     "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_labels": LABELS}, _boxes),
    ("Yolos", "YolosForObjectDetection", {**VISION, "image_size": [32, 32], "num_detection_tokens": 4}, _boxes),
    ("DecisionTransformer", "DecisionTransformerModel", {"state_dim": 5, "act_dim": 3, "hidden_size": WIDTH,
     "n_layer": 1, "n_head": HEADS, "max_ep_len": 20, "vocab_size": 1}, lambda: {
         "states": torch.randn(BATCH, 4, 5), "actions": torch.randn(BATCH, 4, 3),
          "rewards": torch.randn(BATCH, 4, 1),
         "returns_to_go": torch.randn(BATCH, 4, 1), "timesteps": torch.arange(4).expand(BATCH, 4).clone(),
         "attention_mask": torch.ones(BATCH, 4, dtype=torch.long)}),
)  # fmt: skip

LOSSES: dict[str, Any] = {
    "DecisionTransformerModel": lambda m, **batch: (
        (m(**batch).action_preds - batch["actions"]).square().mean()
    )
}


def _add(family: str, head: str, options: dict[str, Any], batch: Batch) -> None:
    model(
        head,
        "transformers",
        lambda: Sample(built(family, head, options), [batch(), batch()], LOSSES.get(head)),
    )


for row in TABLE:
    _add(*row)
