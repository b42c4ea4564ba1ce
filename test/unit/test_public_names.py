"""The public surface: names, options, flags and file formats that other people's code depends on.

A change here is a change of the public interface: it belongs into CHANGELOG.md, too.
"""

import argparse
import json
from dataclasses import fields
from pathlib import Path

import pytest

import qwen3_omni_neuron
from qwen3_omni_neuron import Qwen3Omni, cli, errors, events
from qwen3_omni_neuron.compilation import manifest
from qwen3_omni_neuron.options import LOAD_OPTIONS, REQUEST_OPTIONS, LoadOptions, RequestOptions
from qwen3_omni_neuron.serving.settings import SETTINGS
from qwen3_omni_neuron.session import Session

PACKAGE = """
    AudioChunk Finished Qwen3Omni Qwen3OmniError SPEAKING_CHECKPOINT SpeechResult TextDelta
    Timings __version__ generate_audio
"""
METHODS = """
    checkpoint_fingerprint close compile_grammar count_tokens generate_audio generate_text info
    load media_settings restore_session say session speakers status stream stream_continuation
    stream_echo stream_speech stream_text transcribe transcription_instruction turns_by_silence
"""
SESSION = """
    append append_audio clear close commit document heard insert messages prepare read remove
    respond restore save set_options system turns
"""
LOAD = """
    model_path target dtype max_concurrency context_length max_queued reuse placement
    compiled_path instance cores threads predictor_dtype adapters wrap_engines
"""
OPTIONS = """
    speaker seed use_audio_in_video thinker_max_new_tokens thinker_eos_token_id thinker_do_sample
    thinker_temperature thinker_top_k thinker_top_p thinker_min_p thinker_repetition_penalty
    thinker_presence_penalty thinker_frequency_penalty thinker_min_new_tokens ignore_eos stop
    tools tool_choice parallel_tool_calls grammar logprobs top_logprobs literal_text truncation
    talker_max_new_tokens talker_do_sample talker_temperature talker_top_k talker_top_p
    talker_repetition_penalty predictor_do_sample predictor_top_k predictor_top_p chunk_frames
    first_chunk runaway_speech cache_key owner first_token_timeout_s wait_timeout_s
"""
RESULTS = {
    "SpeechResult": "text token_ids codes audio sample_rate thinker_finish_reason "
    "talker_finish_reason timings seed logprobs top_logprobs warnings",
    "Timings": "queued_s ttft_s ttfb_s total_s audio_s rtf prompt_tokens reused_tokens text_tokens "
    "frames prompt_audio_tokens prompt_image_tokens speech_s "
    "slow_stage",
    "TextDelta": "text token_ids logprobs top_logprobs",
    "AudioChunk": "samples first_sample frames",
    "Finished": "result",
    "ModelInfo": "speakers thinks takes_tools slots max_queued context_length "
    "introduction questions",
    "Status": "running queued stages fault",
    "StageTime": "calls busy_s call_s",
}
RESULT_METHODS = ["play", "save"]
ERRORS = """
    ArtifactError AudioError BucketError BusyError CheckpointError ClosedError CompileError
    EngineDiedError EngineError ForkError GrammarError ImageError InputError LateError
    MessageError NotInstalledError OptionError OutputError PromptTooLongError Qwen3OmniError
    StoredSessionError ToolCallError VideoError
"""
# Those that no option makes; documents have tables of the options.
VERBS = {
    "verify": "--against --device --help --model --write -h",
    "speak": "--audio --help --image --json --model --out --play --quiet --system --video -h text",
    "say": "--help --json --model --out --play --quiet -h text",
    "transcribe": """
        --concurrency --help --instruction --json --max-new-tokens --model --quiet -h files
    """,
    "serve": "--help --log-format --log-level --model --ray -h",
    "compile": """
        --audio-windows --batches --buckets --decode-buckets --dry-run --help --json --lnc --model
        --only --opt-level --out --patch-buckets --projection-rows --quiet --talker-context-length
        --tp -h
    """,
    "inspect": "--help --json --verify -h folder",
    "doctor": "--help --json -h",
}
GRAPH_RECORD = "name bucket inputs outputs state"


def test_public_names_of_the_package_are_those_listed_here() -> None:
    assert sorted(qwen3_omni_neuron.__all__) == PACKAGE.split()
    assert all(hasattr(qwen3_omni_neuron, name) for name in PACKAGE.split())
    assert sorted(name for name in dir(Qwen3Omni) if not name.startswith("_")) == METHODS.split()
    assert sorted(name for name in dir(Session) if not name.startswith("_")) == SESSION.split()
    methods = (name for name, value in vars(events.SpeechResult).items() if callable(value))
    assert sorted(name for name in methods if not name.startswith("_")) == RESULT_METHODS


def test_options_of_load_and_of_a_request() -> None:
    assert ["model_path", *(field.name for field in fields(LoadOptions))] == LOAD.split()
    assert [field.name for field in fields(RequestOptions)] == OPTIONS.split()


@pytest.mark.parametrize("name", RESULTS)
def test_fields_of_events_results_and_status(name) -> None:
    assert [field.name for field in fields(getattr(events, name))] == RESULTS[name].split()


def test_error_classes_are_those_listed_here() -> None:
    found = (v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception))
    assert sorted(error.__name__ for error in found) == ERRORS.split()


def test_verbs_and_flags_are_those_listed_here() -> None:
    made = (*REQUEST_OPTIONS, *LOAD_OPTIONS.values(), *SETTINGS.values())
    options = {option.flag for option in made}
    (verbs,) = (
        action
        for action in cli.make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    found = {
        verb: sorted(
            flag
            for action in parser._actions
            if action.help != argparse.SUPPRESS  # a flag of an earlier version, which is refused
            for flag in action.option_strings or [action.dest]
            if flag not in options
        )
        for verb, parser in verbs.choices.items()
    }
    listed = {verb: flags.split() for verb, flags in VERBS.items()}
    assert sorted(found) == sorted(listed)
    for verb, flags in found.items():
        new, gone = set(flags) - set(listed[verb]), set(listed[verb]) - set(flags)
        assert not new, f"{verb} has {', '.join(sorted(new))}, which VERBS does not list"
        assert not gone, f"{verb} lacks {', '.join(sorted(gone))}, which VERBS lists"


def test_keys_of_a_manifest_and_of_a_record(tmp_path) -> None:
    """The files' keys are older than the names of the fields."""
    graph = manifest.GraphRecord("run", {}, {}, {}, {})
    model = manifest.ModelRecord((graph,), {"a": manifest.FileRecord(1, "0")}, 0.5)
    manifest.write_manifest(tmp_path, manifest.Manifest("f", {}, {}, {"audio": model}))
    manifest.write_record(tmp_path, manifest.Origin("f", {}, {}), model)
    written = json.loads((tmp_path / manifest.MANIFEST_FILE).read_text())
    record = json.loads((tmp_path / manifest.RECORD_FILE).read_text())
    assert list(written) == ["schema", "fingerprint", "plan", "versions", "adapters", "graphs"]
    assert list(written["graphs"]["audio"]) == ["calls", "files", "seconds"]
    assert list(written["graphs"]["audio"]["calls"][0]) == GRAPH_RECORD.split()
    assert list(record) == ["made_from", "calls", "files", "seconds"]


def test_the_package_is_typed() -> None:
    assert (Path(qwen3_omni_neuron.__file__).parent / "py.typed").exists()
