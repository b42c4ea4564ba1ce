"""Child processes with limits, each of which processes one hostile input.

A child is forked in milliseconds from a small process with its modules (helpers.fork_server,
started by helpers.pool). A hostile file may hijack it, so its answers are not trusted
(helpers.wire). helpers.media decodes files that need a codec; helpers.grammars compiles grammars
and computes their masks.
"""
