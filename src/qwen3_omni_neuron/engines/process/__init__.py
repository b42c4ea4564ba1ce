"""Engines in their own processes, called from this one.

`engine_process` starts processes and calls the engines, which `server` runs; `mailbox` carries
messages. A `child` ends with its parent; `fork` refuses the use of a model in a forked child.
"""
