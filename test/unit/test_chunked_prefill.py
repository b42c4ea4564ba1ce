"""Prompts in pieces on the CPU: what a slot holds is computed once, and the rest as if whole."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen3_omni_neuron.cpu.precision import PRECISIONS, library_for
from qwen3_omni_neuron.engines.protocols import PredictorSampling
from qwen3_omni_neuron.engines.talker import TalkerEngine
from qwen3_omni_neuron.engines.thinker import ThinkerEngine
from qwen3_omni_neuron.model.audio_encoder import AudioEncoder
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.talker import media_mask
from qwen3_omni_neuron.model.vision_encoder import VisionEncoder
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.prompt import Prompt, TalkerPrompt
from testing.media_cases import assistant, audio, image, text, user, video
from testing.specs import cpu_engines, engine_spec

CONTEXT = 640
GREEDY = PredictorSampling(None, 50, 1.0)
TOKENS = (70, 71, 72)
SPEAKER = 1

# Audio of three windows, whose last is not whole; an image; a video with the audio that belongs to
# it; and a clip whose chunk is narrower than a second.
EVERYTHING = [
    {"role": "system", "content": "Be brief."},
    user(audio(17.3), text("Who says that?"), image(96, 64, 1)),
    assistant("Nobody."),
    user(video(6, 2.0, 2.4), text("And this?"), image(64, 64, 2), audio(0.7)),
]
SHORT_CLIPS = [user(audio(0.4), audio(0.7), audio(0.3, 500.0), text("Which is the longest?"))]
FRAMES = [user(video(4, 2.0), video(6, 1.0, size=96), text("What happens?"))]
WORDS = [{"role": "system", "content": "Be brief."}, user(text("What is a slot?"))]
CONVERSATIONS = {
    "everything": EVERYTHING,
    "short-clips": SHORT_CLIPS,
    "frames": FRAMES,
    "words": WORDS,
}


@dataclass(frozen=True)
class Made:
    """Engines of one dtype. exact: whether they compute in C."""

    config: OmniConfig
    thinker: ThinkerEngine
    talker: TalkerEngine
    dtype: str
    exact: bool

    def media_before(self, prompt: Prompt | TalkerPrompt, row: int) -> int:
        """Count the media rows before a row."""
        return int(media_mask(prompt.token_ids[:row], self.config).sum())

    def assert_alike(self, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        """Compare to the bit in C; in torch as closely as the dtype lets other sums be."""
        off = 0.0 if self.exact else {"float64": 1e-9}.get(self.dtype, 1e-4)
        for mine, other in zip(got, expected, strict=True):
            if self.dtype == "bfloat16":  # a router may choose otherwise, for a row here and there
                assert mine.shape == other.shape
                distance = (mine - other).abs().float().sum()
                assert distance <= 0.05 * other.abs().float().sum()
            else:
                torch.testing.assert_close(mine, other, atol=off, rtol=off)


def engines_of(checkpoint: Path, dtype: str, **settings: Any) -> Made:
    spec = engine_spec(
        checkpoint, dtype=dtype, max_concurrency=3, context_length=CONTEXT, **settings
    )
    engines = cpu_engines(spec)
    assert isinstance(engines.thinker, ThinkerEngine) and isinstance(engines.talker, TalkerEngine)
    exact = library_for(dtype) is not None
    return Made(spec.config, engines.thinker, engines.talker, dtype, exact)


@pytest.fixture(scope="module", params=list(PRECISIONS))
def made(request, checkpoint) -> Made:
    return engines_of(checkpoint, request.param)


@pytest.fixture(scope="module")
def prompts(checkpoint, config) -> dict[str, Prompt]:
    prompt_builder = PromptBuilder(checkpoint, config)
    return {name: prompt_builder.prompt(c, True) for name, c in CONVERSATIONS.items()}


def first_rows(prompt: Prompt, rows: int) -> Prompt:
    """The first rows of a prompt, with all of its media."""
    return replace(prompt, token_ids=prompt.token_ids[:rows], positions=prompt.positions[:, :rows])


def thought(engine: ThinkerEngine, slot: int, prompt: Prompt, cuts: Sequence[int]) -> list[Tensor]:
    """Logits and accepted rows of a prompt in pieces after `cuts`, and logits of later steps.

    cuts: the first one is the number of rows that the slot holds already.
    """
    accepted = []
    for start, stop in pairwise((*cuts, len(prompt))):
        logits, rows = engine.prefill(slot, first_rows(prompt, stop), start)
        accepted.append(rows)
    return [logits, torch.cat(accepted), *(engine.step([slot], [token]) for token in TOKENS)]


def held(engine: ThinkerEngine, slot: int, rows: int) -> list[Tensor]:
    """Keys and values of a slot's first rows."""
    cache = engine._decoder._cache
    return [t[:, slot, :, :rows].clone() for t in (cache.keys, cache.values)]


def random_cuts(rows: int, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    return sorted(random.choice(np.arange(1, rows), random.integers(1, 7), replace=False).tolist())


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.diagonal
def test_a_prompt_in_pieces_is_the_whole(made, prompts, name) -> None:
    prompt = prompts[name]
    expected = thought(made.thinker, 0, prompt, [0])
    cache = held(made.thinker, 0, len(prompt) + len(TOKENS))
    row_by_row = [list(range(1, len(prompt)))] if name == "words" else []
    for cuts in (*(random_cuts(len(prompt), seed) for seed in range(4)), *row_by_row):
        made.assert_alike(thought(made.thinker, 1, prompt, [0, *cuts]), expected)
        made.assert_alike(held(made.thinker, 1, len(prompt) + len(TOKENS)), cache)


def test_a_slot_that_is_cut_back_is_as_a_fresh_one(made, prompts) -> None:
    """It was cut back after steps, to rows that another prompt shares, wherever they end."""
    prompt = prompts["everything"]
    for kept in (3, 100, 150, len(prompt) - 20):
        other = replace(prompt, token_ids=prompt.token_ids.clone())
        words = (~media_mask(prompt.token_ids, made.config)).nonzero().flatten()
        other.token_ids[words[words >= kept]] += 1
        expected = thought(made.thinker, 0, other, [0])
        thought(made.thinker, 1, prompt, [0])
        got = thought(made.thinker, 1, other, [kept])
        accepted = expected[1][made.media_before(prompt, kept) :]
        made.assert_alike(got, [expected[0], accepted, *expected[2:]])


def test_a_copied_slot_goes_on_as_its_source(made, prompts) -> None:
    prompt = prompts["everything"]
    expected = thought(made.thinker, 0, prompt, [0])
    thought(made.thinker, 2, prompts["words"], [0])
    rows = len(prompt) + len(TOKENS)
    before = held(made.thinker, 0, rows), held(made.thinker, 2, len(prompts["words"]))
    for copied in (1, 120, len(prompt) - 1):
        thought(made.thinker, 1, prompts["frames"], [0])
        made.thinker.copy(0, 1, copied)
        got = thought(made.thinker, 1, prompt, [copied])
        accepted = expected[1][made.media_before(prompt, copied) :]
        made.assert_alike(got, [expected[0], accepted, *expected[2:]])
    after = held(made.thinker, 0, rows), held(made.thinker, 2, len(prompts["words"]))
    for mine, other in zip(after, before, strict=True):
        torch.testing.assert_close(mine, other, atol=0, rtol=0)


@dataclass
class Encoded:
    """Counts of what the encoders were given."""

    windows: int = 0
    frames: int = 0


@pytest.fixture
def encoded(monkeypatch) -> Encoded:
    count = Encoded()
    hear, see = AudioEncoder.transform, VisionEncoder.forward

    def audio_transform(self: AudioEncoder, convolved: Tensor, valid: Tensor) -> Tensor:
        count.windows += len(valid)
        return hear(self, convolved, valid)

    def vision_forward(self: VisionEncoder, patches: Tensor, *rest: Any) -> Tensor:
        count.frames += len(patches)
        return see(self, patches, *rest)

    monkeypatch.setattr(AudioEncoder, "transform", audio_transform)
    monkeypatch.setattr(VisionEncoder, "forward", vision_forward)
    return count


def test_only_windows_and_frames_with_a_row_of_the_piece_are_encoded(
    checkpoint, config, prompts, encoded
) -> None:
    """Pieces begin and end where units do."""
    prompt, c = prompts["everything"], config.thinker
    units = rows_of_units(prompt, config)
    thinker = engines_of(checkpoint, "float32").thinker
    marks = sorted({0, len(prompt), *(edge for rows in units for edge in (rows[0], rows[-1] + 1))})
    thinker.prefill(0, prompt)
    for start, stop in pairwise(marks):
        encoded.windows = encoded.frames = 0
        thinker.prefill(0, first_rows(prompt, stop), start)
        inside = [rows for rows in units if any(start <= row < stop for row in rows)]
        windows = sum(prompt.token_ids[rows[0]] == c.audio_token_id for rows in inside)
        assert encoded == Encoded(int(windows), len(inside) - int(windows)), (start, stop)


def rows_of_units(prompt: Prompt, config: OmniConfig) -> list[list[int]]:
    """The rows of each window and each frame."""
    c, units = config.thinker, []
    sizes: dict[int, list[int]] = {
        c.audio_token_id: [
            c.audio.tokens(window.shape[1])
            for clip in prompt.audio_mel
            for window in clip.split(c.audio.window_mel_frames, 1)
        ]
    }
    for token_id, visuals in ((c.image_token_id, prompt.images), (c.video_token_id, prompt.videos)):
        sizes[token_id] = [
            rows * columns // c.vision.merge_size**2
            for frames, rows, columns in (visual.grid for visual in visuals)
            for _ in range(frames)
        ]
    for token_id, of_kind in sizes.items():
        rows = (prompt.token_ids == token_id).nonzero().flatten()
        units += [part.tolist() for part in rows.split(of_kind)]
    return units


def accepted_of(made: Made, prompt: Prompt) -> Tensor:
    """Accepted rows, each another, in the order of the talker's media rows."""
    count = made.media_before(prompt.talker, len(prompt.talker))
    width = made.config.thinker.text.hidden_size
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, width, generator=generator).to(made.talker._codec_rows.dtype)


def spoken(made: Made, slot: int, logits: Tensor) -> list[Tensor]:
    """Return the first logits, then codes and logits of three frames: not in bfloat16."""
    given = [logits]
    for token in TOKENS if made.dtype != "bfloat16" else ():
        codes = made.talker.predict([slot], [int(given[-1][0, :60].argmax())], [GREEDY])
        given += [codes, made.talker.step([slot], [token])]
    return given


def answered(made: Made, slot: int, prompt: Prompt, start: int) -> list[Tensor]:
    """Prepare and prefill a talker's slot from a user row on, and speak three frames."""
    accepted = accepted_of(made, prompt)[made.media_before(prompt.talker, start) :]
    made.talker.prepare(slot, prompt.talker, SPEAKER, start)
    return spoken(made, slot, made.talker.prefill(slot, accepted, 65))


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.diagonal
def test_a_talkers_prompt_in_pieces_is_the_whole(made, prompts, name) -> None:
    """The slot held another reply; media are in all pieces, or not in the last one."""
    prompt = prompts[name]
    rows, accepted = len(prompt.talker.token_ids), accepted_of(made, prompt)
    expected = answered(made, 0, prompt, 0)
    for seed in range(4):
        answered(made, 1, prompts["frames"], 0)
        cuts = [0, *random_cuts(rows, seed)]
        if seed == 3:
            cuts.append(rows)
        for start, stop in pairwise(cuts):
            piece = accepted[: made.media_before(prompt.talker, stop)]
            piece = piece[made.media_before(prompt.talker, start) :]
            made.talker.prefill_chunk(1, prompt.talker.first(stop), start, piece)
        made.assert_alike(answered(made, 1, prompt, cuts[-1]), expected)


def test_a_copied_talkers_slot_goes_on_as_its_source(made, prompts) -> None:
    prompt = prompts["everything"]
    expected = answered(made, 0, prompt, 0)
    for copied in (10, 240, len(prompt.talker.token_ids)):
        answered(made, 2, prompts["frames"], 0)
        made.talker.prepare(2, prompts["frames"].talker, SPEAKER)  # and is never completed
        made.talker.copy(0, 2, copied)
        made.assert_alike(answered(made, 2, prompt, copied), expected)
