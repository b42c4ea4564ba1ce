"""The checkpoint that ships speaks through target torchneuron in bfloat16, judged by the ear."""

from pathlib import Path

import pytest

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.neuron.torchneuron.build import build_engines
from testing.torchneuron.runtime import StandIn, omni_over, weights_for_stand_in
from train.assess import Reply, questions, replies
from train.espeak import VOICES
from train.judge import Judge

QUESTIONS = {"bfloat16": 1, "int8": 2}  # seeds, by the dtype of the experts
EACH = 4


def spoken(dtype: str, folder: Path) -> list[Reply]:
    """Ask a model whose weights are in `folder` its questions."""
    spec = weights_for_stand_in(
        SPEAKING_CHECKPOINT,
        folder,
        dtype=dtype,
        max_concurrency=1,
        batches=(1,),
        talker_context_length=256,
    )
    engines = Engines.of(build_engines(spec, runtime=StandIn(captures=False)))
    with omni_over(engines, spec) as omni:
        return replies(omni, Judge(), questions(EACH, seed=QUESTIONS[dtype]), seeds=[0])


@pytest.mark.repeats  # of test_torchneuron_engines.py, in bfloat16 and with words to hear
def test_questions_it_never_met_are_answered_in_the_asked_voice(tmp_path: Path) -> None:
    """Activations, other weights and KV cache in bfloat16, as on a device; experts in either.

    One may be wrong: the checkpoint answers 98 % right, and another processor rounds otherwise.
    """
    found = [reply for dtype in QUESTIONS for reply in spoken(dtype, tmp_path / dtype)]
    wrong = [
        (r.question.reply, r.text, r.recognised, r.speaker, r.voices, r.ended)
        for r in found
        if not r.right
    ]
    assert len(wrong) <= 1, wrong
    assert {r.speaker for r in found} == set(VOICES)
    assert any(r.text_only for r in found)
    assert any(r.question.spoken for r in found)
