"""Processes that may die: each does one piece of a stranger's work, within limits.

A child is forked from a small process that has loaded what it needs (helpers.fork_server, which
helpers.pool starts): that takes milliseconds, and contains crashes. A hostile file may have taken a
child over, so that no answer of it is trusted (helpers.wire). helpers.media decodes files that need
a codec; helpers.grammars compiles grammars and makes their masks.
"""
