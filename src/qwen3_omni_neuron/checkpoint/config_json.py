"""Read config.json and generation_config.json into model.config's dataclasses.

Rope settings may be `rope_theta` with `rope_scaling`, as released, or `rope_parameters`, as in
transformers 5. Unsupported settings are refused by name. Sizes are checked with the tensors.
"""

import json
from collections.abc import Mapping
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
_AGAIN = "Use the config.json that belongs to the checkpoint."
_DEFAULTS = json.loads((Path(__file__).parent / "defaults.json").read_bytes())
"""Defaults of transformers' config classes, except the audio encoder's n_window and n_window_infer,
which differ between 4.57 and 5: config.json must have them."""


def read_config(folder: Path) -> OmniConfig:
    """Read and check `folder`/config.json. Raises CheckpointError."""
    raw = _read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type != MODEL_TYPE:
        raise CheckpointError(
            f"{folder}/config.json says model_type {model_type!r}; this package runs "
            f"{MODEL_TYPE!r} (Qwen3-Omni). Point model_path at a Qwen3-Omni checkpoint."
        )
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> OmniConfig:
    """Parse the content of a config.json. Raises CheckpointError."""
    try:
        return _omni(_Section(raw, "config.json", _DEFAULTS))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json can't be used: {error}. {_AGAIN}") from error


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read `folder`/generation_config.json; without it the thinker decodes greedily."""
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
        raw: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist. model_path must be a checkpoint folder with config.json, "
            "tokenizer and safetensors, or a hub id."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}. Download it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} contains no JSON object. Download it again.")
    return raw


class _Section:
    """Object of config.json over transformers' defaults, named for errors."""

    def __init__(self, raw: Mapping[str, Any], where: str, defaults: Mapping[str, Any]):
        self._raw, self.where, self._defaults = raw, where, defaults

    def __getitem__(self, name: str) -> Any:
        return self.first(name)

    def first(self, *names: str) -> Any:
        """Return the first set value. Raises CheckpointError."""
        for values in (self._raw, self._defaults):
            for name in names:
                if values.get(name) is not None:
                    return values[name]
        raise CheckpointError(f"{self.where} has no {' or '.join(names)}. {_AGAIN}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default if absent or null."""
        given = (self._raw.get(name), self._defaults.get(name))
        return next((value for value in given if value is not None), default)

    def section(self, name: str) -> "_Section":
        value = self[name]
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}.{name} is not an object. {_AGAIN}")
        return _Section(value, f"{self.where}.{name}", self._defaults.get(name, {}))

    def require(self, name: str, allowed: Any) -> None:
        """Raise CheckpointError if a value is set to another than the implemented one."""
        if (value := self.get(name, allowed)) != allowed:
            raise CheckpointError(
                f"{self.where} sets {name} to {value!r}; implemented: {allowed!r}."
            )


def _omni(c: _Section) -> OmniConfig:
    thinker = _thinker(c.section("thinker_config"))
    speaks = bool(c.get("enable_audio_output", True))
    return OmniConfig(
        thinker=thinker,
        talker=_talker(c.section("talker_config"), thinker.text) if speaks else None,
        code2wav=_code2wav(c.section("code2wav_config")) if speaks else None,
        dtype=c.get("dtype", c.get("torch_dtype", "bfloat16")),
        im_start_id=c["im_start_token_id"],
        im_end_id=c["im_end_token_id"],
        user_id=c["user_token_id"],
        assistant_id=c["assistant_token_id"],
        tts_pad_id=c["tts_pad_token_id"],
        tts_bos_id=c["tts_bos_token_id"],
        tts_eos_id=c["tts_eos_token_id"],
    )


def _rope(c: _Section) -> RopeConfig:
    named = [name for name in ("rope_parameters", "rope_scaling") if c.get(name)]
    parameters = c.section(named[0]) if named else _Section({}, c.where, {})
    if parameters.get("rope_type") is None:
        parameters.require("type", "default")
    parameters.require("rope_type", "default")
    theta = parameters.get("rope_theta")
    section = parameters.get("mrope_section") or c.get("mrope_section")
    return RopeConfig(
        float(c["rope_theta"] if theta is None else theta),
        None if section is None else (section[0], section[1], section[2]),
    )


def _decoder(c: _Section, moe: MoeConfig | None) -> DecoderConfig:
    c.require("hidden_act", "silu")
    c.require("attention_bias", False)
    c.require("sliding_window", None)
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
    c.require("decoder_sparse_step", 1)
    c.require("mlp_only_layers", [])
    return MoeConfig(
        experts=c.first("num_experts", "num_local_experts"),
        experts_per_token=c["num_experts_per_tok"],
        expert_width=c["moe_intermediate_size"],
        normalize_weights=bool(c["norm_topk_prob"]),
        shared_expert_width=c.get("shared_expert_intermediate_size", 0),
    )


def _thinker(c: _Section) -> ThinkerConfig:
    text = c.section("text_config")
    return ThinkerConfig(
        text=_decoder(text, _moe(text)),
        audio=_audio(c.section("audio_config")),
        vision=_vision(c.section("vision_config")),
        audio_token_id=c["audio_token_id"],
        image_token_id=c["image_token_id"],
        video_token_id=c["video_token_id"],
        positions_per_second=float(c["position_id_per_seconds"]),
    )


def _audio(c: _Section) -> AudioEncoderConfig:
    c.require("activation_function", "gelu")
    c.require("scale_embedding", False)
    return AudioEncoderConfig(
        hidden_size=c["d_model"],
        layers=c["encoder_layers"],
        heads=c["encoder_attention_heads"],
        ffn_width=c["encoder_ffn_dim"],
        mel_bins=c["num_mel_bins"],
        conv_channels=c["downsample_hidden_size"],
        output_size=c["output_dim"],
        max_positions=c["max_source_positions"],
        chunk_mel_frames=2 * c["n_window"],
        window_mel_frames=c["n_window_infer"],
    )


def _vision(c: _Section) -> VisionEncoderConfig:
    c.require("hidden_act", "gelu_pytorch_tanh")
    parameters = c.section("rope_parameters") if c.get("rope_parameters") else c
    return VisionEncoderConfig(
        hidden_size=c["hidden_size"],
        layers=c["depth"],
        heads=c["num_heads"],
        ffn_width=c["intermediate_size"],
        patch_values=c["in_channels"] * c["temporal_patch_size"] * c["patch_size"] ** 2,
        merge_size=c["spatial_merge_size"],
        output_size=c["out_hidden_size"],
        positions_per_side=isqrt(c["num_position_embeddings"]),
        rope_theta=float(parameters.get("rope_theta", c["rope_theta"])),
        deepstack_layers=tuple(c["deepstack_visual_indexes"]),
    )


def _talker(c: _Section, thinker: DecoderConfig) -> TalkerConfig:
    text = _decoder(c.section("text_config"), _moe(c.section("text_config")))
    accepted = c["accept_hidden_layer"]
    if not 0 < accepted < thinker.layers:
        raise CheckpointError(
            f"{c.where}.accept_hidden_layer is {accepted}; with the thinker's {thinker.layers} "
            f"layers it must be 1 to {thinker.layers - 1}."
        )
    return TalkerConfig(
        text=text,
        predictor=_decoder(c.section("code_predictor_config"), None),
        code_groups=c["num_code_groups"],
        thinker_hidden_size=c["thinker_hidden_size"],
        projection_width=text.ffn_width,
        accept_hidden_layer=accepted,
        codec_bos_id=c["codec_bos_id"],
        codec_eos_id=c["codec_eos_token_id"],
        codec_pad_id=c["codec_pad_id"],
        codec_nothink_id=c["codec_nothink_id"],
        codec_think_bos_id=c["codec_think_bos_id"],
        codec_think_eos_id=c["codec_think_eos_id"],
        speaker_ids={name.lower(): number for name, number in c["speaker_id"].items()},
    )


def _code2wav(c: _Section) -> Code2WavConfig:
    c.require("hidden_act", "silu")
    c.require("attention_bias", False)
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
