"""An object in a process of its own, whose methods are called from here.

`engine_process` starts the process and calls the object, which `server` holds; `mailbox` carries
messages; `engine_group` calls several such objects together. `child` starts a process that ends
with its parent, and `fork` refuses what a forked child of a model's process can't do.
"""
