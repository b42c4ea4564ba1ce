"""Replicas that Ray adds, takes away and replaces by itself, in a real cluster.

`make test-scaling`: a process has one cluster, and these wait for Ray most of the time.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

if os.environ.get("TEST_RAY") != "scaling":
    pytest.skip("a Ray cluster that scales by itself", allow_module_level=True)

from qwen3_omni_neuron.serving.fleet.scaling import AT_ONCE, REPLIES, REQUESTS, SERVICE, SLOTS
from testing.fleet_load import ERRORS, RETRIES
from testing.http_server import wait_until
from testing.ray_cluster import START_S, Cluster, cluster

NAME, MODEL = "speaking", "qwen3-omni"
STALL_S, CHECK_S, TIMEOUT_S = 1.5, 0.5, 2.0
POLICY = "testing.recorded_policy:RecordedPolicy"
HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
# No token ends the text.
LONG = {"thinker_eos_token_id": 10**6, "thinker_max_new_tokens": 3000, "chunk_frames": [1]}
SPEECH: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Cluster]:
    with cluster() as made:
        deploy(made, 2)
        made.wait_for(NAME, 2)
        yield made


def deploy(fleet: Cluster, replicas: int | None, **deployment: Any) -> None:
    """Replicas of two slots, with a process a stage, whose health Ray looks at often."""
    deployment |= {"health_check_period_s": CHECK_S, "health_check_timeout_s": TIMEOUT_S}
    args = {"dtype": "float32", "model_name": MODEL, "placement": "split"}
    limits = {"max_concurrency": 2, "max_queued": 0, "stall_timeout_s": STALL_S}
    fleet.deploy(NAME, replicas, deployment=deployment, **args, **limits)


class Endless:
    """A spoken reply without an end, of which a piece has come. replica: where it is made."""

    def __init__(self, client: OpenAI, session: str):
        asked = {**HELLO, **SPEECH, "stream": True, "extra_body": LONG, "timeout": START_S}
        create: Any = client.chat.completions.with_raw_response.create
        answer = create(**asked, extra_headers={"x-session-id": session})
        self.replica = answer.headers["x-replica"]
        self._stream = answer.parse()
        next(self._stream)

    def rest(self) -> None:
        for _ in self._stream:
            pass

    def close(self) -> None:
        self._stream.close()


def ask(client: OpenAI, session: str) -> str:
    """Return the name of the replica that answers."""
    create: Any = client.chat.completions.with_raw_response.create
    answer = create(**HELLO, extra_headers={"x-session-id": session}, timeout=START_S)
    assert answer.parse().choices[0].message.content == "hello"
    return str(answer.headers["x-replica"])


def stages_of(process: int) -> list[int]:
    """Return the ids of a replica's other processes."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.parametrize("stopped", ["stages", "replica"])
def test_a_replica_that_makes_no_progress_is_replaced(fleet, stopped, capsys) -> None:
    """Its stream ends with an error; its request that has not begun is answered elsewhere."""
    with fleet.client(retries=RETRIES) as client, ThreadPoolExecutor(3) as pool:
        stream = Endless(client, stopped)
        dying = stream.replica
        assert ask(client, stopped) == dying
        own = fleet.replicas(NAME)[dying]
        stages = stages_of(own)
        assert len(stages) == 3
        start_s = time.monotonic()

        def after_s(wait: Callable[[], Any]) -> float:
            wait()
            return time.monotonic() - start_s

        def cut() -> None:
            with pytest.raises(ERRORS):
                stream.rest()

        def answered() -> None:
            assert ask(client, stopped) != dying

        def ended() -> None:
            wait_until(lambda: not any(map(alive, [own, *stages])), START_S)

        for process in stages if stopped == "stages" else [own]:
            os.kill(process, signal.SIGSTOP)
        waits = [pool.submit(after_s, wait) for wait in (cut, answered, ended)]
        found_s = after_s(lambda: wait_until(lambda: fleet.running(NAME) < 2, START_S))
        recovery_s = after_s(lambda: wait_until(lambda: fleet.running(NAME) == 2, START_S))
        cut_s, answered_s, ended_s = (wait.result(START_S) for wait in waits)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{stopped} stopped: found after {found_s:.1f} s, its last process ended after "
            f"{ended_s:.1f} s; its stream cut after {cut_s:.1f} s, its request answered after "
            f"{answered_s:.1f} s; two replicas again after {recovery_s:.1f} s\n"
        )


def alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def test_the_policy_adds_a_replica_under_load_and_takes_it_away_after_it(
    fleet, tmp_path, capsys
) -> None:
    file = tmp_path / "decisions"

    def decisions() -> list[dict[str, Any]]:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    policy = {"policy_function": POLICY, "policy_kwargs": {"file": str(file), "target_s": 1.0}}
    periods = {"metrics_interval_s": 0.5, "look_back_period_s": 1.0}
    delays = {"upscale_delay_s": 0.5, "downscale_delay_s": 1.0}
    scaling = {"min_replicas": 1, "max_replicas": 2, **periods, **delays, "policy": policy}
    deploy(fleet, None, autoscaling_config=scaling)
    fleet.wait_for(NAME, 1)  # nothing is asked
    (first,) = fleet.replicas(NAME)
    with fleet.client(retries=RETRIES) as client, ExitStack() as streams:
        start_s = time.monotonic()
        for replica in (first, first, "another"):  # as many as slots, and one that has none
            made = streams.enter_context(closing(Endless(client, "a session")))
            assert (made.replica == first) == (replica == first)
        grown_s = time.monotonic() - start_s
    start_s = time.monotonic()
    fleet.wait_for(NAME, 1)
    shrunk_s = time.monotonic() - start_s
    (last,) = fleet.replicas(NAME)
    with fleet.client(retries=RETRIES) as client:
        ask(client, "a session")
    made = decisions()
    grown = next(one for one in made if one["wanted"] > one["target"])
    assert grown["figures"][SLOTS] == {first: 2.0}
    assert grown["figures"][REQUESTS][first] > 0
    assert SERVICE not in grown["figures"]
    assert any(one["target"] == 2 and one["wanted"] == 1 for one in made)

    def reported() -> bool:
        figures = decisions()[-1]["figures"]
        return all(figures.get(name, {}).get(last, 0) > 0 for name in (REPLIES, SERVICE, AT_ONCE))

    wait_until(reported, START_S)
    with capsys.disabled():
        sys.stdout.write(
            f"\nthe first reply of another replica after {grown_s:.1f} s of load; one replica "
            f"again {shrunk_s:.1f} s after it; {len(made)} decisions\n"
        )
