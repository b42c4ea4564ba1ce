"""Steps, short prompts, frames and waves in C: one call each, of hundreds of torch operations.

model/ says what is computed, and everything else runs that; tests hold the two together.
"""
