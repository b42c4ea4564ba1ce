"""Engines on the CPU, in C where it was compiled and takes the weights, else in torch.

thinker (with the audio and vision encoder), predictor, vocoder: the engines. build: put them
together, from a checkpoint or from a compiled tree. weights: write and read a compiled tree's
weights. target: the CPU's entry in the table of targets.
slots: the KV cache of thinker and talker. Its docstring says where a KV cache row is written.
native: the functions of model/ that are in C.
"""
