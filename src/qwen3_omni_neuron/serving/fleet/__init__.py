"""Replicas of `serving` in a Ray cluster: placement, affinity, draining, metrics.

This is the only package that imports ray, which the extra `ray` installs.
"""
