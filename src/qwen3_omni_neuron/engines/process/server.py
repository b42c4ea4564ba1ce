"""The main function of an engine's process: build the engine, then serve calls one at a time."""

import os
import pickle
import select
from multiprocessing.connection import Connection
from typing import Any

import torch

from qwen3_omni_neuron.engines.process.child import SentException, follow_parent, trim_output
from qwen3_omni_neuron.engines.process.heap import IdleMemory, keep_all, trim_early
from qwen3_omni_neuron.engines.process.mailbox import DisconnectedError, Mailbox, SharedBlock

LOOK_S = 0.25  # interval between checks of an idle engine and its memory


def main(connection: int, incoming: int, outgoing: int, parent: int) -> None:
    """Serve until the other end disconnects.

    connection, incoming, outgoing: descriptors of the socket and the mailbox's blocks. parent: the
    other end's process id.
    """
    follow_parent(parent)
    trim_early()
    for descriptor in (connection, incoming, outgoing):  # not inherited by its children
        os.set_inheritable(descriptor, False)
    mailbox = Mailbox(Connection(connection), SharedBlock(incoming), SharedBlock(outgoing))
    try:
        _serve(mailbox)
    except DisconnectedError:
        return


def _serve(mailbox: Mailbox) -> None:
    try:
        factory, threads = mailbox.receive()
        if threads is not None:
            torch.set_num_threads(threads)
        engine = pickle.loads(factory)()
        keep_all()
    except Exception as error:
        _answer(mailbox, error)
        return
    try:
        mailbox.post(mailbox.pack((True, None)))
        poll, memory = select.poll(), IdleMemory()
        poll.register(mailbox.fileno(), select.POLLIN)
        while True:
            trim_output()
            while not poll.poll(1000 * LOOK_S):
                # An engine with its own processes. A call would raise the fault itself.
                if engine.fault is not None and (fault := engine.fault()) is not None:
                    raise fault
                memory.look()
            _serve_request(mailbox, engine)
    finally:
        engine.close()


def _serve_request(mailbox: Mailbox, engine: Any) -> None:
    """Serve one request: a method's call, or an attribute if the arguments are None."""
    try:
        name, arguments = mailbox.receive()
        attribute = getattr(engine, name)
        value = attribute if arguments is None else attribute(*arguments)
        mailbox.post(mailbox.pack((True, value)))
    except Exception as error:
        _answer(mailbox, error)


def _answer(mailbox: Mailbox, error: Exception) -> None:
    if isinstance(error, DisconnectedError):
        raise error
    mailbox.post(mailbox.pack((False, SentException(error))))
