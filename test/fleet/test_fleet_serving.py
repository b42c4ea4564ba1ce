"""The tests of `serve` by OpenAI's client, through Ray: the same questions have the same answers.

`make test-ray`. Three replicas of the tiny checkpoint, and three of the one that ships under a
prefix of their own.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from qwen3_omni_neuron import Qwen3Omni
from testing.imports import ROOT

if "TEST_RAY" not in os.environ:
    pytest.skip("a Ray cluster of its own", allow_module_level=True)

pytest.register_assert_rewrite("test_serving", "test_serving_audio", "test_realtime")
sys.path.insert(0, str(ROOT / "test" / "integration"))
import test_serving  # noqa: E402
import test_serving_audio  # noqa: E402
from test_realtime import (  # noqa: E402, F401
    caller,
    test_a_written_reply,
    test_instructions_options_and_voice,
)
from test_serving import (  # noqa: E402, F401
    test_a_prompt_that_grows_is_computed_from_where_it_is_new,
    test_a_streamed_wav_has_one_header,
    test_a_wrong_request_is_refused_in_openais_shape,
    test_an_earlier_turn_may_be_named_by_its_audio,
    test_eight_clients_at_once_get_what_each_gets_alone,
    test_media_are_the_same_as_in_the_api,
    test_sampling_options_reach_the_model,
    test_speech_in_every_format_is_the_apis,
    test_streamed_speech_is_the_apis_with_its_parts_in_order,
    test_text_is_the_apis,
    test_text_of_a_request_forges_no_turn,
    test_usage_and_reason_are_the_results,
    test_vllm_omnis_clients_read_text_and_whole_wav_files,
    test_what_there_is_to_ask_for,
)
from test_serving_audio import (  # noqa: E402, F401
    judge,
    said,
    test_a_bad_form_is_a_400_that_says_why,
    test_a_spoken_sum_is_answered_aloud,
    test_a_transcription_is_what_transcribe_finds,
    test_a_wrong_request_for_a_transcription_names_what_is_wrong,
    test_a_wrong_request_for_speech_names_what_is_wrong,
    test_every_word_is_said_in_each_voice,
    test_instruction_and_temperature_reach_the_model,
    test_speech_in_every_format_is_what_say_says,
    test_streamed_speech_is_the_whole_one,
    test_what_is_said_is_transcribed,
)

from testing.ray_cluster import Cluster, cluster  # noqa: E402

assert (test_serving.MODEL, test_serving_audio.MODEL) == ("qwen3-omni", "qwen3-omni")


@pytest.fixture(scope="module")
def fleet(checkpoint: Path) -> Iterator[Cluster]:
    with cluster() as made:
        common: dict[str, Any] = {"dtype": "float32", "model_name": "qwen3-omni"}
        made.deploy("speaking", 3, "/speaking", max_concurrency=4, **common)
        limits = {"max_body_bytes": 700_000, "max_media_bytes": 600_000, "max_media_s": 20.0}
        made.deploy("tiny", 3, model=str(checkpoint), max_concurrency=3, **common, **limits)
        for name in ("speaking", "tiny"):
            made.wait_for(name, 3)
        yield made


@pytest.fixture(scope="module")
def server(fleet: Cluster) -> Any:
    return fleet.server("qwen3-omni")


@pytest.fixture(scope="module")
def client(fleet: Cluster, omni: Qwen3Omni) -> Iterator[OpenAI]:
    with fleet.client() as made:
        yield made


@pytest.fixture(scope="module")
def speaking(fleet: Cluster) -> Iterator[OpenAI]:
    with fleet.client("/speaking") as made:
        yield made


