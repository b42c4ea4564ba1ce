"""Read config.json and generation_config.json of a checkpoint into model.config's dataclasses.

Only the settings that the models use are kept. Both spellings of the rope settings are read:
`rope_theta` beside `rope_scaling`, as released, and `rope_parameters`, as transformers 5 saves
them. A setting that is not implemented is refused here, by name, before any weight is read.
"""

import json
from collections.abc import ItemsView, Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.model.config import (
    AudioEncoderConfig,
    Code2WavConfig,
    DecoderConfig,
    GenerationDefaults,
    MoeConfig,
    OmniConfig,
    RopeConfig,
    TalkerConfig,
    ThinkerConfig,
    VisionEncoderConfig,
)

MODEL_TYPE = "qwen3_omni_moe"
VISION_ROPE_THETA = 10000.0  # transformers' default; released configs don't name it


def read_config(folder: Path) -> OmniConfig:
    """Read and check `folder`/config.json.

    Raises CheckpointError if it is missing, broken or of another model, or has a setting that is
    not implemented.
    """
    raw = _read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type != MODEL_TYPE:
        raise CheckpointError(
            f"{folder}/config.json says model_type {model_type!r}; this package runs "
            f"{MODEL_TYPE!r} (Qwen3-Omni). Point model_path at a Qwen3-Omni checkpoint."
        )
    try:
        return parse_config(raw)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json can't be used: {error}") from error


def parse_config(raw: Mapping[str, Any]) -> OmniConfig:
    """Read the content of a config.json. Raises CheckpointError, TypeError and ValueError."""
    return _omni(_Section(raw, "config.json"))


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read `folder`/generation_config.json; without that file the thinker decodes greedily."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    raw = _read_json(path)
    names = GenerationDefaults.__dataclass_fields__
    given = {name: raw[name] for name in names if raw.get(name) is not None}
    if isinstance(given.get("questions"), list):
        given["questions"] = tuple(given["questions"])
    return GenerationDefaults(**given)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist. model_path must be a checkpoint folder with config.json, "
            "tokenizer and safetensors, or a hub id."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}. Download it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{path} holds a {type(raw).__name__}, not an object. Download it again."
        )
    return raw


class _Section:
    """One object of config.json, and its name for error messages."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self._raw = raw
        self._where = where

    def __getitem__(self, name: str) -> Any:
        return self.first(name)

    def first(self, *names: str) -> Any:
        """Return the value of the first of `names` that is set. Raises CheckpointError if none."""
        for name in names:
            if self._raw.get(name) is not None:
                return self._raw[name]
        raise CheckpointError(
            f"{self._where} has no {' or '.join(names)}. Take the config.json that belongs to the "
            "checkpoint."
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default if it is absent or null."""
        value = self._raw.get(name)
        return default if value is None else value

    def items(self) -> ItemsView[str, Any]:
        return self._raw.items()

    def section(self, name: str) -> "_Section":
        """Return an object inside this one. Raises CheckpointError if it is missing."""
        value = self[name]
        if not isinstance(value, Mapping):
            raise CheckpointError(
                f"{self._where}.{name} is not an object. Take the config.json that belongs to the "
                "checkpoint."
            )
        return _Section(value, f"{self._where}.{name}")

    def require(self, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
        """Raise CheckpointError if a value is not one of the implemented ones."""
        if value not in allowed:
            raise CheckpointError(
                f"{self._where} sets {name} to {value!r}; implemented: "
                f"{', '.join(map(repr, allowed))}."
            )


def _omni(c: _Section) -> OmniConfig:
    speaks = bool(c.get("enable_audio_output", True))
    thinker = _thinker(c.section("thinker_config"))
    talker = _talker(c.section("talker_config")) if speaks else None
    if talker and not 0 < talker.accept_hidden_layer < thinker.text.layers:
        raise CheckpointError(
            f"talker_config.accept_hidden_layer is {talker.accept_hidden_layer}; the thinker has "
            f"{thinker.text.layers} layers, so 1 to {thinker.text.layers - 1} can be accepted."
        )
    code2wav = _code2wav(c.section("code2wav_config")) if speaks else None
    if talker and code2wav:
        _check_codes(talker, code2wav)
    return OmniConfig(
        thinker=thinker,
        talker=talker,
        code2wav=code2wav,
        dtype=str(c.get("dtype", c.get("torch_dtype", "bfloat16"))),
        im_start_id=c["im_start_token_id"],
        im_end_id=c["im_end_token_id"],
        system_id=c["system_token_id"],
        user_id=c["user_token_id"],
        assistant_id=c["assistant_token_id"],
        tts_pad_id=c["tts_pad_token_id"],
        tts_bos_id=c["tts_bos_token_id"],
        tts_eos_id=c["tts_eos_token_id"],
    )


def _check_codes(talker: TalkerConfig, code2wav: Code2WavConfig) -> None:
    """Raise CheckpointError if the talker may draw codes that code2wav does not have."""
    not_codes = {talker.codec_eos_id, *talker.suppressed_ids}
    code0 = max((i for i in range(talker.text.vocab_size) if i not in not_codes), default=-1)
    for what, largest in (
        ("talker_config.text_config.vocab_size", code0),
        ("talker_config.code_predictor_config.vocab_size", talker.predictor.vocab_size - 1),
    ):
        if largest >= code2wav.codebook_size:
            raise CheckpointError(
                f"{what} lets the talker draw codes up to {largest}, and "
                f"code2wav_config.codebook_size is {code2wav.codebook_size}: a reply would end in "
                "the middle. Take the config.json that belongs to the checkpoint."
            )
    if talker.code_groups != code2wav.code_groups:
        raise CheckpointError(
            f"talker_config.num_code_groups is {talker.code_groups}, and "
            f"code2wav_config.num_quantizers is {code2wav.code_groups}. Take the config.json that "
            "belongs to the checkpoint."
        )


def _rope(c: _Section) -> RopeConfig:
    parameters = c.get("rope_parameters") or c.get("rope_scaling") or {}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    c.require("rope_type", rope_type, ("default",))
    theta = parameters.get("rope_theta")
    if theta is None:
        theta = c.first("rope_theta", "rope_parameters.rope_theta")
    section = parameters.get("mrope_section")
    return RopeConfig(float(theta), tuple(section) if section else None)


def _decoder(c: _Section, moe: MoeConfig | None) -> DecoderConfig:
    c.require("hidden_act", c.get("hidden_act", "silu"), ("silu",))
    c.require("attention_bias", c.get("attention_bias", False), (False,))
    c.require("sliding_window", c.get("sliding_window"), (None,))
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    return DecoderConfig(
        hidden_size=hidden,
        layers=c["num_hidden_layers"],
        heads=heads,
        kv_heads=c["num_key_value_heads"],
        head_dim=c.get("head_dim", hidden // heads),
        ffn_width=c["intermediate_size"],
        vocab_size=c["vocab_size"],
        max_positions=c["max_position_embeddings"],
        norm_eps=c["rms_norm_eps"],
        rope=_rope(c),
        moe=moe,
    )


def _moe(c: _Section) -> MoeConfig:
    c.require("decoder_sparse_step", c.get("decoder_sparse_step", 1), (1,))
    c.require("mlp_only_layers", list(c.get("mlp_only_layers", [])), ([],))
    return MoeConfig(
        experts=c.first("num_experts", "num_local_experts"),
        experts_per_token=c["num_experts_per_tok"],
        expert_width=c["moe_intermediate_size"],
        normalize_weights=bool(c["norm_topk_prob"]),
        shared_expert_width=c.get("shared_expert_intermediate_size", 0),
    )


def _thinker(c: _Section) -> ThinkerConfig:
    text, audio = c.section("text_config"), c.section("audio_config")
    audio.require("activation_function", audio.get("activation_function", "gelu"), ("gelu",))
    audio.require("scale_embedding", audio.get("scale_embedding", False), (False,))
    return ThinkerConfig(
        text=_decoder(text, _moe(text)),
        audio=AudioEncoderConfig(
            hidden_size=audio["d_model"],
            layers=audio["encoder_layers"],
            heads=audio["encoder_attention_heads"],
            ffn_width=audio["encoder_ffn_dim"],
            mel_bins=audio["num_mel_bins"],
            conv_channels=audio["downsample_hidden_size"],
            output_size=audio["output_dim"],
            max_positions=audio["max_source_positions"],
            chunk_mel_frames=2 * audio["n_window"],
            window_mel_frames=audio["n_window_infer"],
        ),
        vision=_vision(c.section("vision_config")),
        audio_token_id=c["audio_token_id"],
        image_token_id=c["image_token_id"],
        video_token_id=c["video_token_id"],
        positions_per_second=float(c["position_id_per_seconds"]),
    )


def _vision(c: _Section) -> VisionEncoderConfig:
    c.require("hidden_act", c.get("hidden_act", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh",))
    side = isqrt(c["num_position_embeddings"])
    c.require("num_position_embeddings", c["num_position_embeddings"], (side**2,))
    rope = c.get("rope_parameters") or {}
    return VisionEncoderConfig(
        hidden_size=c["hidden_size"],
        layers=c["depth"],
        heads=c["num_heads"],
        ffn_width=c["intermediate_size"],
        patch_values=c["in_channels"] * c["temporal_patch_size"] * c["patch_size"] ** 2,
        merge_size=c["spatial_merge_size"],
        output_size=c["out_hidden_size"],
        positions_per_side=side,
        rope_theta=float(rope.get("rope_theta", VISION_ROPE_THETA)),
        deepstack_layers=tuple(c["deepstack_visual_indexes"]),
    )


def _talker(c: _Section) -> TalkerConfig:
    text = c.section("text_config")
    return TalkerConfig(
        text=_decoder(text, _moe(text)),
        predictor=_decoder(c.section("code_predictor_config"), None),
        code_groups=c["num_code_groups"],
        thinker_hidden_size=c["thinker_hidden_size"],
        projection_width=text["intermediate_size"],
        accept_hidden_layer=c["accept_hidden_layer"],
        codec_bos_id=c["codec_bos_id"],
        codec_eos_id=c["codec_eos_token_id"],
        codec_pad_id=c["codec_pad_id"],
        codec_nothink_id=c["codec_nothink_id"],
        codec_think_bos_id=c["codec_think_bos_id"],
        codec_think_eos_id=c["codec_think_eos_id"],
        speaker_ids={
            str(name).lower(): int(index) for name, index in c.section("speaker_id").items()
        },
    )


def _code2wav(c: _Section) -> Code2WavConfig:
    c.require("hidden_act", c.get("hidden_act", "silu"), ("silu",))
    c.require("attention_bias", c.get("attention_bias", False), (False,))
    return Code2WavConfig(
        hidden_size=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        ffn_width=c["intermediate_size"],
        codebook_size=c["codebook_size"],
        code_groups=c["num_quantizers"],
        sliding_window=c["sliding_window"],
        max_positions=c["max_position_embeddings"],
        norm_eps=c["rms_norm_eps"],
        rope=_rope(c),
        decoder_dim=c["decoder_dim"],
        upsampling_ratios=tuple(c["upsampling_ratios"]),
        upsample_rates=tuple(c["upsample_rates"]),
    )
