"""The function that an engine's process runs: build the engine, then serve calls one at a time."""

import select
import socket
from collections.abc import Callable
from typing import Any

import torch

from qwen3_omni_neuron.process.child import Failure, follow_parent
from qwen3_omni_neuron.process.mailbox import DisconnectedError, Mailbox, SharedBlock

LOOK_S = 0.25  # how often an engine that can die is looked at while nothing calls it


def main(connection: int, incoming: int, outgoing: int, parent: int) -> None:
    """Serve until the other end disconnects.

    connection, incoming, outgoing: descriptors of the socket and of the blocks of the mailbox.
    parent: the process id of the other end.
    """
    follow_parent(parent)
    mailbox = Mailbox(
        socket.socket(fileno=connection),
        SharedBlock.of_descriptor(incoming),
        SharedBlock.of_descriptor(outgoing),
    )
    try:
        _serve(mailbox)
    except DisconnectedError:
        return


def _serve(mailbox: Mailbox) -> None:
    try:
        factory, threads = _receive_factory(mailbox)
        if threads is not None:
            torch.set_num_threads(threads)
        engine = factory()
    except DisconnectedError:
        raise
    except Exception as error:
        mailbox.send((False, Failure.of(error)))
        return
    try:
        mailbox.send((True, None))
        fault = getattr(engine, "fault", None)
        while True:
            if fault is not None:
                _wait_for_request(mailbox, fault)
            _serve_request(mailbox, engine)
    finally:
        engine.close()


def _receive_factory(mailbox: Mailbox) -> tuple[Any, int | None]:
    try:
        return mailbox.receive()
    except (AttributeError, ImportError) as error:
        raise ImportError(
            "the engine's process can't import the factory. Define it in a module, not in the "
            "main script nor in a notebook"
        ) from error


def _wait_for_request(mailbox: Mailbox, fault: Callable[[], Exception | None]) -> None:
    """Wait for a request, or for a fault of an engine with processes of its own, and raise it.

    Its calls raise theirs themselves.
    """
    poll = select.poll()
    poll.register(mailbox.fileno(), select.POLLIN)
    while not poll.poll(1000 * LOOK_S):
        error = fault()
        if error is not None:
            raise error


def _serve_request(mailbox: Mailbox, engine: Any) -> None:
    """Serve one request: call a method, or read an attribute where the arguments are None."""
    try:
        name, arguments = mailbox.receive()
        attribute = getattr(engine, name)
        mailbox.send((True, attribute if arguments is None else attribute(*arguments)))
    except DisconnectedError:
        raise
    except Exception as error:
        mailbox.send((False, Failure.of(error)))
