"""Replicas of `serving` in a Ray cluster: placement, affinity, draining, metrics.

Only this package imports ray, which the extra `ray` installs.
"""
