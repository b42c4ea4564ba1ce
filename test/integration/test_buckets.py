"""Compiled lengths: a prompt that is padded to one gives what it gives alone."""

from pathlib import Path

import pytest
import torch

from qwen3_omni_neuron.checkpoint.modules import Models
from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.kv_cache import KvCache, PromptCache, SlotCache
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.positions import rope_positions
from qwen3_omni_neuron.prompt.prompt import Prompt
from testing.media_cases import IMAGE, audio, text, user, video
from testing.prompts import prompt_of
from testing.specs import cpu_engines, engine_spec

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
BUCKET = 48
SPEAKER = 5
GREEDY = PredictorSampling(None, 50, 1.0)


@pytest.fixture(scope="module")
def exact(checkpoint: Path, config: OmniConfig) -> Engines:
    return cpu_engines(engine_spec(checkpoint))


@pytest.fixture(scope="module")
def bucketed(checkpoint: Path, config: OmniConfig) -> Engines:
    buckets = {"prompt_buckets": (BUCKET, 2 * BUCKET), "patch_buckets": (20, 40)}
    return cpu_engines(engine_spec(checkpoint, **buckets))


def test_the_next_longer_bucket_is_taken() -> None:
    assert [bucket_of(n, (4, 8), "rows") for n in (1, 4, 5, 8)] == [4, 4, 8, 8]
    assert bucket_of(9, (), "rows") == 9
    with pytest.raises(BucketError, match="9 prompt rows, and the longest compiled bucket holds 8"):
        bucket_of(9, (4, 8), "prompt rows")


def assert_alike(exact: Engines, bucketed: Engines, prompt: Prompt) -> None:
    """Thinker and talker, the prompt and a few steps after it."""
    logits, accepted = exact.thinker.prefill(1, prompt)
    padded, padded_accepted = bucketed.thinker.prefill(1, prompt)
    torch.testing.assert_close(padded, logits, **CLOSE)
    torch.testing.assert_close(padded_accepted, accepted, **CLOSE)
    spoken = []
    for engines in (exact, bucketed):
        steps = [engines.thinker.step([1], [token]) for token in (5, 6)]
        assert engines.talker is not None
        engines.talker.prepare(1, prompt.talker, SPEAKER)
        steps.append(engines.talker.prefill(1, accepted, 9))
        engines.talker.predict([1], [3], [GREEDY])
        steps.append(engines.talker.step([1], [7]))
        spoken.append(steps)
    for theirs, ours in zip(*spoken, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("rows", [BUCKET - 1, BUCKET, BUCKET + 1])
def test_a_prompt_at_the_edge_of_a_bucket(exact: Engines, bucketed: Engines, rows: int) -> None:
    assert_alike(exact, bucketed, prompt_of(torch.arange(rows) + 1))


def test_a_prompt_longer_than_all_buckets_takes_the_whole_cache(
    exact: Engines, bucketed: Engines
) -> None:
    assert_alike(exact, bucketed, prompt_of(torch.arange(2 * BUCKET + 1) + 1))


def test_a_prompt_with_media_in_buckets(
    exact: Engines, bucketed: Engines, checkpoint: Path, config: OmniConfig
) -> None:
    prompt_builder = PromptBuilder(checkpoint, config)
    message = user(text("See"), IMAGE, audio(1.2), video(4, 2.0), text("and tell."))
    assert_alike(exact, bucketed, prompt_builder.prompt([message]))


@torch.no_grad()
@pytest.mark.parametrize("part", ["thinker", "talker"])
def test_nothing_in_the_padding_of_a_prompt_matters(
    models: Models, config: OmniConfig, part: str
) -> None:
    """Garbage behind the last row, in rows and positions, changes neither its logits nor those of
    the steps that follow."""
    model = getattr(models, part)
    c = config.thinker.text if part == "thinker" else config.talker.text
    rows = torch.randn(20, c.hidden_size, generator=torch.Generator().manual_seed(3))
    positions, last = rope_positions(20), torch.tensor([11])
    clean = KvCache.zeros(c, 1, 32, torch.float32)
    dirty = KvCache.zeros(c, 1, 32, torch.float32)
    expected = model.prefill(rows[:12], positions[:, :12], last, PromptCache(clean))
    garbage, far = rows.clone(), positions.clone()
    garbage[12:], far[:, 12:] = 1e3, 777.5
    padded = model.prefill(garbage, far, last, PromptCache(dirty))
    torch.testing.assert_close(padded[0], expected[0], **CLOSE)
    torch.testing.assert_close(padded[1][:12], expected[1], **CLOSE)
    inputs = torch.tensor([4, 5]) if part == "thinker" else rows[12:14]
    for step in (12, 13):
        at = torch.tensor([step])
        stepped = [
            model.decode(
                inputs[step - 12 : step - 11],
                at.float(),
                SlotCache(cache.window(step + 1), torch.tensor([0]), at),
            )
            for cache in (clean, dirty)
        ]
        torch.testing.assert_close(stepped[1], stepped[0], **CLOSE)
