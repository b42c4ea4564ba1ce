"""Engines on the CPU, in C where it was compiled and takes the weights, else in torch.

native: all engines in C. eager: all in torch.
"""
