"""Code that the engines of all targets share.

`protocols` says what the runtime calls; `talker` is the one talker engine, over the parts of any
target; `remote` is an engine in a process of its own; `media`, `chunks` and `inputs` prepare calls.
"""
