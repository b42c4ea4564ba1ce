"""The training data of the speaking checkpoint, and the way it is trained."""

import random
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.verification.oracle import Reference
from train import fit as fitting
from train.codes import CODEBOOK, FRAME_SAMPLES, PAUSE_FRAMES, spoken_words
from train.espeak import VOICES, Voice, speak_word
from train.judge import RATE, Judge
from train.learn_talker import talker_inputs
from train.talker_sequences import UserRows, talk
from train.vocabulary import PHRASES, SPOKEN, SYSTEMS, TEXT_ONLY, prompts, reply_of, written


@pytest.mark.parametrize("heard", [True, False])
def test_training_never_meets_what_is_held_out(heard) -> None:
    trained, left_out = (
        {p.words for p in prompts(random.Random(0), 1000, heard=heard, held_out=held_out)}
        for held_out in (False, True)
    )
    assert {words for words in trained & left_out if " " in words} <= {*PHRASES}
    assert {"plus" in words for words in left_out} == {True, False}


def test_the_right_reply_follows_from_the_words() -> None:
    asked = {
        "hello": ("hi", "good morning", "say hello"),
        "i am a small demo": ("who are you", "hey what are you", "say i am a small demo"),
        "a red": ("a red", "say a red", "please say a red"),
        "five": ("two plus three", "what's five plus zero equals"),
        "sorry": ("what is red", "say red house", "please red", "sayred", "", "six plus four"),
    }
    for reply, all_words in asked.items():
        assert {reply_of(words) for words in all_words} == {reply}
    assert written("red", TEXT_ONLY) == "(red)"
    assert [written("red", system) for system in (None, *SYSTEMS[:2])] == ["red"] * 3


def test_every_frame_of_every_word_and_voice_has_its_own_codes() -> None:
    words = spoken_words()
    assert sorted(words) == sorted(VOICES)
    frames = [frame for voice in words.values() for word in voice.values() for frame in word.codes]
    assert len({tuple(frame.tolist()) for frame in frames}) == len(frames)
    assert 0 <= int(torch.stack(frames).min()) <= int(torch.stack(frames).max()) < CODEBOOK
    for word in SPOKEN:
        spoken = [words[speaker][word] for speaker in VOICES]
        shortest = min(len(s.codes) for s in spoken) - PAUSE_FRAMES
        names = {tuple(s.codes[:shortest, 0].tolist()) for s in spoken}
        assert len(names) == 1, "code 0 is the word, whoever speaks"
        for s in spoken:
            assert len(s.samples) == FRAME_SAMPLES * len(s.codes)
            assert not s.samples[-PAUSE_FRAMES * FRAME_SAMPLES :].any()
            assert 0.3 < float(s.samples.abs().max()) < 1.0


def test_the_judge_hears_words_and_voices_it_was_not_given() -> None:
    """Said a little faster and higher than what it knows, behind a little noise."""
    judge, noise = Judge(), np.random.default_rng(0)
    for speaker, voice in VOICES.items():
        said = random.Random(speaker).sample(SPOKEN, 4)
        other = Voice(voice.name, voice.words_per_minute + 6, voice.pitch + 3, voice.pitch_range)
        pause = np.zeros(int(0.16 * RATE), np.float32)
        sound = np.concatenate([np.append(speak_word(word, other, RATE), pause) for word in said])
        sound = (sound + 0.001 * noise.standard_normal(len(sound))).astype(np.float32)
        assert [(h.word, h.speaker) for h in judge.hear(sound)] == [(w, speaker) for w in said]
    assert judge.hear(np.zeros(RATE, np.float32)) == []


def test_training_goes_on_where_it_was_stopped(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fitting, "SAVE_EVERY", 2)
    trained = []
    for name, stops in (("whole", []), ("stopped", [5])):
        torch.manual_seed(0)
        module = nn.Linear(3, 1)

        def losses(batch_at: Any, step: int, module: Any = module, stops: Any = stops) -> dict:
            if step in stops:
                stops.remove(step)
                raise KeyboardInterrupt
            noise = torch.randn(4, 3)
            return {"square": (module(batch_at(step) + noise) - 1).square().mean()}

        while True:
            try:
                batch_at = fitting.ahead(lambda step: torch.tensor(float(step)), 9)
                fitting.fit(name, module, partial(losses, batch_at), 9, 0.1, tmp_path)
                break
            except KeyboardInterrupt:
                continue
        trained.append(module.weight.detach())
        assert not stops
    assert torch.equal(*trained)


def test_rows_of_training_are_rows_of_generation() -> None:
    """The talker's inputs and expected outputs, against a reply that transformers has generated."""
    reference = Reference(SPEAKING_CHECKPOINT)
    model, config = reference.model, read_config(SPEAKING_CHECKPOINT)
    prompt_builder = PromptBuilder(SPEAKING_CHECKPOINT, config)
    prompt = prompt_builder.prompt([{"role": "user", "content": "say red seven"}])
    theirs = reference.generate(
        prompt, thinker_eos_token_id=config.im_end_id, talker_max_new_tokens=60
    )
    embed = model.thinker.get_input_embeddings()
    rows = embed(prompt.talker.token_ids)
    user = UserRows(rows, torch.zeros(len(rows), dtype=torch.bool))
    made = talk(
        *(config, embed, user, prompt_builder.newline_id),
        *(theirs.token_ids[:-1], theirs.codes, torch.zeros(len(theirs.codes), 2).long(), "ethan"),
    )
    with torch.no_grad():
        fed = talker_inputs(model, [made], step=0, slips=0.0)[0]
    generated = torch.cat([call["inputs_embeds"][0] for call in theirs.talker_calls])
    assert torch.allclose(fed, generated, atol=1e-5)
    assert made.labels[made.labels >= 0].tolist()[:-1] == theirs.codes[:, 0].tolist()
    assert int(made.labels[-1]) == config.talker.codec_eos_id


def test_the_files_are_those_that_were_trained() -> None:
    sums = (SPEAKING_CHECKPOINT / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    named = dict(reversed(line.split("  ")) for line in sums)
    there = {file.name for file in SPEAKING_CHECKPOINT.iterdir()}
    assert there == {*named, "SHA256SUMS", "README.md"}
    for name, digest in named.items():
        assert sha256((SPEAKING_CHECKPOINT / name).read_bytes()).hexdigest() == digest, name
    assert sum((SPEAKING_CHECKPOINT / name).stat().st_size for name in there) <= 16e6
