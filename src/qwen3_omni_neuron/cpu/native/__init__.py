"""Decode steps in C: one call a step, where the same as torch operations costs hundreds of calls.

model/ says what is computed, and everything else runs that; tests hold the two together.
"""
