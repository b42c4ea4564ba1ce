"""Tensor parallelism: how a module is cut over several cores, and where they sum."""
