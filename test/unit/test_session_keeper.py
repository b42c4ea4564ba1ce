"""When a realtime session is written to the session folder, over a folder that only takes notes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from qwen3_omni_neuron.errors import MessageError
from qwen3_omni_neuron.serving.realtime import keeper as keeper_module
from qwen3_omni_neuron.serving.realtime.keeper import SessionKeeper
from qwen3_omni_neuron.serving.stored.folder import NotKeptError


class Notes:
    """Folder and connection of a keeper. done: its calls. refused: what was counted and logged.

    error: error of each write.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.error: Exception | None = None
        self.used = False
        self.refused: list[str] = []
        self.service: Any = SimpleNamespace(
            folder=self, settings=SimpleNamespace(kept_session_s=99)
        )
        self.service.metrics = SimpleNamespace(
            failed_to_keep=lambda kind, error: self.refused.append(error.reason)
        )
        self.context = SimpleNamespace(owner="me")

    def later(self, call: Callable[..., Any], *given: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(call(*given))
        except Exception as error:
            future.set_exception(error)
        return future

    async def in_thread(self, call: Callable[..., Any], *given: Any) -> Any:
        return call(*given)

    def failed(self, error: Exception) -> None:
        self.refused.append(type(error).__name__)

    def put(self, kind: str, owner: str, secret: str, parts: Any, replaces: bool) -> None:
        if self.error is not None:
            raise self.error
        self.done.append("replaced" if replaces else "written")

    def is_used(self, *given: str) -> bool:
        return self.used

    def use(self, *given: str) -> None:
        self.used = True

    def remove(self, *given: str) -> None:
        self.done.append("removed")

    def touch(self, *given: str) -> None:
        self.done.append("touched")


def keeper_of(notes: Any) -> SessionKeeper:
    model: Any = SimpleNamespace(checkpoint_fingerprint="f")
    return SessionKeeper(notes, model, {})


def content() -> dict[str, Any]:
    return {"a": 1}


async def looked(keeper: SessionKeeper, *changes: int, document: Any = content) -> None:
    """Look at a session with these numbers of changes, one after the other."""
    for number in changes:
        keeper.look((number, 0), document)
        for _ in range(10):  # rounds of the event loop
            await asyncio.sleep(0)


def test_a_session_is_written_once_it_has_not_changed_between_two_looks() -> None:
    async def run() -> None:
        notes = Notes()
        keeper = keeper_of(notes)
        await looked(keeper, 0, 0, 1, 2, 3)
        assert notes.done == []
        await looked(keeper, 3, 3, 3)
        assert notes.done == ["written"]
        await looked(keeper, 4, 4)
        await keeper.close((5, 0), content)
        assert notes.done == ["written", "replaced", "replaced"]
        await keeper.close((5, 0), content)  # from now on counts the time in which it is kept
        assert notes.done[3:] == ["touched"]

    asyncio.run(run())


def test_a_session_in_which_nothing_was_said_is_not_written() -> None:
    async def run() -> None:
        notes = Notes()
        await keeper_of(notes).close((0, 0), content)
        assert notes.done == []

    asyncio.run(run())


def test_a_session_whose_reply_has_begun_meanwhile_is_written_later() -> None:
    def busy() -> Any:
        raise MessageError("a reply streams")

    async def run() -> None:
        notes = Notes()
        keeper = keeper_of(notes)
        await looked(keeper, 1, 1, document=busy)
        assert (notes.done, notes.refused) == ([], [])
        await looked(keeper, 1, 1)
        assert notes.done == ["written"]
        assert keeper.token == keeper.told

    asyncio.run(run())


def test_an_open_session_that_rests_for_long_is_kept() -> None:
    async def run() -> None:
        notes = Notes()
        notes.service.settings.kept_session_s = 0
        keeper = keeper_of(notes)
        await looked(keeper, 1, 1, 1)
        assert notes.done == ["written", "touched"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "reasons", "again"),
    [
        (NotKeptError("disk", "full"), ["disk"], True),
        (NotKeptError("gone", "resumed elsewhere"), ["gone"], False),
        (RuntimeError("a fault"), ["RuntimeError", "failed"], True),
    ],
)
def test_a_session_that_can_not_be_written(
    error: Exception, reasons: list[str], again: bool
) -> None:
    """Its file is removed; with the next change it is tried again."""

    async def run() -> None:
        notes = Notes()
        keeper = keeper_of(notes)
        await looked(keeper, 1, 1)
        notes.error = error
        await looked(keeper, 2, 2, 2)
        assert notes.refused == reasons
        assert notes.done == ["written", "removed"]
        assert keeper.token is None
        notes.error = None
        await looked(keeper, 3, 3)
        assert notes.done[2:] == (["written"] if again else [])
        assert (keeper.token is not None) == again

    asyncio.run(run())


def test_a_session_without_a_stored_form_is_not_kept() -> None:
    async def run() -> None:
        notes = Notes()
        await looked(keeper_of(notes), 1, 1, document=lambda: {"half a pair": "\ud800"})
        assert (notes.done, notes.refused) == ([], ["content"])

    asyncio.run(run())


def test_a_session_that_is_deleted_while_it_is_written_stays_deleted() -> None:
    async def run() -> None:
        notes = Notes()
        keeper = keeper_of(notes)
        begun = asyncio.Event()

        async def slowly(call: Callable[..., Any], *given: Any) -> Any:
            await begun.wait()
            return call(*given)

        notes.in_thread = slowly  # type: ignore[method-assign]
        await looked(keeper, 1, 1)
        await keeper.forget()
        begun.set()
        await keeper.close((2, 0), content)
        assert notes.done == ["removed"]
        assert keeper.token is None

    asyncio.run(run())


def test_a_session_that_another_server_has_resumed_is_written_no_more_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_module, "POLL_S", 0.01)

    async def run() -> None:
        notes = Notes()
        keeper = keeper_of(notes)
        await looked(keeper, 1, 1)
        ended = asyncio.create_task(keeper.taken())
        notes.used = True
        await looked(keeper, 2, 2)
        assert notes.done == ["written", "removed"] and notes.refused == ["gone"]
        await asyncio.wait_for(ended, 20)
        await keeper.close((3, 0), content)
        assert "replaced" not in notes.done

    asyncio.run(run())


def test_a_session_that_its_client_deleted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "POLL_S", 0.01)

    async def run() -> None:
        notes = Notes()
        keeper = keeper_of(notes)
        await looked(keeper, 1, 1)
        await keeper.forget()
        assert notes.used  # a copy of its file resumes nothing
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(keeper.taken(), 0.1)

    asyncio.run(run())
