"""Given inputs of the decoders, and the logits over them.

Every model gets what float32 gives it, so that a difference is its own: the talker the accepted
rows of the float32 thinker, the code predictor the hidden states of the float32 talker.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.quantising.rounding import (
    ENCODERS,
    STORED,
    Choice,
    RelativeErrors,
    fill,
    kind_of,
    round_residual,
    stored_weights,
)
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.files import Checkpoint
from qwen3_omni_neuron.checkpoint.modules import Models, lay_out
from qwen3_omni_neuron.checkpoint.names import codec_embedding_pieces
from qwen3_omni_neuron.checkpoint.parameters import Part, put_parameter
from qwen3_omni_neuron.cpu.encoders import CpuAudio, CpuVision
from qwen3_omni_neuron.engines.media import MediaEncoders
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.engines.talker import TalkerEngine, TextRows
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig, TalkerConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache
from qwen3_omni_neuron.model.talker import TalkerModel, media_mask
from qwen3_omni_neuron.model.thinker import ThinkerModel
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder, patch_places
from qwen3_omni_neuron.prompt.prompt import Prompt, rope_positions
from testing.teacher_forcing import teacher_forced_logits

SPEAKERS = ("chelsie", "ethan", "aiden")
LIMITS: Any = {"thinker_max_new_tokens": 16, "talker_max_new_tokens": 100}
FRAMES_AT_ONCE = 256


@dataclass(frozen=True)
class Rows:
    """Inputs of a decoder for one sequence.

    rows: float32 [S, hidden]; positions: float32 [3, S]; wanted: int64 [n], indices of the rows
    after which the logits are compared.
    """

    rows: Tensor
    positions: Tensor
    wanted: Tensor


@dataclass(frozen=True)
class Reply:
    """A float32 reply. token_ids: with the end marker; codes: int64 [frames, 16]."""

    prompt: Prompt
    spoken: bool
    speaker: str
    token_ids: list[int]
    codes: Tensor


class Weights:
    """Modules of one checkpoint, with the rounding of a choice.

    tails: whether matrices get heavy tails.
    """

    def __init__(self, folder: Path, config: OmniConfig, tails: bool = False):
        self.config, self._checkpoint, self._tails = config, Checkpoint(folder), tails

    def thinker(self, choice: Choice, errors: RelativeErrors | None = None) -> ThinkerModel:
        """Return the thinker."""
        models, parts = lay_out(self.config, ("thinker",))
        self._fill("thinker", parts["thinker"], choice, errors)
        assert models.thinker is not None
        round_residual(models.thinker.decoder, choice)
        return models.thinker

    def thinker_matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the thinker's matrices that int8 rounds, bfloat16 [out, into], by their kind.

        A stack is yielded as one matrix.
        """
        part = lay_out(self.config, ("thinker",))[1]["thinker"]
        for target, stored in stored_weights(self._checkpoint, "thinker", part, self._tails):
            kind = kind_of("thinker", part.module, target)
            if kind is not None:
                yield kind, stored.flatten(0, -2)

    def encoders(self, choice: Choice, errors: RelativeErrors | None = None) -> MediaEncoders:
        """Return the media encoders."""
        audio, vision = self.encoder_modules(choice, errors)
        return MediaEncoders(self.config, CpuAudio(audio), CpuVision(vision), torch.float32)

    def encoder_modules(
        self, choice: Choice, errors: RelativeErrors | None = None
    ) -> tuple[AudioEncoder, VisionEncoder]:
        """Return the modules of both encoders."""
        models, parts = lay_out(self.config, ("thinker",))
        for name in ENCODERS:
            self._fill(name, parts[name], choice, errors)
        assert models.audio_encoder is not None and models.vision_encoder is not None
        return models.audio_encoder, models.vision_encoder

    def talker(self, choice: Choice, errors: RelativeErrors | None = None) -> TalkerModel:
        """Return the talker."""
        models, parts = lay_out(self.config, ("talker",))
        self._fill("talker", parts["talker"], choice, errors)
        assert models.talker is not None
        round_residual(models.talker.decoder, choice)
        return models.talker

    def predictor(self, choice: Choice, errors: RelativeErrors | None = None) -> Models:
        """Return models with the code predictor and its table of code 0."""
        models, parts = lay_out(self.config, ("talker",))
        self._fill("code_predictor", parts["code_predictor"], choice, errors)
        assert models.codec_embedding is not None and models.code_predictor is not None
        round_residual(models.code_predictor.decoder, choice)
        table = Part(models.codec_embedding, list(codec_embedding_pieces()), ())
        self._fill("codec_embedding", table, STORED)
        put_parameter(models.codec_embedding, "weight", models.codec_embedding.weight.float())
        return models

    def tables(self) -> Models:
        """Return models with what the talker's rows are made of, which no format rounds."""
        models = self.predictor(STORED)
        tables, parts = lay_out(self.config, ("talker",))
        for name in ("embedding", "text_projection", "hidden_projection"):
            self._fill(name, parts[name], STORED)
            setattr(models, name, getattr(tables, name))
        return models

    def _fill(
        self, name: str, part: Part, choice: Choice, errors: RelativeErrors | None = None
    ) -> None:
        weights = stored_weights(self._checkpoint, name, part, self._tails)
        fill(name, part.module, weights, choice, errors)


@torch.inference_mode()
def decoder_logits(
    decoder: ThinkerModel | TalkerModel, c: DecoderConfig, inputs: Sequence[Rows]
) -> tuple[Tensor, list[Tensor]]:
    """Run sequences through a thinker or a talker.

    Returns the logits of all wanted rows, [n, vocab], and of each sequence the second output of
    `prefill`: the thinker's accepted rows, or the talker's hidden states of the wanted rows.
    """
    logits, others = [], []
    for one in inputs:
        cache = PromptCache(KvCache.zeros(c, 1, len(one.rows), torch.float32))
        of_rows, other = decoder.prefill(one.rows, one.positions, one.wanted, cache)
        logits.append(of_rows)
        others.append(other)
    return torch.cat(logits), others


@torch.inference_mode()
def predictor_logits(models: Models, hidden: Tensor, codes: Tensor) -> Tensor:
    """Run frames through the code predictor over given codes. Returns [n * 15, vocab].

    hidden: [n, hidden]; codes: int64 [n, 16].
    """
    assert models.code_predictor is not None
    parts = zip(hidden.split(FRAMES_AT_ONCE), codes.split(FRAMES_AT_ONCE), strict=True)
    found = [teacher_forced_logits(models.code_predictor, h, c) for h, c in parts]
    return torch.cat(found).flatten(0, 1)


def random_inputs(weights: Weights, positions: int) -> tuple[Rows, Rows, Tensor]:
    """Draw inputs of the thinker and the talker, and frames int64 [positions, 16]."""
    config = weights.config
    assert config.talker is not None and config.code2wav is not None
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(min(config.im_start_id, 10_000), (positions,), generator=draw)
    size, groups = config.code2wav.codebook_size, config.code_groups
    codes = torch.randint(size, (positions, groups), generator=draw)
    models = weights.tables()
    assert models.embedding is not None and models.text_projection is not None
    with torch.inference_mode():
        thinker = models.embedding(ids).float()
        talker = models.text_projection(thinker) + feedback_of(models, codes)
    axes, every = rope_positions(positions), torch.arange(positions)
    return Rows(thinker, axes, every), Rows(talker, axes, every), codes


def feedback_of(models: Models, codes: Tensor) -> Tensor:
    """Return the sum of the embeddings of frames, [n, hidden]. codes: int64 [n, 16]."""
    assert models.codec_embedding is not None and models.code_predictor is not None
    rows = F.embedding(codes[:, 0], models.codec_embedding.weight)
    for group, table in enumerate(models.code_predictor.embedding, start=1):
        rows = rows + F.embedding(codes[:, group], table)
    return rows


def float32_replies(folder: Path, positions: int) -> tuple[list[Reply], int]:
    """Ask questions of train.assess, until replies have so many tokens and so many frames.

    They are sampled at the released settings. Returns them, and the token of a line break.
    """
    from train.assess import questions

    found: list[Reply] = []
    with Qwen3Omni.load(folder, dtype="float32", max_concurrency=1, reuse=False) as omni:
        for number, question in enumerate(questions(positions, 0)):
            speaker = SPEAKERS[number % len(SPEAKERS)]
            prompt = omni.prompt_builder.prompt(question.messages)
            result = omni.generate_audio(question.messages, speaker=speaker, seed=number, **LIMITS)
            codes = torch.from_numpy(result.codes)
            reply = Reply(prompt, question.spoken, speaker, result.token_ids, codes)
            found.append(reply)
            tokens, frames = (
                sum(len(x) for x in all_of)
                for all_of in ([r.token_ids for r in found], [r.codes for r in found])
            )
            if min(tokens, frames) >= positions:
                break
        return found, omni.prompt_builder.newline_id


@torch.inference_mode()
def encoded(config: OmniConfig, audio: AudioEncoder, vision: VisionEncoder) -> dict[str, Tensor]:
    """Return the rows [rows, width] of 8 s of noise and of an image of 256 random patches.

    Computed in the type of the modules' weights.
    """
    c, draw = config.thinker, torch.Generator().manual_seed(0)
    mel = torch.randn(1, c.audio.mel_bins, c.audio.window_mel_frames, generator=draw)
    valid = torch.ones(1, c.audio.tokens(c.audio.window_mel_frames), dtype=torch.bool)
    side = 16
    patches = torch.randn(1, side * side, c.vision.patch_values, generator=draw)
    places, grid = patch_places(side, side, c.vision.merge_size), torch.tensor((side, side))
    mel, patches = mel.to(audio.norm.weight.dtype), patches.to(vision.merger.norm.weight.dtype)
    return {
        "audio encoder": audio(mel, valid, c.audio.chunk_mel_frames)[0],
        "vision encoder": vision(patches, places, grid, torch.ones(side * side) > 0).flatten(0, 2),
    }


@torch.inference_mode()
def thinker_inputs(models: Models, encoders: MediaEncoders, replies: Sequence[Reply]) -> list[Rows]:
    """Return the thinker's rows of replies; the logits of each of their tokens are wanted."""
    assert models.embedding is not None
    found = []
    for reply in replies:
        prompt, after = reply.prompt, torch.tensor(reply.token_ids[:-1], dtype=torch.int64)
        rows = models.embedding(torch.cat((prompt.token_ids, after))).float()
        media = encoders.encode(prompt)
        if media is not None:
            rows[: len(prompt)][media.filled] = media.rows
        more = prompt.positions.max() + 1 + torch.arange(len(after))
        positions = torch.cat((prompt.positions, more.expand(3, -1)), 1)
        found.append(Rows(rows, positions, torch.arange(len(prompt) - 1, len(rows))))
    return found


@torch.inference_mode()
def talker_inputs(
    config: OmniConfig,
    models: Models,
    replies: Sequence[tuple[Reply, Tensor]],
    newline_id: int,
) -> list[Rows]:
    """Return the talker's rows of replies; the logits of each frame are wanted, and of the end.

    replies: each with the thinker's accepted rows [S, hidden], its prompt's first.
    """
    c = config.talker
    assert c is not None and models.embedding is not None
    assert models.text_projection is not None and models.hidden_projection is not None
    assert models.codec_embedding is not None
    width = c.text.hidden_size
    text = TextRows(models.embedding.weight.detach(), models.text_projection, width, torch.float32)
    found = []
    for reply, hidden in replies:
        decoder, given = RecordedRows(c), GivenFrames(models)
        table = models.codec_embedding.weight.detach()
        engine = TalkerEngine(
            config, decoder, given, table, text, models.hidden_projection, newline_id
        )
        ids = [token for token in reply.token_ids if token != config.im_end_id]
        later = [*ids[1:], config.tts_eos_id]
        later += [config.tts_pad_id] * (len(reply.codes) - len(later))
        engine.prepare(0, reply.prompt.talker, c.speaker_ids[reply.speaker])
        media = media_mask(reply.prompt.token_ids, config)
        engine.prefill(0, hidden[: len(media)][media], ids[0])
        for token, frame in zip(later, reply.codes, strict=False):
            given.frame = frame[None]
            engine.predict([0], [int(frame[0])], [PredictorSampling(None, 0, 1.0)])
            engine.step([0], [token])
        rows, positions = torch.cat(decoder.rows), torch.cat(decoder.positions, 1)
        wanted = torch.arange(len(reply.prompt.talker) - 1, len(rows))
        found.append(Rows(rows, positions, wanted))
    return found


class RecordedRows:
    """Decoder that computes nothing and keeps its rows; see engines.protocols.DecoderSlots."""

    slots, context_length, chunked_prefill = 1, 4096, True

    def __init__(self, c: TalkerConfig):
        self.rows: list[Tensor] = []
        self.positions: list[Tensor] = []
        self._nothing = torch.zeros(1, c.text.vocab_size), torch.zeros(1, c.text.hidden_size)

    def prefill(
        self, slot: int, rows: Tensor, positions: Tensor, *, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        self.rows, self.positions = [rows], [positions]
        return self._nothing

    def copy(self, source: int, target: int, rows: int) -> None:
        raise NotImplementedError

    def clear(self, slot: int) -> None:
        raise NotImplementedError

    def step(self, slots: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        self.rows.append(rows)
        self.positions.append((self.positions[-1].max() + 1).expand(3, 1))
        return self._nothing


class GivenFrames:
    """Code predictor whose frame is set before each call; see engines.protocols.Predictor."""

    def __init__(self, models: Models):
        self._models = models
        self.frame = torch.empty(0)

    def predict(
        self,
        slots: Sequence[int],
        code0: Sequence[int],
        sampling: Sequence[PredictorSampling],
        hidden: Tensor,
        feedback: Tensor,
    ) -> Tensor:
        feedback[list(slots)] = feedback_of(self._models, self.frame)
        return self.frame
