"""Every graph that a compiler traces from model/: its inputs, its state and its outputs.

No graph here is a second definition of a model: each is a call of a module of model/, at one size.
"""
