"""Makes the same calls to two engines, whose outputs must agree."""

from collections.abc import Sequence
from functools import partial

import torch

from qwen3_omni_neuron.engines.protocols import Engines, PredictorSampling, Thinker
from qwen3_omni_neuron.prompt.prompt import Prompt

ATOL = 1e-4
assert_close = partial(torch.testing.assert_close, atol=ATOL, rtol=0.0)
GREEDY = PredictorSampling(None, 50, 1.0)
SPEAKER = 5


def assert_prefills_alike(ours: Thinker, theirs: Thinker, slot: int, prompt: Prompt) -> int:
    """Compare logits and accepted hidden states. Returns the most probable token."""
    logits, accepted = theirs.prefill(slot, prompt)
    expected, expected_accepted = ours.prefill(slot, prompt)
    assert_close(logits, expected)
    assert_close(accepted, expected_accepted)
    assert int(logits.argmax()) == int(expected.argmax())
    return int(expected.argmax())


def assert_steps_alike(
    ours: Thinker, theirs: Thinker, slots: Sequence[int], tokens: Sequence[int], steps: int
) -> list[int]:
    """Compare greedy steps after `tokens`. Returns the last tokens."""
    for step in range(steps):
        logits, expected = theirs.step(slots, tokens), ours.step(slots, tokens)
        assert_close(logits, expected)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist(), f"step {step}"
        tokens = expected.argmax(-1).tolist()
    return list(tokens)


def assert_speaks_alike(
    ours: Engines, theirs: Engines, slot: int, prompt: Prompt, frames: int
) -> None:
    """Compare the talkers' frames after a prompt, each with its own thinker's hidden states."""
    spoken = []
    for engines in (ours, theirs):
        assert engines.talker is not None
        _, accepted = engines.thinker.prefill(slot, prompt)
        engines.talker.prepare(slot, prompt.talker, SPEAKER)
        logits = engines.talker.prefill(slot, accepted, 9)
        codes, all_logits = [], [logits]
        for frame in range(frames):
            code0 = int(logits.argmax())
            codes.append(engines.talker.predict([slot], [code0], [GREEDY])[0].tolist())
            logits = engines.talker.step([slot], [7 + frame])
            all_logits.append(logits)
        spoken.append((codes, torch.cat(all_logits)))
    assert spoken[1][0] == spoken[0][0]
    assert_close(spoken[1][1], spoken[0][1])
