"""Questions for tests of verification, and a look at a thinker's layers over any engines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.verification.alone import Seen
from qwen3_omni_neuron.verification.judgement import THINKER_PROMPTS, Difference
from qwen3_omni_neuron.verification.layers import Layers
from qwen3_omni_neuron.verification.questions import SOUND_RATE, Question, draw_picture
from qwen3_omni_neuron.verification.reference import read_reference
from qwen3_omni_neuron.verification.verify import look_by_layer
from testing.media_cases import QUESTION_WAV

STAGES = 15
"""Number of stages, where each has rows."""


def short_questions(sound_s: float = 1.0) -> list[Question]:
    """Return speech, an image, and text."""
    import soundfile

    sound, rate = soundfile.read(QUESTION_WAV, dtype="float32")
    assert rate == SOUND_RATE
    return [
        Question(sound=sound[: int(sound_s * SOUND_RATE)]),
        Question("What is six plus two?", picture=draw_picture()),
        Question("What colour is the sky?"),
    ]


def assert_layers_hold(
    omni: Qwen3Omni, plan: CompilePlan, reference: Path, build: Callable[[Path], Engines]
) -> None:
    """Search for a layer that differs, as if the logits alone did: all that are looked at hold.

    omni: the model, for its prompts. build: makes the engines of a checkpoint's folder, as the
    model's were made.
    """
    config = read_config(plan.model)
    about, answers = read_reference(reference, plan.model, config)

    @contextmanager
    def open_engines(folder: Path) -> Iterator[Engines]:
        engines = build(folder)
        yield engines
        engines.close()

    prompts = [omni.prompt_builder.prompt(answer.question.messages) for answer in answers]
    layers = Layers(plan, prompts, [answer.arrays for answer in answers], open_engines)
    count = config.thinker.text.layers
    stage = f"thinker's {count} layers, lm_head"
    wrong = Difference(stage, 1, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, graph=THINKER_PROMPTS)
    found = look_by_layer(layers, plan, about, answers, [wrong], Seen())
    assert found.differences
    assert [one for one in found.differences if not one.holds] == []
    assert found.first.startswith(f"thinker's layer {count}, the last norm")
