"""Tensor parallelism: how a module is cut for several cores, and where they sum results."""
