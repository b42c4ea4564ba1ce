"""Every graph that a compiler traces from model/: its inputs, its state and its outputs."""
