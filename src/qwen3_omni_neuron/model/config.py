"""Configuration of a checkpoint, read by checkpoint.config_json."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

ASSISTANT_ROWS = 9
"""Rows of the talker's prompt after the user's: see model.talker."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. mrope_section: numbers of frequencies for time, height and width."""

    theta: float
    mrope_section: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts, and the talker's shared one (shared_expert_width 0: none).

    static: for graphs of static shapes. int8: routed experts are int8, with a float32 scale per
    output.
    """

    experts: int
    experts_per_token: int
    expert_width: int
    normalize_weights: bool
    shared_expert_width: int
    static: bool = False
    int8: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """Decoder of the thinker, talker or code predictor. moe: None for a dense feed-forward."""

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
    """Audio encoder: convolutions over 1 s chunks, attention inside 8 s windows."""

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
        """Tokens of a whole window: 13 per chunk of 100 mel frames, 8 chunks."""
        chunks = self.window_mel_frames // self.chunk_mel_frames
        return self.tokens(self.chunk_mel_frames) * chunks

    def tokens(self, mel_frames: int) -> int:
        """Count a clip's tokens: whole chunks and the rest, each halved three times."""
        chunks, rest = divmod(mel_frames, self.chunk_mel_frames)
        return chunks * _halved_thrice(self.chunk_mel_frames) + _halved_thrice(rest)


def _halved_thrice(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


@dataclass(frozen=True)
class VisionEncoderConfig:
    """Vision encoder: patches of 16 x 16 pixels of two images, attention inside a frame.

    patch_values: numbers per patch. positions_per_side: side of the square of learned positions.
    deepstack_layers: indices of layers whose outputs are added to the thinker's first layers.
    """

    hidden_size: int
    layers: int
    heads: int
    ffn_width: int
    patch_values: int
    merge_size: int
    output_size: int
    positions_per_side: int
    rope_theta: float
    deepstack_layers: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.heads


@dataclass(frozen=True)
class ThinkerConfig:
    """Thinker: text decoder, encoders, and the ids of media tokens.

    positions_per_second: time positions per second of video.
    """

    text: DecoderConfig
    audio: AudioEncoderConfig
    vision: VisionEncoderConfig
    audio_token_id: int
    image_token_id: int
    video_token_id: int
    positions_per_second: float

    @property
    def media_token_ids(self) -> tuple[int, int, int]:
        """Ids of the tokens for audio, images and video in a prompt."""
        return self.audio_token_id, self.image_token_id, self.video_token_id


@dataclass(frozen=True)
class TalkerConfig:
    """Talker: decoder over codec tokens, code predictor, and the codec's own ids."""

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
        """Codec ids never sampled: the last 1024, except codec_eos."""
        vocab = self.text.vocab_size
        return tuple(i for i in range(vocab - 1024, vocab) if i != self.codec_eos_id)


@dataclass(frozen=True)
class Code2WavConfig:
    """Vocoder: 16 codes a frame in, 1920 samples a frame out."""

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
        """Width of one attention head."""
        return self.hidden_size // self.heads

    @cached_property
    def frame_inputs(self) -> int:
        """Inputs of the decoder blocks per frame: 2 * 2 = 4."""
        return prod(self.upsampling_ratios)

    @cached_property
    def frame_samples(self) -> int:
        """Samples of a frame: 4 * 8 * 5 * 4 * 3 = 1920."""
        return self.frame_inputs * prod(self.upsample_rates)

    @cached_property
    def latency_samples(self) -> int:
        """Samples by which N frames fall short of N * frame_samples (released: 555).

        A decoder block returns rate * (n - 1) for n inputs. The deficit grows: 8, 8 * 5 + 5 = 45,
        45 * 4 + 4 = 184, 184 * 3 + 3 = 555.
        """
        deficit = 0
        for rate in self.upsample_rates:
            deficit = deficit * rate + rate
        return deficit


@dataclass(frozen=True)
class OmniConfig:
    """Whole checkpoint; talker and code2wav are None if text-only."""

    thinker: ThinkerConfig
    talker: TalkerConfig | None
    code2wav: Code2WavConfig | None
    dtype: str
    im_start_id: int
    im_end_id: int
    user_id: int
    assistant_id: int
    tts_pad_id: int
    tts_bos_id: int
    tts_eos_id: int

    @property
    def code_groups(self) -> int:
        """Codes per frame; 0 if the checkpoint can't speak."""
        return self.talker.code_groups if self.talker else 0


@dataclass(frozen=True)
class GenerationDefaults:
    """Settings in generation_config.json, with transformers' sampling defaults.

    The last five are this package's. transcription_instruction: text that, after an audio, asks for
    its transcript; empty if the audio alone does; None if not defined. reply_tokens: maximum of
    tokens to speak at a time; None: any. turns_by_silence: end-of-turn models misjudge the learned
    speech. introduction: text before the first question. questions: examples.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    transcription_instruction: str | None = None
    reply_tokens: int | None = None
    turns_by_silence: bool = False
    introduction: str = ""
    questions: tuple[str, ...] = ()
