"""Objects in their own processes, whose methods are called from here.

`engine_process` starts processes and calls the objects, which `server` runs; `mailbox` carries
messages. A `child` ends with its parent; `fork` refuses the use of a model in a forked child.
"""
