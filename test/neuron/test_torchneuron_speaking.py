"""The checkpoint that ships speaks through target torchneuron in bfloat16, judged by the ear."""

from pathlib import Path

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.neuron.torchneuron.build import build_engines
from testing.torchneuron.runtime import StandIn, omni_over, weights_for_stand_in
from train.assess import figures, questions, replies
from train.judge import Judge


def test_questions_it_never_met_are_answered_in_the_asked_voice(tmp_path: Path) -> None:
    """Activations, weights and KV cache in bfloat16, as on a device; test_speaking.py's limits."""
    spec = weights_for_stand_in(
        SPEAKING_CHECKPOINT,
        tmp_path,
        dtype="bfloat16",
        max_concurrency=1,
        batches=(1,),
        talker_context_length=256,
    )
    engines = Engines.of(build_engines(spec, runtime=StandIn(caches=False)))
    with omni_over(engines, spec) as omni:
        found = replies(omni, Judge(), questions(12, seed=1), seeds=[0])
    shares = figures(found)
    wrong = [
        (r.question.reply, r.text, r.recognised, r.speaker, r.voices) for r in found if not r.right
    ]
    assert len(wrong) <= 1, wrong
    assert shares.ended == shares.unspoken == 1.0
    assert shares.right_voice > 0.97
