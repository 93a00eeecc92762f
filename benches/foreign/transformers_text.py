"""Language models of Hugging Face transformers, one or two small layers each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foreign.registry import Sample, model, without_dropout

VOCABULARY, BATCH, TOKENS, WIDTH, HEADS = 61, 8, 10, 24, 3
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "intermediate_size": 40, "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "n_positions": 32, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2, "use_cache": False,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": HEADS,
    "pad_token_id": 0, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
SINGLE = ("XLNet",)
"""Their forward makes float32 tensors and cannot compute in float64."""
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8}
MOE = {**GROUPED, "num_experts_per_tok": 2, "experts_implementation": "eager"}


def built(family: str, head: str, options: dict[str, Any]) -> Any:
    """A model by its class, with every option of its configuration that drops set to 0."""
    import transformers

    if family in SINGLE:
        torch.set_default_dtype(torch.float32)
    kind = getattr(transformers, head)
    config_class = getattr(transformers, f"{family}Config", None) or kind.config_class
    config = config_class(**options)
    for part in (config, *(v for v in vars(config).values() if isinstance(v, transformers.PretrainedConfig))):
        for name, value in list(vars(part).items()):
            drops = "drop" in name or name.endswith("pdrop")
            if drops and isinstance(value, float) and 0.0 < value < 1.0:
                setattr(part, name, 0.0)
    return without_dropout(kind(config)).train()


def ids(batch: int = BATCH, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def lm_batch() -> dict[str, Any]:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(tokens.shape) < 0.4, -100)}


def padded_batch() -> dict[str, Any]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[0, 7:] = 0
    return {**lm_batch(), "attention_mask": mask}


def seq2seq_batch() -> dict[str, Any]:
    return {
        "input_ids": ids(),
        "attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long),
        "labels": ids(length=6),
    }


def class_batch() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": torch.randint(0, 2, (BATCH,))}


def token_batch() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": torch.randint(0, 2, (BATCH, TOKENS))}


def span_batch() -> dict[str, Any]:
    return {
        "input_ids": ids(), "start_positions": torch.randint(0, TOKENS, (BATCH,)),
        "end_positions": torch.randint(0, TOKENS, (BATCH,)),
    }  # fmt: skip


def choice_batch() -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (BATCH, 2, TOKENS)),
        "labels": torch.randint(0, 2, (BATCH,)),
    }


Batch = Callable[[], dict[str, Any]]
TABLE: tuple[tuple[str, str, dict[str, Any], Batch], ...] = (
    ("Bert", "BertForMaskedLM", COMMON, padded_batch),
    ("Bert", "BertForNextSentencePrediction", COMMON, class_batch),
    ("Bert", "BertForMultipleChoice", COMMON, choice_batch),
    ("Roberta", "RobertaForSequenceClassification", COMMON, class_batch),
    ("Albert", "AlbertForMaskedLM", {**COMMON, "embedding_size": 12}, lm_batch),
    ("Electra", "ElectraForTokenClassification", {**COMMON, "embedding_size": 12}, token_batch),
    ("DistilBert", "DistilBertForQuestionAnswering",
     {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 1, "n_heads": HEADS, "hidden_dim": 40,
      "max_position_embeddings": 32}, span_batch),
    ("Deberta", "DebertaForMaskedLM", {**COMMON, "relative_attention": True, "pos_att_type": ["p2c",
     "c2p"]}, lm_batch),
    ("DebertaV2", "DebertaV2ForSequenceClassification",
     {**COMMON, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}, class_batch),
    ("MobileBert", "MobileBertForMaskedLM",
     {**COMMON, "embedding_size": WIDTH, "intra_bottleneck_size": 12, "true_hidden_size": 12}, lm_batch),
    ("SqueezeBert", "SqueezeBertForSequenceClassification", {**COMMON, "embedding_size": WIDTH, "q_groups": 1,
     "k_groups": 1, "v_groups": 1, "post_attention_groups": 1, "intermediate_groups": 1, "output_groups": 1},
     class_batch),
    ("MPNet", "MPNetForMaskedLM", COMMON, lm_batch),
    ("ConvBert", "ConvBertForMaskedLM", {**COMMON, "num_attention_heads": 4, "embedding_size": WIDTH,
     "head_ratio": 2,
     "conv_kernel_size": 3}, lm_batch),
    ("Nystromformer", "NystromformerForMaskedLM",
     {**COMMON, "num_landmarks": 2, "segment_means_seq_len": 10}, lm_batch),
    ("FNet", "FNetForMaskedLM", {**COMMON, "tpu_short_seq_length": TOKENS}, lm_batch),
    ("RoFormer", "RoFormerForMaskedLM", {**COMMON, "embedding_size": WIDTH, "hidden_size": 32,
     "num_attention_heads": 4}, lm_batch),
    ("Camembert", "CamembertForTokenClassification", COMMON, token_batch),
    ("XLMRoberta", "XLMRobertaForQuestionAnswering", COMMON, span_batch),
    ("Funnel", "FunnelForMaskedLM", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_head": 3, "d_head": 8,
     "d_inner": 40, "block_sizes": [1, 1], "num_decoder_layers": 1}, lm_batch),
    ("Longformer", "LongformerForMaskedLM", {**COMMON, "attention_window": 4}, padded_batch),
    ("BigBird", "BigBirdForMaskedLM", {**COMMON, "attention_type": "original_full"}, lm_batch),
    ("XLNet", "XLNetLMHeadModel", {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": 1, "n_head": HEADS,
     "d_inner": 40}, lm_batch),
    ("ModernBert", "ModernBertForMaskedLM", {**COMMON, "global_attn_every_n_layers": 1, "cls_token_id": 0,
     "sep_token_id": 2, "num_attention_heads": 4, "hidden_size": 32}, lm_batch),
    ("GPT2", "GPT2LMHeadModel", GPT, lm_batch),
    ("GPT2", "GPT2ForSequenceClassification", {**GPT, "pad_token_id": 1}, class_batch),
    ("OpenAIGPT", "OpenAIGPTLMHeadModel", GPT, lm_batch),
    ("CTRL", "CTRLLMHeadModel", {**GPT, "dff": 40}, lm_batch),
    ("GPTNeo", "GPTNeoForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 2,
     "num_heads": HEADS,
     "intermediate_size": 40, "max_position_embeddings": 32, "window_size": 4, "use_cache": False,
     "bos_token_id": 0, "eos_token_id": 2, "attention_types": [[["global", "local"], 1]]}, lm_batch),
    ("GPTJ", "GPTJForCausalLM", {**GPT, "rotary_dim": 4}, lm_batch),
    ("GPTNeoX", "GPTNeoXForCausalLM", {**COMMON, "rotary_pct": 0.5}, lm_batch),
    ("CodeGen", "CodeGenForCausalLM", {**GPT, "n_head": 4, "n_embd": 32, "rotary_dim": 4}, lm_batch),
    ("GPTBigCode", "GPTBigCodeForCausalLM", GPT, lm_batch),
    ("Bloom", "BloomForCausalLM", {**COMMON, "n_layer": 1, "n_head": HEADS}, padded_batch),
    ("Falcon", "FalconForCausalLM", {**COMMON, "num_attention_heads": 3}, lm_batch),
    ("OPT", "OPTForCausalLM", {**COMMON, "ffn_dim": 40, "word_embed_proj_dim": WIDTH}, padded_batch),
    ("XGLM", "XGLMForCausalLM", {"vocab_size": VOCABULARY, "d_model": WIDTH, "num_layers": 1,
     "attention_heads": HEADS, "ffn_dim": 40, "max_position_embeddings": 32, "use_cache": False}, lm_batch),
    ("Mpt", "MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 1, "n_heads": 4,
     "max_seq_len": 32, "use_cache": False}, lm_batch),
    ("Llama", "LlamaForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Mistral", "MistralForCausalLM", {**COMMON, **GROUPED, "sliding_window": 4}, lm_batch),
    ("Qwen2", "Qwen2ForCausalLM", {**COMMON, **GROUPED}, padded_batch),
    ("Qwen3", "Qwen3ForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Gemma", "GemmaForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Gemma2", "Gemma2ForCausalLM", {**COMMON, **GROUPED, "num_hidden_layers": 2, "sliding_window": 4}, lm_batch),
    ("Phi", "PhiForCausalLM", {**COMMON, "hidden_size": 32, "num_attention_heads": 4}, lm_batch),
    ("Phi3", "Phi3ForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("StableLm", "StableLmForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Starcoder2", "Starcoder2ForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Olmo", "OlmoForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Olmo2", "Olmo2ForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Cohere", "CohereForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Granite", "GraniteForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Glm", "GlmForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("SmolLM3", "SmolLM3ForCausalLM", {**COMMON, **GROUPED}, lm_batch),
    ("Mixtral", "MixtralForCausalLM", {**COMMON, **MOE, "num_local_experts": 4}, lm_batch),
    ("OlmoE", "OlmoeForCausalLM", {**COMMON, **MOE, "num_experts": 4}, lm_batch),
    ("Qwen2Moe", "Qwen2MoeForCausalLM", {**COMMON, **MOE, "num_experts": 4, "moe_intermediate_size": 16,
     "shared_expert_intermediate_size": 16}, lm_batch),
    ("Mamba", "MambaForCausalLM", {**COMMON, "state_size": 4, "expand": 2, "conv_kernel": 3, "time_step_rank": 2},
     lm_batch),
    ("Mamba2", "Mamba2ForCausalLM", {**COMMON, "state_size": 4, "num_heads": 6, "head_dim": 8, "expand": 2,
     "n_groups": 1, "chunk_size": 4}, lm_batch),
    ("Rwkv", "RwkvForCausalLM", {**COMMON, "num_hidden_layers": 2, "attention_hidden_size": WIDTH,
     "context_length": 16}, lm_batch),
    ("T5", "T5ForConditionalGeneration", T5, seq2seq_batch),
    ("MT5", "MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, seq2seq_batch),
    ("SwitchTransformers", "SwitchTransformersForConditionalGeneration",
     {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
     "router_jitter_noise": 0.0},
     seq2seq_batch),
    ("Bart", "BartForConditionalGeneration", SEQ2SEQ, seq2seq_batch),
    ("MBart", "MBartForConditionalGeneration", SEQ2SEQ, seq2seq_batch),
    ("Pegasus", "PegasusForConditionalGeneration", SEQ2SEQ, seq2seq_batch),
    ("Marian", "MarianMTModel", {**SEQ2SEQ, "decoder_vocab_size": VOCABULARY}, seq2seq_batch),
    ("M2M100", "M2M100ForConditionalGeneration", SEQ2SEQ, seq2seq_batch),
    ("Blenderbot", "BlenderbotForConditionalGeneration", SEQ2SEQ, seq2seq_batch),
    ("LED", "LEDForConditionalGeneration",
     {**{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}, "attention_window": 4,
      "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32}, seq2seq_batch),
    ("ProphetNet", "ProphetNetForConditionalGeneration", {"vocab_size": VOCABULARY, "hidden_size": WIDTH,
     "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": HEADS,
     "num_decoder_attention_heads": HEADS, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
     "max_position_embeddings": 32, "use_cache": False, "disable_ngram_loss": True}, seq2seq_batch),
)  # fmt: skip


def _add(family: str, head: str, options: dict[str, Any], batch: Batch) -> None:
    model(head, "transformers", lambda: Sample(built(family, head, options), [batch(), batch()]))


for row in TABLE:
    _add(*row)
