"""The function that an engine's process runs: build the engine, then serve calls one at a time."""

import select
import socket
from collections.abc import Callable
from typing import Any

import torch

from qwen3_omni_neuron.engines.process.child import SentException, follow_parent, trim_output
from qwen3_omni_neuron.engines.process.heap import IdleMemory, keep_all, trim_early
from qwen3_omni_neuron.engines.process.mailbox import DisconnectedError, Mailbox, SharedBlock

LOOK_S = 0.25  # interval between two checks of an idle engine and its memory


def main(connection: int, incoming: int, outgoing: int, parent: int) -> None:
    """Serve until the other end disconnects.

    connection, incoming, outgoing: descriptors of the socket and of the blocks of the mailbox.
    parent: the process id of the other end.
    """
    follow_parent(parent)
    trim_early()
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
        keep_all()
    except DisconnectedError:
        raise
    except Exception as error:
        mailbox.send((False, SentException.of(error)))
        return
    try:
        mailbox.send((True, None))
        wait = _idle(mailbox.fileno(), engine.fault)
        while True:
            wait()
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


def _idle(descriptor: int, fault: Callable[[], Exception | None] | None) -> Callable[[], None]:
    """Return a function that waits for a request, and gives freed memory and disk space back.

    fault: the `fault` method of an engine with processes of its own, else None; the error that it
    returns is raised. During a call the engine raises it itself.
    """
    poll, memory = select.poll(), IdleMemory()
    poll.register(descriptor, select.POLLIN)

    def wait() -> None:
        trim_output()
        while not poll.poll(1000 * LOOK_S):
            error = fault() if fault is not None else None
            if error is not None:
                raise error
            memory.look()

    return wait


def _serve_request(mailbox: Mailbox, engine: Any) -> None:
    """Serve one request: call a method, or read an attribute if the arguments are None."""
    try:
        name, arguments = mailbox.receive()
        attribute = getattr(engine, name)
        mailbox.send((True, attribute if arguments is None else attribute(*arguments)))
    except DisconnectedError:
        raise
    except Exception as error:
        mailbox.send((False, SentException.of(error)))
