"""An object in a process of its own, whose methods are called from here.

`engine_process` starts processes and calls the objects, which `server` holds; `mailbox` carries
messages. `child` starts a process that ends with its parent, and `fork` refuses what a forked child
of a model's process can't do.
"""
