"""Objects in processes of their own, whose methods are called from here.

`engine_process` starts processes and calls the objects, which `server` runs; `mailbox` carries
messages. A `child` ends with its parent; `fork` refuses what a model's forked child can't do.
"""
