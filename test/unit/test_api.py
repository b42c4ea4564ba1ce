"""The public face: what is refused, with what words, and what stays usable after."""

import json
import pydoc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen3_omni_neuron import Finished, Qwen3Omni, generate_audio
from qwen3_omni_neuron.errors import LateError, MessageError, OptionError, PromptTooLongError
from qwen3_omni_neuron.options import GenerateArguments, LoadOptions
from qwen3_omni_neuron.runtime.stage import Stage

HELLO = [{"role": "user", "content": "Hello"}]
# Greedy code 0: a sampled one might end the speech, by a chance that differs between machines.
SHORT = {"thinker_max_new_tokens": 2, "talker_max_new_tokens": 3, "talker_do_sample": False}


def test_a_wrong_option_is_refused_at_once(omni) -> None:
    for options, said in (
        ({"speaker": "Bob"}, "unknown speaker 'Bob'. This checkpoint has Aiden, Chelsie, Ethan"),
        ({"speaker": 3}, "speaker must be a name"),
        ({"thinker_temprature": 1.0}, "Did you mean thinker_temperature"),
        ({"voice": "Ethan"}, "unknown option 'voice'. Did you mean speaker\\? Options: speaker"),
        ({"temperature": 1.0}, "Did you mean thinker_temperature"),
        ({"max_tokens": 9}, "Did you mean thinker_max_new_tokens"),
        ({"thinker_max_new_tokens": 0}, "an integer of 1 or more, got 0"),
        ({"talker_max_new_tokens": -4}, "an integer of 1 or more, got -4"),
        ({"talker_max_new_tokens": 2.5}, "an integer of 1 or more, got 2.5"),
        ({"talker_temperature": 0.0}, "talker_temperature must be a number from 1e-09 to"),
        ({"thinker_temperature": float("nan")}, "thinker_temperature must be a number from 1e-09"),
        ({"predictor_top_p": 0.0}, "predictor_top_p must be a number from 1e-09 to 1, got"),
        ({"talker_top_p": 1.5}, "to 1, got 1.5"),
        ({"talker_top_k": -1}, "an integer from 0 to 2147483647, got -1"),
        ({"seed": -1}, "seed must be an integer of 0 or more"),
        ({"talker_do_sample": 1}, "must be True or False"),
        ({"thinker_top_k": True}, "an integer from 0 to 2147483647, got True"),
        ({"talker_repetition_penalty": "high"}, "must be a number from 1e-09 to .*, got 'high'"),
        ({"thinker_eos_token_id": [-1]}, "must be a token id"),
        ({"chunk_frames": []}, "must be a list of sizes in frames"),
        ({"chunk_frames": 4}, "must be a list of sizes in frames"),
        ({"chunk_frames": [1, 0]}, "must be a list of sizes in frames"),
        ({"chunk_frames": [1, 3]}, "has 3, and the vocoder decodes chunks of 1, 2, 4, 8, 16, 25"),
        ({"first_token_timeout_s": 0}, "first_token_timeout_s must be a number above 0"),
        ({"speaker": None}, "speaker must be a name, got None"),
        ({"wait_timeout_s": -1.0}, "wait_timeout_s must be a number above 0"),
    ):
        with pytest.raises(OptionError, match=said):
            omni.stream(HELLO, **options)


def test_a_wrong_argument_of_load_is_refused(checkpoint) -> None:
    for options, said in (
        ({"target": "gpu"}, "target must be cpu, neuron or torchneuron, got 'gpu'"),
        ({"dtype": "int3"}, "dtype must be auto, mixed"),
        ({"dtype": torch.int32}, "dtype must be auto, mixed, .* got 'int32'"),
        ({"device": "cpu"}, "unknown option 'device'. Did you mean target"),
        ({"torch_dtype": "auto"}, "Did you mean dtype"),
        ({"max_concurrency": 0}, "max_concurrency must be an integer of 1 or more"),
        ({"max_queued": -1}, "max_queued must be an integer of 0 or more"),
        ({"context_length": 10**6}, "context_length must be an integer from 2 to 4096 for"),
        ({"context_length": 1}, "context_length must be an integer from 2 to 4096 for"),
    ):
        with pytest.raises(OptionError, match=said):
            Qwen3Omni.load(checkpoint, **options)


@pytest.mark.parametrize("over", [-1, 0])
def test_a_prompt_may_fill_the_cache_but_for_one_position(checkpoint, over) -> None:
    with Qwen3Omni.load(checkpoint, context_length=40, max_concurrency=1) as omni:
        prompt = len(omni.prompt_builder.prompt(HELLO))
        filler = [{"role": "user", "content": "Hello" + "z" * (40 - prompt + over)}]
        if over == 0:
            with pytest.raises(PromptTooLongError, match="has 40 tokens"):
                omni.stream(filler)
            return
        result = omni.generate_audio(filler, talker_max_new_tokens=3, talker_do_sample=False)
    assert len(result.token_ids) == 1
    assert len(result.codes) == 2


def test_a_deadline_that_passes_is_raised_by_name(omni) -> None:
    with pytest.raises(LateError, match=r"no first token after 1e-09 s; the thinker"):
        omni.generate_audio(HELLO, first_token_timeout_s=1e-9)
    assert len(omni.generate_audio(HELLO, **SHORT).codes) == 2


def test_generate_audio_refuses_a_wrong_option_before_the_load(tmp_path) -> None:
    for wrong, said in (({"device": "cpu"}, "you mean target"), ({"seed": -1}, "seed must be")):
        with pytest.raises(OptionError, match=said):
            generate_audio(HELLO, tmp_path / "nothing", **wrong)


def test_the_help_of_generate_audio_has_its_options_and_an_example(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = pydoc.plaintext.document(generate_audio)
    assert all(f"    {name}: " in shown for name in GenerateArguments.__annotations__)
    example = "\n".join(line.strip() for line in shown.splitlines() if "result" in line)
    exec(f"from qwen3_omni_neuron import *\n{example}")
    assert (tmp_path / "five.wav").exists()


def test_a_model_is_made_by_load_and_takes_torchs_dtypes(checkpoint) -> None:
    with pytest.raises(TypeError, match=r"Use Qwen3Omni\.load\(model_path\)"):
        Qwen3Omni(checkpoint)  # type: ignore[call-arg, arg-type]
    assert LoadOptions.parse({"dtype": torch.bfloat16}).dtype == "bfloat16"
    with Qwen3Omni.load(checkpoint, dtype=torch.float32) as omni:
        assert omni.generate_audio(HELLO, **SHORT).timings.frames == 2


def test_a_load_answers_once_and_does_not_count_it(checkpoint, monkeypatch) -> None:
    calls = {}
    reset = Stage.reset_time

    def note(stage: Stage[Any]) -> None:
        calls[stage.name] = stage.time.calls
        reset(stage)

    monkeypatch.setattr(Stage, "reset_time", note)
    with Qwen3Omni.load(checkpoint) as omni:
        assert calls["thinker"] > 1 and calls["talker"] > 1 and calls["vocoder"] > 0
        assert not any(time.calls or time.busy_s for time in omni.status().stages.values())


def test_generate_audio_loads_speaks_and_closes(checkpoint) -> None:
    assert len(generate_audio(HELLO, checkpoint, dtype="float32", **SHORT).audio) == 2 * 1920 - 555


def test_a_checkpoint_in_a_precision_that_is_not_run_says_what_to_pass(
    checkpoint, tmp_path
) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["dtype"] = "float16"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        OptionError, match="is in float16, which is not supported; load it with dtype"
    ):
        Qwen3Omni.load(tmp_path)


def test_without_a_talker_there_is_text_and_a_clear_no(checkpoint, tmp_path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "text-only"))
    raw = json.loads((folder / "config.json").read_text())
    raw["enable_audio_output"] = False
    (folder / "config.json").write_text(json.dumps(raw))
    with Qwen3Omni.load(folder, max_concurrency=1) as omni:
        assert len(omni.generate_text(HELLO, thinker_max_new_tokens=3, seed=0).token_ids) == 3
        with pytest.raises(OptionError, match="has no talker"):
            omni.generate_audio(HELLO)


def test_a_text_is_asked_as_one_message_of_the_user(omni) -> None:
    expected = omni.generate_audio(HELLO, seed=1, **SHORT)
    given = omni.generate_audio("Hello", seed=1, **SHORT)
    assert given.codes.tolist() == expected.codes.tolist()
    assert given.timings.prompt_tokens == expected.timings.prompt_tokens
    assert omni.count_tokens("Hello") == omni.count_tokens(HELLO) == given.timings.prompt_tokens
    assert omni.generate_text("Hello", seed=1, thinker_max_new_tokens=2).text == expected.text
    *_, last = omni.stream_text("Hello", seed=1, thinker_max_new_tokens=2)
    assert isinstance(last, Finished)
    assert last.result.token_ids == expected.token_ids
    with omni.session(messages="Hello", seed=1) as session:
        assert session.messages == HELLO
        *_, last = session.respond(**SHORT)
        assert isinstance(last, Finished)
        assert last.result.codes.tolist() == expected.codes.tolist()


def test_an_empty_text_is_refused(omni) -> None:
    blank = [{"role": "user", "content": [{"type": "text", "text": " "}]}]
    for messages in (blank, [*HELLO, {"role": "assistant", "content": "Hi"}, *blank]):
        with pytest.raises(MessageError, match=rf"messages\[{len(messages) - 1}\] is blank"):
            omni.generate_text(messages)
    for ask in (omni.stream, omni.generate_text, lambda text: omni.session(messages=text)):
        with pytest.raises(MessageError, match="the text to answer is empty"):
            ask(" \n")
