"""Compiled lengths: what is padded to one gives what it gives alone."""

import pytest
import torch

from qwen3_omni_neuron.engines.buckets import bucket_of
from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling
from qwen3_omni_neuron.errors import BucketError
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.prompt import Prompt
from testing.media_cases import IMAGE, audio, text, user, video
from testing.specs import cpu_engines, engine_spec

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
SPEAKER = 5
GREEDY = PredictorSampling(None, 50, 1.0)


@pytest.fixture(scope="module")
def exact(checkpoint, config) -> Engines:
    return cpu_engines(engine_spec(checkpoint))


@pytest.fixture(scope="module")
def bucketed(checkpoint, config) -> Engines:
    return cpu_engines(engine_spec(checkpoint, patch_buckets=(20, 40)))


def test_the_next_longer_bucket_is_taken() -> None:
    assert [bucket_of(n, (4, 8), "rows") for n in (1, 4, 5, 8)] == [4, 4, 8, 8]
    assert bucket_of(9, (), "rows") == 9
    with pytest.raises(BucketError, match="9 prompt rows, but the longest compiled bucket has 8"):
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
        engines.talker.prepare(1, prompt.talker, SPEAKER)
        steps.append(engines.talker.prefill(1, accepted, 9))
        engines.talker.predict([1], [3], [GREEDY])
        steps.append(engines.talker.step([1], [7]))
        spoken.append(steps)
    for theirs, ours in zip(*spoken, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_padded_frames_give_what_they_give_alone(exact, bucketed, checkpoint, config) -> None:
    prompt_builder = PromptBuilder(checkpoint, config)
    message = user(text("See"), IMAGE, audio(1.2), video(4, 2.0), text("and tell."))
    assert_alike(exact, bucketed, prompt_builder.prompt([message]))
