"""Processes that may die: each does work on what strangers give, within limits of memory and time.

The children are forks of a small process with one thread (helpers.fork_server, which helpers.link
starts): a fork takes a few milliseconds, has limits of its own, can be killed, and contains a
crash. helpers.fair_places gives owners their turns. No message of a child is trusted: a hostile
file may have taken it over. helpers.media decodes media that need a codec, a child for each item;
helpers.grammars compiles grammars and makes their masks.
"""
