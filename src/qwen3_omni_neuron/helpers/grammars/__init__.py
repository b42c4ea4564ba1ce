"""Grammars in processes apart: compiled and tried, then a mask of tokens for each step of a reply.

llguidance does the work, in a child of a fork server that holds the vocabulary's table
(helpers.grammars.server, helpers.grammars.work). helpers.grammars.pool tries each grammar in a
child of its own first. One that is quick and small then lives in a child that all such grammars
share; any other keeps a child to itself. helpers.grammars.matcher is one reply's place in its
grammar, helpers.grammars.child the caller's side of a child, helpers.grammars.wire the format of
their messages.
"""
