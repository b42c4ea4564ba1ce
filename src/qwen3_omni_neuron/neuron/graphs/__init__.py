"""Every graph that a compiler traces from model/: its inputs, its state and its outputs.

No graph here defines a model again: each calls a module of model/ at one size.
"""
