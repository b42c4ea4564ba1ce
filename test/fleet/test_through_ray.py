"""Replicas in a real Ray cluster: `make test-ray`.

Two applications, of the tiny checkpoint on two replicas and, under a prefix, of the one that ships
on three. First the tests of `serve` by OpenAI's client, through Ray: the same questions have the
same answers. Then sessions, failures under load, draining, and cores.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from openai import OpenAI
from websockets.exceptions import ConnectionClosed

from qwen3_omni_neuron import Qwen3Omni
from testing.imports import ROOT

if "TEST_RAY" not in os.environ:
    pytest.skip("a Ray cluster of its own", allow_module_level=True)

pytest.register_assert_rewrite(
    "test_realtime",
    "test_serving",
    "test_serving_audio",
    "test_serving_responses",
    "test_serving_transcriptions",
    "test_serving_words",
)
sys.path.insert(0, str(ROOT / "test" / "integration"))
from test_realtime import (  # noqa: E402, F401
    LONG,
    test_a_written_reply,
    test_instructions_options_and_voice,
)
from test_serving import (  # noqa: E402, F401
    test_a_wrong_request_is_refused_in_openais_shape,
    test_an_earlier_turn_may_be_named_by_its_audio,
    test_eight_clients_at_once_get_what_each_gets_alone,
    test_media_are_the_same_as_in_the_api,
    test_models_and_voices_are_listed_and_others_not_found,
    test_sampling_options_reach_the_model,
    test_streamed_speech_is_the_apis_with_its_parts_in_order,
    test_text_of_a_request_forges_no_turn,
    test_usage_and_reason_are_the_results,
    test_vllm_omnis_clients_read_text_and_whole_wav_files,
)
from test_serving_audio import (  # noqa: E402, F401
    said,
    test_a_wrong_request_for_speech_names_what_is_wrong,
    test_speech_in_every_format_is_what_say_says,
    test_streamed_speech_is_the_whole_one,
)
from test_serving_responses import (  # noqa: E402, F401
    test_media_are_those_of_a_chat,
)
from test_serving_transcriptions import (  # noqa: E402, F401
    test_a_bad_form_is_a_400_that_says_why,
    test_a_transcription_is_what_transcribe_finds,
    test_a_wrong_request_for_a_transcription_names_what_is_wrong,
    test_instruction_and_temperature_reach_the_model,
)
from test_serving_words import (  # noqa: E402, F401
    test_a_spoken_sum_is_answered_aloud,
    test_every_word_is_said_in_each_voice,
    test_what_is_said_is_transcribed,
)

from testing import http_client  # noqa: E402
from testing.fleet_load import ERRORS, RETRIES, Load, cut, failed, wrong  # noqa: E402
from testing.http_server import wait_until  # noqa: E402
from testing.ray_cluster import EVERY_S, START_S, Cluster, cluster  # noqa: E402
from testing.realtime import calling  # noqa: E402
from train.judge import Judge  # noqa: E402

NAME, PREFIX, MODEL = "speaking", "/speaking", "qwen3-omni"
ARGS: dict[str, Any] = {"dtype": "float32", "model_name": MODEL}
DRAIN_S = 3.0
SESSIONS = 8  # and slots of a replica: rows of all of them are kept, wherever they are
SPEAKING = {**ARGS, "max_concurrency": SESSIONS, "drain_timeout_s": DRAIN_S}
# From a death to the error of its last stream: half a second, and more on a busy machine. If nobody
# cut it, the client would wait for twice as long.
CUT_S = 30.0
ANSWERS = 24  # of the load, before something is done


@pytest.fixture(scope="module")
def omni(checkpoint) -> Iterator[Qwen3Omni]:
    """The same as in other tests, without the oracle beside it: no test here asks transformers."""
    with Qwen3Omni.load(checkpoint, dtype="float32", max_concurrency=3) as omni:
        yield omni


@pytest.fixture(scope="module")
def fleet(checkpoint) -> Iterator[Cluster]:
    with cluster() as made:
        limits = {"max_body_bytes": 700_000, "max_media_bytes": 600_000, "max_media_s": 20.0}
        made.plan("tiny", 2, model=str(checkpoint), max_concurrency=3, **ARGS, **limits)
        made.deploy(NAME, 3, PREFIX, **SPEAKING)
        made.wait_for("tiny", 2)
        made.wait_for(NAME, 3)
        yield made


@pytest.fixture(scope="module")
def server(fleet) -> Any:
    return fleet.server(MODEL)


@pytest.fixture(scope="module")
def client(fleet, omni) -> Iterator[OpenAI]:
    with fleet.client() as made:
        yield made


@pytest.fixture(scope="module")
def speaking(fleet) -> Iterator[OpenAI]:
    with fleet.client(PREFIX) as made:
        yield made


def scale(fleet: Cluster, replicas: int, **args: Any) -> None:
    fleet.deploy(NAME, replicas, PREFIX, **SPEAKING, **args)


def more(load: Load, count: int = ANSWERS) -> None:
    """Wait until the load has so many more answers."""
    wanted = len(load.answers) + count
    wait_until(lambda: len(load.answers) >= wanted, START_S)


def ask(client: OpenAI, session: str, turns: list[Any], **options: Any) -> Any:
    """The next turn of a session: text, reused tokens, replica."""
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=turns,
        seed=0,
        max_completion_tokens=16,
        extra_headers={"x-session-id": session},
        extra_body=options,
    )
    parsed = answer.parse()
    usage = parsed.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return parsed.choices[0].message.content, cached, answer.headers["x-replica"]


def test_a_response_is_found_by_its_id_alone(client) -> None:
    for number in range(6):
        asked: Any = {"model": MODEL, "max_output_tokens": 2}
        first = client.responses.create(**asked, input=f"question {number}")
        assert len(first.id) == len("resp_") + 64
        second = client.responses.create(**asked, input="Why?", previous_response_id=first.id)
        assert second.id[-32:] == first.id[-32:]
        assert client.responses.retrieve(second.id).output_text == second.output_text
        client.responses.delete(first.id)


def test_a_session_stays_where_its_rows_are_until_its_replica_dies(fleet) -> None:
    with fleet.client(PREFIX, retries=RETRIES) as client:
        homes, turns_of, rows = {}, {}, {}
        for number in range(SESSIONS):
            session, turns = f"session {number}", list[Any]()
            found = []
            for words in (f"say {'red ' * number}blue", "what is two plus four", "hello"):
                turns.append({"role": "user", "content": words})
                text, cached, replica = ask(client, session, turns)
                turns.append({"role": "assistant", "content": text})
                found.append((cached, replica))
            assert len({replica for _, replica in found}) == 1
            assert found[0][0] < found[1][0] < found[2][0]
            homes[session], turns_of[session], rows[session] = found[0][1], turns, found[1][0]
        assert len(set(homes.values())) > 1  # they are spread
        dying = homes["session 0"]
        fleet.kill(NAME, dying)
        said_then = {}
        for session, turns in turns_of.items():
            turns.append({"role": "user", "content": "say three five"})
            said_then[session], cached, replica = ask(client, session, turns)
            if homes[session] == dying:
                assert replica != dying
                assert cached < rows[session]  # no more than what all conversations begin with
            else:
                assert replica == homes[session]
                assert cached > rows[session]
        for session, turns in turns_of.items():
            text, cached, _ = ask(client, f"new {session}", turns, cache_key=session)
            assert (text, cached) == (said_then[session], 0)
    fleet.wait_for(NAME, 3)


def test_all_replicas_figures_are_in_one_scrape(fleet) -> None:
    names = set(fleet.replicas(NAME))

    def shown() -> bool:
        answer = http_client.ask(f"http://127.0.0.1:{fleet.figures_port}/metrics")
        lines = answer.body.decode().splitlines()
        busy = [line for line in lines if line.startswith("ray_qwen3_omni_stage_busy_seconds")]
        return all(
            any(f'replica="{name}"' in line and f'stage="{stage}"' in line for line in busy)
            for name in names
            for stage in ("thinker", "talker", "vocoder")
        )

    wait_until(shown, 60, EVERY_S)


def endless(client: OpenAI) -> tuple[Iterator[Any], str]:
    """Return a streamed reply of minutes of speech, of which a piece has come, and its replica.

    It is more than the buffers on its way hold, so that it goes on until it is read or cut.
    """
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        modalities=["text", "audio"],
        audio={"voice": "Ethan", "format": "pcm16"},
        stream=True,
        extra_body=LONG,
    )
    stream = iter(answer.parse())
    next(stream)
    return stream, answer.headers["x-replica"]


def test_a_death_and_a_drain_under_load_lose_no_request(fleet, capsys) -> None:
    """Three replicas, one killed and one drained.

    One client goes on from the beginning to the end. The others rest while a replica starts, which
    takes several times as long beside them.
    """

    def load(clients: int) -> Load:
        return Load(lambda: fleet.client(PREFIX, retries=RETRIES), clients)

    with load(1) as one:
        with load(15) as killed:
            more(killed)
            before = set(fleet.replicas(NAME))
            with fleet.client(PREFIX) as client:
                stream, replica = endless(client)
                killed_s = fleet.kill(NAME, replica)
                with pytest.raises(ERRORS):
                    list(stream)
                assert time.monotonic() - killed_s < CUT_S
            more(killed)
        fleet.wait_for_new(NAME, before)
        fleet.wait_for(NAME, 3)
        recovery_s = time.monotonic() - killed_s
        more(one, 3)
        with load(15) as drained:
            more(drained)
            scale(fleet, 2)
            fleet.wait_for(NAME, 2)
            more(drained)
    answers = [*one.answers, *killed.answers, *drained.answers]
    assert not failed(answers)
    assert not cut(drained.answers)  # a drain ends no stream
    dead_s = [answer.ended_s - killed_s for answer in cut(answers)]
    assert all(0 < after_s < CUT_S for after_s in dead_s), dead_s
    assert not wrong(answers, Judge(), sample=24)
    last_s = max(dead_s, default=0.0)
    figures = f"""
{len(answers)} answers; {len(dead_s)} streams cut by a death, the last after {last_s:.2f} s
a new replica after {recovery_s:.1f} s, under load
"""
    with capsys.disabled():
        sys.stdout.write(figures)


def test_two_applications_have_cores_of_their_own(fleet) -> None:
    fleet.plan("two", 1, "/two", **ARGS, neuron_cores=6)
    fleet.deploy("one", 1, "/one", **ARGS, neuron_cores=8)
    fleet.wait_for("one", 1)
    fleet.wait_for("two", 1)
    cores = [*fleet.cores("one"), *fleet.cores("two")]
    assert [len(own) for own in cores] == [8, 6]
    assert len(set().union(*cores)) == 14


def test_a_drain_tells_open_sessions_and_ends_them_in_time(fleet) -> None:
    server = fleet.server(MODEL, PREFIX)
    with calling(server) as idle, calling(server) as busy:
        busy.update(**LONG, seed=14)  # 3999 frames, where others have fifty
        busy.write("Hello")
        busy.send("response.create")
        busy.until("response.output_audio.delta")
        fleet.remove(NAME)
        assert idle.until("error")[-1].error.code == "server_draining"
        with pytest.raises(ConnectionClosed) as closed:
            idle.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        while busy.next().type != "error":
            pass
        told_s, later = time.monotonic(), []
        with pytest.raises(ConnectionClosed):
            while True:
                later.append(busy.next().type)
        assert "response.output_audio.delta" in later, "it goes on for a while"
        assert "response.done" not in later
        assert time.monotonic() - told_s < DRAIN_S + CUT_S


def test_the_command_line_serves_what_a_yaml_says(fleet, tmp_path) -> None:
    """Last: the cluster has only the applications of that YAML then, and none when it ends."""
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "cpu.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = fleet.port
    (application,) = config["applications"]
    application["deployments"][0]["num_replicas"] = 1
    file = tmp_path / "one.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "qwen3_omni_neuron", "serve", "--ray", str(file)]
    process = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": fleet.address})
    try:
        wait_until(lambda: application["name"] in fleet.names(), START_S, EVERY_S)
        fleet.wait_for(application["name"], 1)
        with fleet.client() as client:
            (model,) = client.models.list()
            asked: Any = {"model": model.id, "messages": [{"role": "user", "content": "hello"}]}
            assert client.chat.completions.create(**asked).choices[0].message.content == "hello"
        process.send_signal(signal.SIGINT)
        assert process.wait(START_S) == 0
    finally:
        process.kill()
        process.wait()
