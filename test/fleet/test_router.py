"""The choice of a replica by Ray's own routing, over replicas that are none. `make test-ray`."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

import pytest

if "TEST_RAY" not in os.environ:
    pytest.skip("a Ray cluster of its own", allow_module_level=True)

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router.common import PendingRequest

from qwen3_omni_neuron.serving.fleet.router import AffinityRouter, Presence

DEPLOYMENT = DeploymentID("replica", "speaking")
NAMES = tuple("abcdef")
SLOTS = 2
RING = 3  # replicas that a session may go to


class Idle:
    """A replica with so many requests."""

    max_ongoing_requests = SLOTS

    def __init__(self, name: str):
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.requests = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.requests


Route = Callable[[str, Mapping[str, int]], Awaitable[str]]


def routing(test: Callable[[Route], Awaitable[None]]) -> None:
    """Run a test with a function that routes one request of a session.

    It takes the requests that each replica has, by name, and returns the name of the one chosen.
    """

    async def run() -> None:
        router = AffinityRouter(DEPLOYMENT, DeploymentHandleSource.UNKNOWN)
        router.initialize_state()
        replicas = [Idle(name) for name in NAMES]
        router.update_replicas(replicas)

        async def route(session: str, requests: Mapping[str, int]) -> str:
            for replica in replicas:
                replica.requests = requests.get(replica.replica_id.unique_id, 0)
            metadata = RequestMetadata("request", "internal", session_id=session)
            pending = PendingRequest([], {}, metadata)
            chosen = await asyncio.wait_for(router._choose_replica_for_request(pending), 10)
            return str(chosen.replica_id.unique_id)

        await test(route)

    asyncio.run(run())


async def ring_of(route: Route, session: str) -> list[str]:
    """Return the replicas that a session goes to, each where all before it are busy."""
    found: list[str] = []
    while len(found) < RING:
        found.append(await route(session, dict.fromkeys(found, SLOTS)))
    return found


def test_a_session_stays_and_a_busy_replica_is_passed_over_in_the_rings_order() -> None:
    async def test(route: Route) -> None:
        for session in map(str, range(20)):
            ring = await ring_of(route, session)
            assert len(set(ring)) == RING
            # Not the least busy one: the one that has the rows.
            assert await route(session, {ring[0]: SLOTS - 1}) == ring[0]
            assert await ring_of(route, session) == ring

    routing(test)


def test_a_session_whose_replicas_are_all_busy_goes_to_any_other_that_is_free() -> None:
    async def test(route: Route) -> None:
        ring = await ring_of(route, "a")
        others = set(NAMES) - set(ring)
        busy = dict.fromkeys(ring, SLOTS)
        assert {await route("a", busy) for _ in range(60)} == others
        (free, *_) = others
        assert await route("a", {**dict.fromkeys(NAMES, SLOTS), free: 0}) == free

    routing(test)


def test_a_request_without_a_session_goes_to_the_less_busy_of_two() -> None:
    async def test(route: Route) -> None:
        counts = dict(zip(NAMES, (1, 1, 1, 1, 0, 2), strict=True))
        found = [await route("", counts) for _ in range(200)]
        assert set(found) == set("abcde")
        assert found.count("e") > max(map(found.count, "abcd"))

    routing(test)


def test_a_replica_is_told_once_that_it_is_on_the_list_or_no_more() -> None:
    told, presence = list[bool](), Presence()
    assert not presence.tell({"a"})  # a proxy's process
    presence.watch("a", told.append)
    assert presence.tell(set())  # it starts: nobody lists it yet
    for running in ({"b"}, {"a", "b"}, {"a"}, {"b"}, set[str](), {"a", "c"}):
        presence.tell(running)
    assert told == [True, False, True]
