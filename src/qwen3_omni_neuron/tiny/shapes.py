"""config.json of a tiny checkpoint: the released sections, with sizes that fit on a laptop."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TinyShape:
    """Sizes that differ between `tiny` and `small`; all other settings are the released ones."""

    thinker_hidden: int
    thinker_layers: int
    thinker_heads: int
    thinker_kv_heads: int
    thinker_experts: int
    thinker_expert_width: int
    accept_hidden_layer: int
    head_dim: int
    mrope_section: tuple[int, int, int]
    audio_hidden: int
    audio_layers: int
    audio_heads: int
    audio_conv_channels: int
    vision_hidden: int
    vision_layers: int
    vision_heads: int
    vision_positions: int
    talker_hidden: int
    talker_layers: int
    talker_heads: int
    talker_kv_heads: int
    talker_experts: int
    talker_expert_width: int
    talker_shared_width: int
    projection_width: int
    predictor_layers: int
    predictor_kv_heads: int
    predictor_width: int
    codebook_size: int
    vocoder_hidden: int
    vocoder_layers: int
    vocoder_heads: int
    vocoder_window: int
    decoder_dim: int
    max_positions: int


SHAPES = {
    # 1.4 M parameters: every part of the model, and sizes that bring out mistakes (a second of
    # speech is longer than code2wav's window, the shared expert is wider than the routed ones).
    "tiny": TinyShape(
        thinker_hidden=64,
        thinker_layers=3,
        thinker_heads=4,
        thinker_kv_heads=2,
        thinker_experts=8,
        thinker_expert_width=32,
        accept_hidden_layer=2,
        head_dim=16,
        mrope_section=(4, 2, 2),
        audio_hidden=64,
        audio_layers=2,
        audio_heads=4,
        audio_conv_channels=16,
        vision_hidden=48,
        vision_layers=4,
        vision_heads=4,
        vision_positions=64,
        talker_hidden=64,
        talker_layers=2,
        talker_heads=4,
        talker_kv_heads=2,
        talker_experts=8,
        talker_expert_width=32,
        talker_shared_width=48,
        projection_width=96,
        predictor_layers=1,
        predictor_kv_heads=2,
        predictor_width=128,
        codebook_size=64,
        vocoder_hidden=64,
        vocoder_layers=2,
        vocoder_heads=4,
        vocoder_window=12,
        decoder_dim=32,
        max_positions=4096,
    ),
    # For benchmarks: the released head sizes, code groups, codebooks and upsampling.
    "small": TinyShape(
        thinker_hidden=1024,
        thinker_layers=6,
        thinker_heads=8,
        thinker_kv_heads=4,
        thinker_experts=16,
        thinker_expert_width=256,
        accept_hidden_layer=3,
        head_dim=128,
        mrope_section=(24, 20, 20),
        audio_hidden=256,
        audio_layers=4,
        audio_heads=4,
        audio_conv_channels=64,
        vision_hidden=288,
        vision_layers=4,
        vision_heads=4,
        vision_positions=2304,
        talker_hidden=256,
        talker_layers=4,
        talker_heads=4,
        talker_kv_heads=2,
        talker_experts=16,
        talker_expert_width=128,
        talker_shared_width=256,
        projection_width=512,
        predictor_layers=3,
        predictor_kv_heads=2,
        predictor_width=768,
        codebook_size=2048,
        vocoder_hidden=256,
        vocoder_layers=4,
        vocoder_heads=4,
        vocoder_window=72,
        decoder_dim=192,
        max_positions=8192,
    ),
}

CODE_GROUPS = 16


def config_dict(shape: TinyShape, token_ids: dict[str, int], dtype: str) -> dict[str, Any]:
    """Return config.json in the released (transformers 4.x) spelling.

    token_ids: id of every token by its text, as `write_tokenizer` returns it. The codec's special
    ids keep their released distance from the codebook's end (2148 - 2048 = 100 for codec_pad).
    """
    vocab_size = -(-len(token_ids) // 64) * 64  # a multiple of 64, as released
    media = {
        "audio_token_id": token_ids["<|audio_pad|>"],
        "image_token_id": token_ids["<|image_pad|>"],
        "video_token_id": token_ids["<|video_pad|>"],
        "audio_start_token_id": token_ids["<|audio_start|>"],
        "audio_end_token_id": token_ids["<|audio_end|>"],
        "vision_start_token_id": token_ids["<|vision_start|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "assistant_token_id": token_ids["assistant"],
        "code2wav_config": _code2wav(shape),
        "dtype": dtype,
        "enable_audio_output": True,
        "im_end_token_id": token_ids["<|im_end|>"],
        "im_start_token_id": token_ids["<|im_start|>"],
        "model_type": "qwen3_omni_moe",
        "system_token_id": token_ids["system"],
        "talker_config": _talker(shape, media),
        "thinker_config": _thinker(shape, media, vocab_size, token_ids, dtype),
        "transformers_version": "4.57.6",
        "tts_bos_token_id": token_ids["<tts_text_bos>"],
        "tts_eos_token_id": token_ids["<tts_text_eod>"],
        "tts_pad_token_id": token_ids["<tts_pad>"],
        "user_token_id": token_ids["user"],
    }


def generation_config_dict(token_ids: dict[str, int]) -> dict[str, Any]:
    """Return generation_config.json: the thinker's sampling defaults."""
    return {
        "do_sample": True,
        "eos_token_id": token_ids["<|im_end|>"],
        "pad_token_id": token_ids["<|endoftext|>"],
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "transformers_version": "4.57.6",
    }


def _decoder(max_positions: int) -> dict[str, Any]:
    """Return the settings that the two MoE decoders share."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": max_positions,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    }


def _mrope(shape: TinyShape) -> dict[str, Any]:
    return {
        "interleaved": True,
        "mrope_section": list(shape.mrope_section),
        "rope_type": "default",
        "type": "default",
    }


def _thinker(
    shape: TinyShape,
    media: dict[str, int],
    vocab_size: int,
    token_ids: dict[str, int],
    dtype: str,
) -> dict[str, Any]:
    return {
        "audio_config": {
            "activation_dropout": 0,
            "activation_function": "gelu",
            "attention_dropout": 0,
            "conv_chunksize": 500,
            "d_model": shape.audio_hidden,
            "downsample_hidden_size": shape.audio_conv_channels,
            "dropout": 0,
            "encoder_attention_heads": shape.audio_heads,
            "encoder_ffn_dim": 2 * shape.audio_hidden,
            "encoder_layers": shape.audio_layers,
            "initializer_range": 0.02,
            "max_source_positions": 1500,
            "model_type": "qwen3_omni_moe_audio_encoder",
            "n_window": 50,
            "n_window_infer": 800,
            "num_mel_bins": 128,
            "output_dim": shape.thinker_hidden,
            "scale_embedding": False,
        },
        **media,
        "dtype": dtype,
        "initializer_range": 0.02,
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": {
            **_decoder(shape.max_positions),
            "head_dim": shape.head_dim,
            "hidden_size": shape.thinker_hidden,
            "intermediate_size": shape.thinker_expert_width,
            "model_type": "qwen3_omni_moe_text",
            "moe_intermediate_size": shape.thinker_expert_width,
            "num_attention_heads": shape.thinker_heads,
            "num_experts": shape.thinker_experts,
            "num_experts_per_tok": 2,
            "num_hidden_layers": shape.thinker_layers,
            "num_key_value_heads": shape.thinker_kv_heads,
            "rope_scaling": {**_mrope(shape), "mrope_interleaved": True},
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
            "vocab_size": vocab_size,
        },
        "user_token_id": token_ids["user"],
        "vision_config": {
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [0, 1, 2],
            "depth": shape.vision_layers,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": shape.vision_hidden,
            "image_size": 768,
            "in_channels": 3,
            "in_chans": 3,
            "initializer_range": 0.02,
            "intermediate_size": 2 * shape.vision_hidden,
            "model_type": "qwen3_omni_moe_vision_encoder",
            "num_heads": shape.vision_heads,
            "num_position_embeddings": shape.vision_positions,
            "out_hidden_size": shape.thinker_hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "spatial_patch_size": 16,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
        },
        "vision_end_token_id": token_ids["<|vision_end|>"],
    }


def _talker(shape: TinyShape, media: dict[str, int]) -> dict[str, Any]:
    codebook = shape.codebook_size
    return {
        "accept_hidden_layer": shape.accept_hidden_layer,
        **media,
        "code_predictor_config": {
            "attention_bias": False,
            "attention_dropout": 0,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.talker_hidden,
            "initializer_range": 0.02,
            "intermediate_size": shape.predictor_width,
            "layer_types": ["full_attention"] * shape.predictor_layers,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "num_attention_heads": shape.talker_heads,
            "num_code_groups": CODE_GROUPS,
            "num_hidden_layers": shape.predictor_layers,
            "num_key_value_heads": shape.predictor_kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": codebook,
        },
        "codec_pad_id": codebook + 100,
        "codec_bos_id": codebook + 101,
        "codec_eos_token_id": codebook + 102,
        "codec_nothink_id": codebook + 107,
        "codec_think_bos_id": codebook + 108,
        "codec_think_eos_id": codebook + 109,
        "model_type": "qwen3_omni_moe_talker",
        "num_code_groups": CODE_GROUPS,
        "output_router_logits": False,
        "spatial_merge_size": 2,
        "speaker_id": {
            "chelsie": codebook + 253,
            "ethan": codebook + 254,
            "aiden": codebook + 255,
        },
        "text_config": {
            **_decoder(shape.max_positions),
            "head_dim": shape.head_dim,
            "hidden_size": shape.talker_hidden,
            "intermediate_size": shape.projection_width,
            "model_type": "qwen3_omni_moe_talker_text",
            "moe_intermediate_size": shape.talker_expert_width,
            "num_attention_heads": shape.talker_heads,
            "num_experts": shape.talker_experts,
            "num_experts_per_tok": 2,
            "num_hidden_layers": shape.talker_layers,
            "num_key_value_heads": shape.talker_kv_heads,
            "rope_scaling": _mrope(shape),
            "shared_expert_intermediate_size": shape.talker_shared_width,
            "vocab_size": codebook + 1024,
        },
        "thinker_hidden_size": shape.thinker_hidden,
    }


def _code2wav(shape: TinyShape) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "codebook_dim": shape.vocoder_hidden // 2,
        "codebook_size": shape.codebook_size,
        "decoder_dim": shape.decoder_dim,
        "hidden_act": "silu",
        "hidden_size": shape.vocoder_hidden,
        "intermediate_size": 2 * shape.vocoder_hidden,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "model_type": "",
        "num_attention_heads": shape.vocoder_heads,
        "num_hidden_layers": shape.vocoder_layers,
        "num_key_value_heads": shape.vocoder_heads,
        "num_quantizers": CODE_GROUPS,
        "num_semantic_quantizers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "semantic_codebook_size": 2 * shape.codebook_size,
        "sliding_window": shape.vocoder_window,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "vector_quantization_hidden_dimension": shape.vocoder_hidden // 2,
    }
