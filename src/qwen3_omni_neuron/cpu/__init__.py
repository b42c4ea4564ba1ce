"""Engines on the CPU, in C where it was compiled and takes the weights, else in torch.

build: puts them together, from a checkpoint or from a compiled tree; there it is decided which of
the two it is. eager: all engines in torch. native: all engines in C.
encoders, slots, vocoder: what the two have in common.
weights: write and read a compiled tree's weights. precision: types of weights. packing: layout of
matrices for the C. target: the CPU's entry in the table of targets.
"""
