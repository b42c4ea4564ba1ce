"""Thinker and talker on NxDI: their decoder, its weights, its slots."""
