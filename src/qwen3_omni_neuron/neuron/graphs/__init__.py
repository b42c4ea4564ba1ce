"""Graphs that a compiler traces from model/: inputs, state and outputs."""
