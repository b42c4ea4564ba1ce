"""config.json and generation_config.json of a checkpoint as frozen dataclasses.

Only what the models compute with is kept; both spellings of the rope settings are read
(`rope_theta` beside `rope_scaling`, as released, and `rope_parameters`, as transformers 5 saves).
What we don't implement is refused here, by name, before any weight is read.
"""

import json
from collections.abc import ItemsView, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.errors import CheckpointError

MODEL_TYPE = "qwen3_omni_moe"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. mrope_section: how many frequencies follow time, height and width."""

    theta: float
    mrope_section: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts, and the talker's shared one (width 0: none)."""

    experts: int
    experts_per_token: int
    expert_width: int
    normalize_weights: bool
    shared_expert_width: int


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder stack: the thinker's, the talker's, the code predictor's.

    moe is None where the feed-forward is dense (`ffn_width`).
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    moe: MoeConfig | None = None


@dataclass(frozen=True)
class AudioEncoderConfig:
    """The audio encoder: a convolution stem over 1 s chunks, attention inside 8 s windows."""

    hidden_size: int
    layers: int
    heads: int
    ffn_width: int
    mel_bins: int
    conv_channels: int
    output_size: int
    max_positions: int
    chunk_mel_frames: int
    window_mel_frames: int

    @cached_property
    def window_tokens(self) -> int:
        """Tokens that see each other: 13 a chunk of 100 mel frames, 8 chunks a window."""
        chunks = self.window_mel_frames // self.chunk_mel_frames
        return self.tokens(self.chunk_mel_frames) * chunks

    def tokens(self, mel_frames: int) -> int:
        """Audio tokens of a clip of `mel_frames`: whole chunks, then the rest, halved 3 times."""
        chunks, rest = divmod(mel_frames, self.chunk_mel_frames)
        return chunks * _halved_thrice(self.chunk_mel_frames) + _halved_thrice(rest)


def _halved_thrice(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


@dataclass(frozen=True)
class ThinkerConfig:
    """The thinker: text decoder, audio encoder, and the ids of media tokens."""

    text: DecoderConfig
    audio: AudioEncoderConfig
    audio_token_id: int
    image_token_id: int
    video_token_id: int


@dataclass(frozen=True)
class TalkerConfig:
    """The talker: decoder over codec tokens, code predictor, and the codec's own ids."""

    text: DecoderConfig
    predictor: DecoderConfig
    code_groups: int
    thinker_hidden_size: int
    projection_width: int
    accept_hidden_layer: int
    codec_bos_id: int
    codec_eos_id: int
    codec_pad_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    speaker_ids: Mapping[str, int]

    @cached_property
    def suppressed_ids(self) -> tuple[int, ...]:
        """Codec ids that are never sampled: the last 1024, but for codec_eos."""
        vocab = self.text.vocab_size
        return tuple(i for i in range(vocab - 1024, vocab) if i != self.codec_eos_id)


@dataclass(frozen=True)
class Code2WavConfig:
    """The vocoder: 16 codes a frame in, 1920 samples a frame out."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn_width: int
    codebook_size: int
    code_groups: int
    sliding_window: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    decoder_dim: int
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @cached_property
    def frame_samples(self) -> int:
        """Samples a frame: 2 * 2 * 8 * 5 * 4 * 3 = 1920."""
        return prod(self.upsampling_ratios) * prod(self.upsample_rates)

    @cached_property
    def latency_samples(self) -> int:
        """Samples that N frames fall short of N * frame_samples (released: 555).

        Each decoder block trims one stride of samples on both sides of what its transposed
        convolution (kernel of two strides) gives, so it returns rate * (n - 1) for n. The deficit
        compounds through the blocks: 8, 8 * 5 + 5 = 45, 45 * 4 + 4 = 184, 184 * 3 + 3 = 555.
        """
        deficit = 0
        for rate in self.upsample_rates:
            deficit = deficit * rate + rate
        return deficit


@dataclass(frozen=True)
class OmniConfig:
    """The whole checkpoint. talker and code2wav are None in a text-only one."""

    thinker: ThinkerConfig
    talker: TalkerConfig | None
    code2wav: Code2WavConfig | None
    dtype: str
    im_start_id: int
    im_end_id: int
    system_id: int
    user_id: int
    assistant_id: int
    tts_pad_id: int
    tts_bos_id: int
    tts_eos_id: int

    @property
    def code_groups(self) -> int:
        """Codes a frame; 0 where the checkpoint can't speak."""
        return self.talker.code_groups if self.talker else 0


@dataclass(frozen=True)
class GenerationDefaults:
    """The thinker's sampling settings in generation_config.json (transformers' where unset)."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0


def read_config(folder: Path) -> OmniConfig:
    """Read and check `folder`/config.json.

    Raises CheckpointError when it is missing, broken, of another model, or asks for something
    that is not implemented.
    """
    raw = _read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type != MODEL_TYPE:
        raise CheckpointError(
            f"{folder}/config.json says model_type {model_type!r}; this package runs "
            f"{MODEL_TYPE!r} (Qwen3-Omni). Point model_path at a Qwen3-Omni checkpoint."
        )
    try:
        return _omni(_Section(raw, "config.json"))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}/config.json can't be used: {error}") from error


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read `folder`/generation_config.json; without the file the thinker is greedy."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    raw = _read_json(path)
    known = {name: raw[name] for name in GenerationDefaults.__dataclass_fields__ if name in raw}
    return GenerationDefaults(**known)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist. model_path must be a checkpoint folder with config.json, "
            "tokenizer and safetensors, or a hub id."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, not an object.")
    return raw


class _Section:
    """One object of config.json that knows its own name, for the errors."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self._raw = raw
        self._where = where

    def __getitem__(self, name: str) -> Any:
        return self.first(name)

    def first(self, *names: str) -> Any:
        """The value of the first of `names` that is there."""
        for name in names:
            if self._raw.get(name) is not None:
                return self._raw[name]
        raise CheckpointError(f"{self._where} has no {' or '.join(names)}.")

    def get(self, name: str, default: Any = None) -> Any:
        value = self._raw.get(name)
        return default if value is None else value

    def items(self) -> ItemsView[str, Any]:
        return self._raw.items()

    def section(self, name: str) -> "_Section":
        value = self[name]
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self._where}.{name} is not an object.")
        return _Section(value, f"{self._where}.{name}")

    def refuse(self, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
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
    return OmniConfig(
        thinker=thinker,
        talker=talker,
        code2wav=_code2wav(c.section("code2wav_config")) if speaks else None,
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


def _rope(c: _Section) -> RopeConfig:
    parameters = c.get("rope_parameters") or c.get("rope_scaling") or {}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    c.refuse("rope_type", rope_type, ("default",))
    theta = parameters.get("rope_theta")
    if theta is None:
        theta = c.first("rope_theta", "rope_parameters.rope_theta")
    section = parameters.get("mrope_section")
    return RopeConfig(float(theta), tuple(section) if section else None)


def _decoder(c: _Section, moe: MoeConfig | None) -> DecoderConfig:
    c.refuse("hidden_act", c.get("hidden_act", "silu"), ("silu",))
    c.refuse("attention_bias", c.get("attention_bias", False), (False,))
    c.refuse("sliding_window", c.get("sliding_window"), (None,))
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
    c.refuse("decoder_sparse_step", c.get("decoder_sparse_step", 1), (1,))
    c.refuse("mlp_only_layers", list(c.get("mlp_only_layers", [])), ([],))
    return MoeConfig(
        experts=c.first("num_experts", "num_local_experts"),
        experts_per_token=c["num_experts_per_tok"],
        expert_width=c["moe_intermediate_size"],
        normalize_weights=bool(c["norm_topk_prob"]),
        shared_expert_width=c.get("shared_expert_intermediate_size", 0),
    )


def _thinker(c: _Section) -> ThinkerConfig:
    text, audio = c.section("text_config"), c.section("audio_config")
    audio.refuse("activation_function", audio.get("activation_function", "gelu"), ("gelu",))
    audio.refuse("scale_embedding", audio.get("scale_embedding", False), (False,))
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
        audio_token_id=c["audio_token_id"],
        image_token_id=c["image_token_id"],
        video_token_id=c["video_token_id"],
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
    c.refuse("hidden_act", c.get("hidden_act", "silu"), ("silu",))
    c.refuse("attention_bias", c.get("attention_bias", False), (False,))
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
