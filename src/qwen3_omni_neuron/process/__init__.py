"""An object in a process of its own, whose methods are called from here.

process.engine_process starts the process and calls the object; process.server runs in the process
and holds the object; process.mailbox carries messages between the two, and process.child
exceptions; process.child starts a Python process that ends with its parent. process.engine_group
calls several such objects together, and process.progress says which of them is behind. Nothing here
knows what kind of engine the object is.
"""
