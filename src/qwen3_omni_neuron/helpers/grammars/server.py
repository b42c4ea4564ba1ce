"""The fork server of grammars: it holds the vocabulary's table, which takes seconds to make."""

import os
from functools import partial

from qwen3_omni_neuron.helpers.fork_server import Run, serve
from qwen3_omni_neuron.helpers.grammars import wire, work

NICENESS = 19  # masks are made in the pauses of the engines' threads


def main(control: int, vocabulary: int, parent: int) -> None:
    """Serve until the pool disconnects; see helpers.fork_server.serve.

    vocabulary: descriptor of a file, see helpers.grammars.wire.VOCABULARY.
    """
    serve(control, parent, NICENESS, partial(prepare, vocabulary))


def prepare(vocabulary: int) -> Run:
    """Make the vocabulary's table; return what a child does."""
    import llguidance

    data = os.pread(vocabulary, os.fstat(vocabulary).st_size, 0)
    os.close(vocabulary)
    vocab_size, end_id = wire.VOCABULARY.unpack_from(data)
    text = data[wire.VOCABULARY.size :].decode()
    tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=end_id)
    return partial(work.run, tokenizer, vocab_size, end_id)
