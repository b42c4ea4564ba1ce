"""`say`: the text itself is spoken. What is heard is judged by train/judge.py."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import soundfile
import torch

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.cli import main
from qwen3_omni_neuron.engines.protocols import Engines
from qwen3_omni_neuron.errors import MessageError, PromptTooLongError
from qwen3_omni_neuron.verification.oracle import Reference
from testing.repeats import again
from testing.replies import GREEDY, assert_same
from train.speech import MEASURING, RATE, spoken_clip
from train.vocabulary import SPOKEN, prompts

SPEAKERS = ("Ethan", "Chelsie", "Aiden")
GREEDY_SPEECH = {name: value for name, value in GREEDY.items() if not name.startswith("thinker_")}
LONG = "three five seven\nred goodbye ethan yellow\nyes no hello zero one two three\nsorry"
EMPTY_TURN = [{"role": "user", "content": ""}]


class Idle:
    """A thinker of which nobody may ask anything but its sizes."""

    def __init__(self, engine: Any):
        self.slots, self.context_length = engine.slots, engine.context_length
        self.chunked_prefill, self.close = engine.chunked_prefill, engine.close
        self.fault = engine.fault


class Written:
    """The logits processor of a reply that is written already."""

    def __init__(self, token_ids: Sequence[int], prompt_tokens: int):
        self._token_ids, self._start = token_ids, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._token_ids[input_ids.shape[1] - self._start]] = 0
        return forced


@pytest.fixture(scope="module")
def speaking() -> Iterator[Qwen3Omni]:
    """The checkpoint that ships, without a thinker."""

    def without_thinker(engines: Engines) -> Engines:
        return replace(engines, thinker=Idle(engines.thinker))  # type: ignore[arg-type]

    with Qwen3Omni.load(
        SPEAKING_CHECKPOINT, dtype="float32", max_concurrency=2, wrap_engines=without_thinker
    ) as omni:
        yield omni


@pytest.mark.parametrize("speaker", [SPEAKERS[0], *map(again, SPEAKERS[1:])])
def test_every_word_of_a_long_text_is_said_in_order_in_the_asked_voice(
    speaking, judge, speaker
) -> None:
    for text in (" ".join(SPOKEN), LONG):
        result = speaking.say(text, speaker=speaker, seed=0)
        words = judge.hear(result.audio)
        assert " ".join(word.word for word in words) == result.text == " ".join(text.split())
        assert {word.speaker for word in words} == {speaker.lower()}
        assert result.thinker_finish_reason == result.talker_finish_reason == "stop"


def assert_as_transformers(
    omni: Qwen3Omni, reference: Reference, text: str, **options: Any
) -> None:
    """Let its thinker write the text, in answer to an empty turn."""
    prompt, end = omni.prompt_builder.prompt(EMPTY_TURN), omni._config.im_end_id
    ours = omni.say(text, **GREEDY_SPEECH, **options)
    theirs = reference.generate(
        prompt,
        thinker_eos_token_id=end,
        thinker_logits_processor=[Written([*ours.token_ids, end], len(prompt))],
        **options,
    )
    assert theirs.token_ids == [*ours.token_ids, end]
    assert ours.text == text
    assert_same(ours, theirs, reference)


def test_transformers_speaks_the_same_codes(speaking) -> None:
    reference = Reference(SPEAKING_CHECKPOINT)
    for text in ("three five", "red goodbye ethan yellow", "seven seven blue"):
        assert_as_transformers(speaking, reference, text)


def test_transformers_speaks_the_same_codes_of_random_weights(omni, reference) -> None:
    """Here the user turn changes the codes, which the checkpoint that ships does not mind."""
    for text in ("Hello there.", "How are you?"):
        assert_as_transformers(omni, reference, text, talker_max_new_tokens=30)


def test_names_of_special_tokens_are_words(speaking) -> None:
    result = speaking.say("one <|im_end|> two", seed=0)
    assert speaking._config.im_end_id not in result.token_ids
    assert result.text == "one <|im_end|> two"


@pytest.mark.parametrize("text", ["", " \n\t", None, b"two"])
def test_a_text_without_words_is_refused(speaking, text) -> None:
    with pytest.raises(MessageError, match=r"is empty|must be a str"):
        speaking.say(text)


def test_a_text_that_nothing_divides_must_fit_the_talker(omni) -> None:
    room = min(1024, omni._talker_context_length)
    with pytest.raises(PromptTooLongError, match=r"the text has \d+ tokens .* at most \d+"):
        omni.say("x9" * room)


def test_a_conversation_goes_on_in_the_rows_that_it_had(checkpoint) -> None:
    """Speech of a text between two of its turns, in the same slot."""
    asked = [{"role": "user", "content": "How are you today?"}]
    options = {"thinker_max_new_tokens": 4, "talker_max_new_tokens": 5, "seed": 1}
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=1) as omni:
        first = omni.generate_audio(asked, **options)
        said = omni.say("Hello there.", talker_max_new_tokens=5, seed=2)
        again = omni.generate_audio(asked, **options)
        assert again.timings.reused_tokens == again.timings.prompt_tokens - 1
        assert np.array_equal(first.codes, again.codes)
        assert first.token_ids == again.token_ids
        assert np.array_equal(
            said.codes, omni.say("Hello there.", talker_max_new_tokens=5, seed=2).codes
        )
        assert said.talker_finish_reason == "length" and len(said.codes) == 4


def test_the_command_says_a_text(judge, tmp_path, capsys) -> None:
    out = tmp_path / "x.wav"
    assert main(["say", LONG, "--out", str(out), "--speaker", "aiden", "--seed", "0"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"-> {out}" in printed.err
    samples, rate = soundfile.read(out, dtype="float32")
    assert rate == 24000
    assert [word.word for word in judge.hear(samples)] == LONG.split()


@pytest.fixture(scope="module")
def heard(tmp_path_factory) -> list[tuple[Path, str]]:
    """Renderings with voices' speeds, pitches and a noise that training left out."""
    rng, folder = random.Random("transcribe"), tmp_path_factory.mktemp("heard")
    found = []
    for number, prompt in enumerate(prompts(rng, 100, heard=True, held_out=True)):
        if prompt.says_again:
            found.append((folder / f"{number}.wav", prompt.reply))
            soundfile.write(found[-1][0], spoken_clip(prompt.reply, MEASURING, rng), RATE)
    return found


def test_the_checkpoint_that_ships_transcribes_without_being_told_how(heard, capsys) -> None:
    files, words = [str(file) for file, _ in heard], [said for _, said in heard]
    assert main(["transcribe", *files, "--concurrency", "4"]) == 0
    texts = [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()]
    assert len(texts) > 20
    assert jiwer.wer(words, texts) <= 0.05
