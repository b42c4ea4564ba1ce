"""Read config.json and generation_config.json of a checkpoint into model.config's dataclasses.

Only the settings that the models use are kept. Both spellings of the rope settings are read:
`rope_theta` beside `rope_scaling`, as released, and `rope_parameters`, as transformers 5 saves
them. A setting that is not implemented is refused here, by name, before any weight is read.

The file may come from anyone: its numbers are checked before memory or time is taken in proportion
to them. Whether they are the sizes of the stored tensors shows when these are read.
"""

from collections.abc import Mapping
from math import isqrt, prod
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.json_files import read_json, reason
from qwen3_omni_neuron.errors import CheckpointError, format_value
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
# Far above the released sizes, and low enough that modules without weights are made in a second.
_MOST_LAYERS = 256  # 48
_MOST_HEADS = 1024  # 32
_MOST_WIDTH = 1 << 17  # a layer's width: 5120
_MOST_VOCABULARY = 1 << 21  # 152064
_MOST_EXPERTS = 1024  # a layer's: 128
_MOST_ALL_EXPERTS = 1 << 15  # in all layers of a decoder: 6144
_MOST_POSITIONS = 1 << 24  # 65536
_MOST_POSITION_NUMBERS = 1 << 23  # in a table of positions: 2654208
_MOST_GROUPS = 256  # 16
_MOST_RATE = 64  # 8
_MOST_SPEAKERS = 1024  # 3
_MOST_NAME = 100  # characters


def read_config(folder: Path) -> OmniConfig:
    """Read and check `folder`/config.json.

    Raises CheckpointError if it is missing, broken or of another model, or has a setting that is
    not implemented.
    """
    raw = _read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type != MODEL_TYPE:
        raise CheckpointError(
            f"{folder}/config.json says model_type {format_value(model_type)}; this package runs "
            f"{MODEL_TYPE!r} (Qwen3-Omni). Point model_path at a Qwen3-Omni checkpoint."
        )
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> OmniConfig:
    """Read the content of a config.json. Raises CheckpointError."""
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
        raw = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist. model_path must be a checkpoint folder with config.json, "
            "tokenizer and safetensors, or a hub id."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} can't be read: {reason(error)}. Download it again."
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{path} holds a {type(raw).__name__}, not an object. Download it again."
        )
    return raw


_AGAIN = "Take the config.json that belongs to the checkpoint."


class _Section:
    """One object of config.json, and its name for error messages."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw = raw
        self.where = where

    def first(self, *names: str) -> tuple[str, Any]:
        """Return the first of `names` that is set, and its value.

        Raises CheckpointError if none is.
        """
        for name in names:
            if self.raw.get(name) is not None:
                return name, self.raw[name]
        raise CheckpointError(f"{self.where} has no {' or '.join(names)}. {_AGAIN}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default if it is absent or null."""
        value = self.raw.get(name)
        return default if value is None else value

    def whole(self, name: str, most: int, least: int = 1, default: int | None = None) -> int:
        """Return a whole number from `least` to `most`, or the default if it is absent or null.

        Raises CheckpointError for anything else.
        """
        if default is not None and self.raw.get(name) is None:
            return default
        return self._checked_whole(name, self.first(name)[1], most, least)

    def wholes(self, name: str, most_numbers: int, most: int, least: int = 1) -> tuple[int, ...]:
        """Return a list of at most `most_numbers` whole numbers. Raises CheckpointError."""
        values = self.first(name)[1]
        if not isinstance(values, list) or len(values) > most_numbers:
            raise self.refused(name, values, f"a list of at most {most_numbers} numbers")
        return tuple(self._checked_whole(name, value, most, least) for value in values)

    def number(self, name: str, most: float, default: float | None = None) -> float:
        """Return a number above 0 and up to `most`, or the default if it is absent or null.

        Raises CheckpointError for anything else.
        """
        if default is not None and self.raw.get(name) is None:
            return default
        value = self.first(name)[1]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise self.refused(name, value, f"a number above 0, and {most:g} at most")
        return float(value)

    def section(self, *names: str) -> "_Section":
        """Return the first of some objects in this one that is set. Raises CheckpointError."""
        name, value = self.first(*names)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}.{name} is not an object. {_AGAIN}")
        return _Section(value, f"{self.where}.{name}")

    def require(self, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
        """Raise CheckpointError if a value is not one of the implemented ones."""
        if value not in allowed:
            raise CheckpointError(
                f"{self.where} sets {name} to {format_value(value)}; implemented: "
                f"{', '.join(map(repr, allowed))}."
            )

    def agree(self, name: str, value: int, other: str, expected: int) -> None:
        """Raise CheckpointError if two numbers differ that must be equal."""
        if value != expected:
            raise CheckpointError(
                f"{self.where}.{name} is {value}, and {other} is {expected}: they must be equal. "
                f"{_AGAIN}"
            )

    def multiple(self, name: str, value: int, other: str, of: int) -> None:
        """Raise CheckpointError if a number is not a multiple of another one."""
        if value % of:
            raise CheckpointError(
                f"{self.where}.{name} is {value}, and must be a multiple of {other}, {of}. {_AGAIN}"
            )

    def refused(self, name: str, value: Any, needed: str) -> CheckpointError:
        """Return the error for a value that can't be used."""
        return CheckpointError(
            f"{self.where}.{name} is {format_value(value)}; it must be {needed}. {_AGAIN}"
        )

    def _checked_whole(self, name: str, value: Any, most: int, least: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise self.refused(name, value, f"a whole number from {least} to {most}")
        return value


def _omni(c: _Section) -> OmniConfig:
    speaks = bool(c.get("enable_audio_output", True))
    thinker = _thinker(c.section("thinker_config"))
    last = thinker.text.vocab_size - 1
    talker = code2wav = None
    if speaks:
        talker = _talker(c.section("talker_config"), thinker.text)
        code2wav = _code2wav(c.section("code2wav_config"))
        _check_codes(talker, code2wav)
    dtype = c.get("dtype", c.get("torch_dtype", "bfloat16"))
    if not isinstance(dtype, str) or len(dtype) > _MOST_NAME:
        raise c.refused("dtype", dtype, "a name, such as bfloat16")
    return OmniConfig(
        thinker=thinker,
        talker=talker,
        code2wav=code2wav,
        dtype=dtype,
        im_start_id=c.whole("im_start_token_id", last, 0),
        im_end_id=c.whole("im_end_token_id", last, 0),
        system_id=c.whole("system_token_id", last, 0),
        user_id=c.whole("user_token_id", last, 0),
        assistant_id=c.whole("assistant_token_id", last, 0),
        tts_pad_id=c.whole("tts_pad_token_id", last, 0),
        tts_bos_id=c.whole("tts_bos_token_id", last, 0),
        tts_eos_id=c.whole("tts_eos_token_id", last, 0),
    )


def _check_codes(talker: TalkerConfig, code2wav: Code2WavConfig) -> None:
    """Raise CheckpointError if the talker may draw codes that code2wav does not have."""
    not_codes = {talker.codec_eos_id, *talker.suppressed_ids}
    code0 = next((i for i in reversed(range(talker.text.vocab_size)) if i not in not_codes), -1)
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


def _rope(c: _Section, head_dim: int) -> RopeConfig:
    named = [name for name in ("rope_parameters", "rope_scaling") if c.get(name)]
    parameters = c.section(*named) if named else _Section({}, f"{c.where}.rope_parameters")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    c.require("rope_type", rope_type, ("default",))
    c.multiple("head_dim", head_dim, "the two halves of a rotation", 2)
    if parameters.get("rope_theta") is None and c.get("rope_theta") is None:
        c.first("rope_theta", "rope_parameters.rope_theta")
    owner = c if parameters.get("rope_theta") is None else parameters
    theta = owner.number("rope_theta", 1e12)
    if not parameters.get("mrope_section"):
        return RopeConfig(theta)
    section = parameters.wholes("mrope_section", 3, head_dim, 0)
    if len(section) != 3:
        raise parameters.refused("mrope_section", list(section), "a list of 3 numbers")
    return RopeConfig(theta, (section[0], section[1], section[2]))


def _decoder(c: _Section, moe: MoeConfig | None) -> DecoderConfig:
    c.require("hidden_act", c.get("hidden_act", "silu"), ("silu",))
    c.require("attention_bias", c.get("attention_bias", False), (False,))
    c.require("sliding_window", c.get("sliding_window"), (None,))
    hidden = c.whole("hidden_size", _MOST_WIDTH)
    heads = c.whole("num_attention_heads", _MOST_HEADS)
    kv_heads = c.whole("num_key_value_heads", heads)
    c.multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim = c.whole("head_dim", _MOST_WIDTH // heads, default=max(1, hidden // heads))
    layers = c.whole("num_hidden_layers", _MOST_LAYERS)
    if moe is not None and moe.experts * layers > _MOST_ALL_EXPERTS:
        raise CheckpointError(
            f"{c.where} has {layers} layers of {moe.experts} experts; {_MOST_ALL_EXPERTS} experts "
            f"in all layers together are the most. {_AGAIN}"
        )
    return DecoderConfig(
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_width=c.whole("intermediate_size", _MOST_WIDTH),
        vocab_size=c.whole("vocab_size", _MOST_VOCABULARY),
        max_positions=c.whole("max_position_embeddings", _MOST_POSITIONS),
        norm_eps=c.number("rms_norm_eps", 1.0),
        rope=_rope(c, head_dim),
        moe=moe,
    )


def _moe(c: _Section) -> MoeConfig:
    c.require("decoder_sparse_step", c.get("decoder_sparse_step", 1), (1,))
    c.require("mlp_only_layers", c.get("mlp_only_layers", []), ([],))
    experts = c.whole(c.first("num_experts", "num_local_experts")[0], _MOST_EXPERTS)
    return MoeConfig(
        experts=experts,
        experts_per_token=c.whole("num_experts_per_tok", experts),
        expert_width=c.whole("moe_intermediate_size", _MOST_WIDTH),
        normalize_weights=bool(c.first("norm_topk_prob")[1]),
        shared_expert_width=c.whole("shared_expert_intermediate_size", _MOST_WIDTH, 0, default=0),
    )


def _thinker(c: _Section) -> ThinkerConfig:
    text = _decoder(c.section("text_config"), _moe(c.section("text_config")))
    audio, vision = c.section("audio_config"), c.section("vision_config")
    last = text.vocab_size - 1
    return ThinkerConfig(
        text=text,
        audio=_audio(audio, text.hidden_size),
        vision=_vision(vision, text),
        audio_token_id=c.whole("audio_token_id", last, 0),
        image_token_id=c.whole("image_token_id", last, 0),
        video_token_id=c.whole("video_token_id", last, 0),
        positions_per_second=c.number("position_id_per_seconds", 10000.0),
    )


def _audio(c: _Section, thinker_hidden: int) -> AudioEncoderConfig:
    c.require("activation_function", c.get("activation_function", "gelu"), ("gelu",))
    c.require("scale_embedding", c.get("scale_embedding", False), (False,))
    hidden = c.whole("d_model", _MOST_WIDTH, 4)
    heads = c.whole("encoder_attention_heads", _MOST_HEADS)
    c.multiple("d_model", hidden, "encoder_attention_heads", heads)
    c.multiple("d_model", hidden, "sines and cosines", 2)
    output = c.whole("output_dim", _MOST_WIDTH)
    c.agree("output_dim", output, "thinker_config.text_config.hidden_size", thinker_hidden)
    chunk = 2 * c.whole("n_window", 5000)
    window = c.whole("n_window_infer", 100_000)
    c.multiple("n_window_infer", window, "twice n_window", chunk)
    config = AudioEncoderConfig(
        hidden_size=hidden,
        layers=c.whole("encoder_layers", _MOST_LAYERS),
        heads=heads,
        ffn_width=c.whole("encoder_ffn_dim", _MOST_WIDTH),
        mel_bins=c.whole("num_mel_bins", 4096),
        conv_channels=c.whole("downsample_hidden_size", _MOST_WIDTH),
        output_size=output,
        max_positions=c.whole("max_source_positions", _MOST_POSITION_NUMBERS // hidden),
        chunk_mel_frames=chunk,
        window_mel_frames=window,
    )
    if config.tokens(chunk) > config.max_positions:
        most = f"of at most {config.max_positions} tokens, the max_source_positions"
        raise c.refused("n_window", chunk // 2, most)
    return config


def _vision(c: _Section, thinker: DecoderConfig) -> VisionEncoderConfig:
    c.require("hidden_act", c.get("hidden_act", "gelu_pytorch_tanh"), ("gelu_pytorch_tanh",))
    hidden = c.whole("hidden_size", _MOST_WIDTH)
    heads = c.whole("num_heads", _MOST_HEADS)
    c.multiple("hidden_size", hidden, "4 times num_heads", 4 * heads)
    positions = c.whole("num_position_embeddings", _MOST_POSITION_NUMBERS // hidden)
    side = isqrt(positions)
    c.require("num_position_embeddings", positions, (side**2,))
    output, layers = c.whole("out_hidden_size", _MOST_WIDTH), c.whole("depth", _MOST_LAYERS)
    c.agree(
        "out_hidden_size", output, "thinker_config.text_config.hidden_size", thinker.hidden_size
    )
    parameters = c.section("rope_parameters") if c.get("rope_parameters") else _Section({}, c.where)
    patch = c.whole("patch_size", 1024)
    return VisionEncoderConfig(
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        ffn_width=c.whole("intermediate_size", _MOST_WIDTH),
        patch_values=c.whole("in_channels", 64) * c.whole("temporal_patch_size", 64) * patch**2,
        merge_size=c.whole("spatial_merge_size", 64),
        output_size=output,
        positions_per_side=side,
        rope_theta=parameters.number("rope_theta", 1e12, default=VISION_ROPE_THETA),
        deepstack_layers=c.wholes("deepstack_visual_indexes", thinker.layers, layers - 1, 0),
    )


def _talker(c: _Section, thinker: DecoderConfig) -> TalkerConfig:
    text = _decoder(c.section("text_config"), _moe(c.section("text_config")))
    predictor = _decoder(c.section("code_predictor_config"), None)
    names = "code_predictor_config.hidden_size", "talker_config.text_config.hidden_size"
    c.agree(names[0], predictor.hidden_size, names[1], text.hidden_size)
    thinker_hidden = c.whole("thinker_hidden_size", _MOST_WIDTH)
    name = "thinker_config.text_config.hidden_size"
    c.agree("thinker_hidden_size", thinker_hidden, name, thinker.hidden_size)
    accepted = c.whole("accept_hidden_layer", _MOST_LAYERS, 0)
    if not 0 < accepted < thinker.layers:
        raise CheckpointError(
            f"{c.where}.accept_hidden_layer is {accepted}; the thinker has {thinker.layers} "
            f"layers, so 1 to {thinker.layers - 1} can be accepted."
        )
    last = text.vocab_size - 1
    speakers = c.section("speaker_id")
    if len(speakers.raw) > _MOST_SPEAKERS or any(len(name) > _MOST_NAME for name in speakers.raw):
        raise CheckpointError(
            f"{speakers.where} has {len(speakers.raw)} names; {_MOST_SPEAKERS} of {_MOST_NAME} "
            f"characters are the most. {_AGAIN}"
        )
    return TalkerConfig(
        text=text,
        predictor=predictor,
        code_groups=c.whole("num_code_groups", _MOST_GROUPS, 2),
        thinker_hidden_size=thinker_hidden,
        projection_width=text.ffn_width,
        accept_hidden_layer=accepted,
        codec_bos_id=c.whole("codec_bos_id", last, 0),
        codec_eos_id=c.whole("codec_eos_token_id", last, 0),
        codec_pad_id=c.whole("codec_pad_id", last, 0),
        codec_nothink_id=c.whole("codec_nothink_id", last, 0),
        codec_think_bos_id=c.whole("codec_think_bos_id", last, 0),
        codec_think_eos_id=c.whole("codec_think_eos_id", last, 0),
        speaker_ids={name.lower(): speakers.whole(name, last, 0) for name in speakers.raw},
    )


def _code2wav(c: _Section) -> Code2WavConfig:
    c.require("hidden_act", c.get("hidden_act", "silu"), ("silu",))
    c.require("attention_bias", c.get("attention_bias", False), (False,))
    hidden = c.whole("hidden_size", _MOST_WIDTH)
    heads = c.whole("num_attention_heads", _MOST_HEADS)
    kv_heads = c.whole("num_key_value_heads", heads)
    c.multiple("hidden_size", hidden, "num_attention_heads", heads)
    c.multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    ratios = c.wholes("upsampling_ratios", 8, _MOST_RATE)
    rates = c.wholes("upsample_rates", 8, _MOST_RATE)
    if prod((*ratios, *rates)) > 1 << 16:
        raise c.refused("upsample_rates", list(rates), "at most 65536 samples a frame in all")
    decoder_dim = c.whole("decoder_dim", _MOST_WIDTH)
    c.multiple("decoder_dim", decoder_dim, "2 for each of upsample_rates", 2 ** len(rates))
    return Code2WavConfig(
        hidden_size=hidden,
        layers=c.whole("num_hidden_layers", _MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        ffn_width=c.whole("intermediate_size", _MOST_WIDTH),
        codebook_size=c.whole("codebook_size", _MOST_VOCABULARY),
        code_groups=c.whole("num_quantizers", _MOST_GROUPS),
        sliding_window=c.whole("sliding_window", 1 << 14, 2),
        max_positions=c.whole("max_position_embeddings", _MOST_POSITIONS),
        norm_eps=c.number("rms_norm_eps", 1.0),
        rope=_rope(c, hidden // heads),
        decoder_dim=decoder_dim,
        upsampling_ratios=ratios,
        upsample_rates=rates,
    )
