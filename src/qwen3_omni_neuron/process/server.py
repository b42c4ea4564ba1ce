"""What an engine's process runs: it builds the engine and serves its calls, one at a time."""

import socket
from typing import Any

import torch

from qwen3_omni_neuron.engines.protocols import Talker, Thinker, Vocoder
from qwen3_omni_neuron.process.failure import Failure
from qwen3_omni_neuron.process.interpreter import obey_parent
from qwen3_omni_neuron.process.mailbox import HungUpError, Mailbox, SharedBlock


def main(connection: int, incoming: int, outgoing: int, parent: int) -> None:
    """Serve until the other end hangs up.

    connection, incoming, outgoing: descriptors of the socket and of the blocks of the mailbox.
    parent: the process id of the other end.
    """
    obey_parent(parent)
    mailbox = Mailbox(
        socket.socket(fileno=connection),
        SharedBlock.of_descriptor(incoming),
        SharedBlock.of_descriptor(outgoing),
    )
    try:
        _serve(mailbox)
    except HungUpError:
        return


def _serve(mailbox: Mailbox) -> None:
    try:
        factory, threads = _factory(mailbox)
        if threads is not None:
            torch.set_num_threads(threads)
        engine = factory()
    except HungUpError:
        raise
    except Exception as error:
        mailbox.send((False, Failure.of(error)))
        return
    try:
        mailbox.send((True, _attributes(engine)))
        while True:
            _serve_call(mailbox, engine)
    finally:
        engine.close()


def _factory(mailbox: Mailbox) -> tuple[Any, int | None]:
    try:
        return mailbox.receive()
    except (AttributeError, ImportError) as error:
        raise ImportError(
            "the engine's process can't import the factory. Define it in a module, not in the "
            "script that is run nor in a notebook"
        ) from error


def _serve_call(mailbox: Mailbox, engine: Any) -> None:
    try:
        method, arguments = mailbox.receive()
        reply = True, getattr(engine, method)(*arguments)
        mailbox.send(reply)
    except HungUpError:
        raise
    except Exception as error:
        mailbox.send((False, Failure.of(error)))


def _attributes(engine: Any) -> dict[str, Any]:
    """Those that the protocols of engines name, as far as this one has them."""
    names = {name for protocol in (Thinker, Talker, Vocoder) for name in protocol.__annotations__}
    return {name: getattr(engine, name) for name in names if hasattr(engine, name)}
