"""Replicas that die, go, and are replaced under load; sessions and cores. `make test-ray`."""

import os
import time
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest
from openai import OpenAI
from websockets.exceptions import ConnectionClosed

if "TEST_RAY" not in os.environ:
    pytest.skip("a Ray cluster of its own", allow_module_level=True)

from testing.fleet_load import RETRIES, Load, cut, failed, wrong
from testing.http_server import wait_until
from testing.ray_cluster import Cluster, cluster
from testing.realtime import calling
from train.judge import Judge

NAME = "speaking"
ARGS: dict[str, Any] = {"dtype": "float32", "model_name": NAME, "max_concurrency": 4}
CUT_S = 5.0  # from a death to the error of its last stream
ANSWERS = 24  # of the load, before something is done


@pytest.fixture(scope="module")
def fleet() -> Iterator[Cluster]:
    with cluster() as made:
        made.deploy(NAME, 3, **ARGS)
        made.wait_for(NAME, 3)
        yield made


def after(load: Load, moment: str) -> list[Any]:
    """The answers that ended between a moment and the next one."""
    names = [name for name, _ in load.moments]
    start_s = load.moments[names.index(moment)][1]
    later = [at_s for _, at_s in load.moments if at_s > start_s]
    return [a for a in load.answers if start_s <= a.ended_s < min(later, default=1e12)]


def more(load: Load, count: int = ANSWERS) -> None:
    """Wait until the load has so many more answers."""
    wanted = len(load.answers) + count
    wait_until(lambda: len(load.answers) >= wanted, 60)


def test_a_death_a_drain_and_an_update_under_load_lose_no_request(
    fleet: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with Load(lambda: fleet.client(retries=RETRIES), 16) as load:
        more(load)
        before = fleet.replicas(NAME)
        killed_s = load.note("killed")
        fleet.kill(next(iter(before.values())))
        wait_until(lambda: set(fleet.replicas(NAME)) - set(before), 60)
        fleet.wait_for(NAME, 3)
        recovery_s = load.note("recovered") - killed_s
        more(load)
        load.note("drained")
        fleet.deploy(NAME, 2, **ARGS)
        fleet.wait_for(NAME, 2)
        more(load)
        before = fleet.replicas(NAME)
        updated_s = load.note("updated")
        fleet.deploy(NAME, 2, **ARGS, max_media=3)
        wait_until(lambda: not set(fleet.replicas(NAME)) & set(before), 90)
        fleet.wait_for(NAME, 2)
        update_s = load.note("over") - updated_s
        more(load)
    assert not failed(load.answers)
    dead = cut(after(load, "killed"))
    assert cut(load.answers) == dead  # a drain and an update end no stream
    assert all(one.ended_s - killed_s < CUT_S for one in dead)
    assert not wrong(load.answers, Judge(), sample=24)
    with capsys.disabled():
        last = max((one.ended_s - killed_s for one in dead), default=0.0)
        print(
            f"\n{len(load.answers)} answers; {len(dead)} streams cut by the death, the last after "
            f"{last:.2f} s; a new replica after {recovery_s:.1f} s; two replaced in {update_s:.1f} s"
        )


def ask(client: OpenAI, session: str, turns: list[Any], **options: Any) -> Any:
    """The next turn of a session: text, reused tokens, replica."""
    answer = client.chat.completions.with_raw_response.create(
        model=NAME,
        messages=turns,
        seed=0,
        max_completion_tokens=16,
        extra_headers={"x-session-id": session},
        extra_body=options,
    )
    parsed = answer.parse()
    usage = parsed.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    return parsed.choices[0].message.content, cached, answer.headers["x-replica"]


def test_a_session_stays_where_its_rows_are_until_its_replica_dies(fleet: Cluster) -> None:
    fleet.deploy(NAME, 3, **ARGS)
    fleet.wait_for(NAME, 3)
    with fleet.client(retries=RETRIES) as client:
        homes, turns_of = {}, {}
        for number in range(9):
            session, turns = f"session {number}", list[Any]()
            found = []
            for words in (f"say {'red ' * number}blue", "what is two plus four", "hello"):
                turns.append({"role": "user", "content": words})
                text, cached, replica = ask(client, session, turns)
                turns.append({"role": "assistant", "content": text})
                found.append((cached, replica))
            assert len({replica for _, replica in found}) == 1
            assert found[0][0] < found[1][0] < found[2][0]
            homes[session], turns_of[session] = found[0][1], turns
        assert len(set(homes.values())) > 1  # they are spread
        dying = homes["session 0"]
        fleet.kill(fleet.replicas(NAME)[dying])
        for session, turns in turns_of.items():
            turns.append({"role": "user", "content": "say three five"})
            text, cached, replica = ask(client, session, turns)
            # The same conversation, with no rows to reuse.
            anew, none, _ = ask(client, f"another {session}", turns, cache_key=f"new {session}")
            assert (text, none) == (anew, 0)
            if homes[session] == dying:
                assert (replica != dying, cached) == (True, 0)
            else:
                assert replica == homes[session] and cached > 0
    fleet.wait_for(NAME, 3)


def test_all_replicas_figures_are_in_one_scrape(fleet: Cluster) -> None:
    names = set(fleet.replicas(NAME))

    def shown() -> bool:
        with urlopen(f"http://127.0.0.1:{fleet.figures_port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        busy = [line for line in lines if line.startswith("ray_qwen3_omni_stage_busy_seconds")]
        return all(
            any(f'replica="{name}"' in line and f'stage="{stage}"' in line for line in busy)
            for name in names
            for stage in ("thinker", "talker", "vocoder")
        )

    wait_until(shown, 60)


def test_a_drain_tells_open_sessions_and_ends_them_in_time(fleet: Cluster) -> None:
    fleet.deploy(NAME, 1, **ARGS, drain_timeout_s=2)
    fleet.wait_for(NAME, 1)
    with calling(fleet.server(NAME)) as idle, calling(fleet.server(NAME)) as busy:
        busy.update(thinker_eos_token_id=10**6, thinker_max_new_tokens=3000)
        busy.write("Hello")
        busy.send("response.create")
        busy.until("response.created")
        start_s = time.monotonic()
        fleet.deploy(NAME, 1, **ARGS, drain_timeout_s=3)
        assert idle.until("error")[-1].error.code == "server_draining"
        told_s = time.monotonic()
        with pytest.raises(ConnectionClosed) as closed:
            idle.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        with pytest.raises(ConnectionClosed):
            while True:
                busy.next()
        assert 1 < time.monotonic() - told_s < 5 < 20 + time.monotonic() - start_s
        assert "error" in {event.type for event in busy.heard}
    fleet.wait_for(NAME, 1)


def test_two_applications_have_cores_of_their_own(fleet: Cluster) -> None:
    fleet.deploy("one", 1, "/one", **ARGS, neuron_cores=8)
    fleet.deploy("two", 2, "/two", **ARGS, neuron_cores=6)
    fleet.wait_for("one", 1)
    fleet.wait_for("two", 2)
    cores = [*fleet.cores("one"), *fleet.cores("two")]
    assert [len(own) for own in cores] == [8, 6, 6]
    assert len(set().union(*cores)) == 20
    fleet.remove("one")
    fleet.remove("two")


def test_a_replica_that_fits_no_node_fails_its_deployment_with_both_numbers(
    fleet: Cluster,
) -> None:
    fleet.deploy("large", 1, "/large", **ARGS, neuron_cores=64)
    wait_until(lambda: fleet.state("large").status == "DEPLOY_FAILED", 60)
    assert "asks for 64 neuron_cores, and the largest of 1 nodes has 24" in (
        fleet.state("large").message
    )
    fleet.remove("large")
