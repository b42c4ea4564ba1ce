"""Tensor parallelism: what each of several cores holds of a module, and where they sum."""
