"""Small models of transformers with random weights, by architecture, and inputs to them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers as tf

_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
_DECODER = {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
_ENCODER = {**_SMALL, "num_attention_heads": 4}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
_WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "vocab_size": 128, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip

MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**_DECODER)),
    "llama_tied": (tf.LlamaForCausalLM, tf.LlamaConfig(**_DECODER, tie_word_embeddings=True)),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**_DECODER)),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**_DECODER, head_dim=16)),
    "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config(**_DECODER, head_dim=16)),
    "gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**_DECODER, head_dim=16)),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig(**_DECODER)),
    "phi": (tf.PhiForCausalLM, tf.PhiConfig(**_DECODER)),
    "phi3": (tf.Phi3ForCausalLM, tf.Phi3Config(**_DECODER)),
    "mixtral": (
        tf.MixtralForCausalLM,
        tf.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2),
    ),
    "qwen2moe": (
        tf.Qwen2MoeForCausalLM,
        tf.Qwen2MoeConfig(
            **_DECODER, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        ),
    ),
    "qwen3moe": (
        tf.Qwen3MoeForCausalLM,
        tf.Qwen3MoeConfig(
            **_DECODER, head_dim=16, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=32
        ),
    ),
    "gptoss": (
        tf.GptOssForCausalLM,
        tf.GptOssConfig(**_DECODER, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    ),
    "gpt2": (
        tf.GPT2LMHeadModel,
        tf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64),
    ),
    "gpt_neox": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig(**_ENCODER)),
    "opt": (
        tf.OPTForCausalLM,
        tf.OPTConfig(
            hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=128, word_embed_proj_dim=64, max_position_embeddings=64,
        ),
    ),
    "t5": (tf.T5ForConditionalGeneration, tf.T5Config(**_T5, decoder_start_token_id=0)),
    "whisper": (tf.WhisperForConditionalGeneration, tf.WhisperConfig(**_WHISPER)),
    "bert": (tf.BertForMaskedLM, tf.BertConfig(**_ENCODER)),
    "distilbert": (
        tf.DistilBertForSequenceClassification,
        tf.DistilBertConfig(dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=128),
    ),
    "vit": (
        tf.ViTForImageClassification,
        tf.ViTConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            image_size=32, patch_size=8,
        ),
    ),
}  # fmt: skip
EXPERTS = ("mixtral", "qwen2moe", "qwen3moe", "gptoss")
GENERATING = [name for name in MODELS if name not in ("bert", "distilbert", "vit")]


def build(name: str, dtype: Any = torch.float32) -> Any:
    """Return the model of a name with random weights that are the same in each process."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    return kind._from_config(copy.deepcopy(config), dtype=dtype).eval()


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return inputs that a model takes, the same in each process."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 120, (2, 7), generator=draw)
    config = model.config
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw).to(model.dtype)}
    if model.main_input_name == "input_features":
        features = torch.randn(2, config.num_mel_bins, 40, generator=draw).to(model.dtype)
        return {"input_features": features, "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return what a model answers to the inputs, where it lies; on the host."""
    given = {name: one.to(model.device) for name, one in inputs(model).items()}
    found: torch.Tensor = model(**given).logits
    return found.cpu()
