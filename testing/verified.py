"""Questions for tests of verification."""

from qwen3_omni_neuron.verification.reference import SOUND_RATE, Question, draw_picture
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
