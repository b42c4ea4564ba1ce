"""Every graph that a compiler traces from model/: what it takes, what it keeps, what it gives.

No graph here is a second definition of a model: each is a call of a module of model/, at one size.
"""
