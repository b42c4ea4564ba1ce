"""An object in a process of its own, whose methods are called from here.

`engine_process` starts the process and calls the object; `server` runs in the process and holds the
object; `mailbox` carries the messages between the two; `failure` carries exceptions; `child` starts
a Python process that ends with its parent. Nothing here knows what kind of object it is.
"""
