"""An object in a process of its own, whose methods are called from here.

engines.process.engine_process starts the process and calls the object; engines.process.server runs
in the process and holds the object; engines.process.mailbox carries messages between the two, and
engines.process.child exceptions; engines.process.child starts a Python process that ends with its
parent. engines.process.engine_group calls several such objects together and finds the one that is
behind. engines.process.fork refuses what a forked child of a model's process can't do. This package
does not depend on the kind of engine.
"""
