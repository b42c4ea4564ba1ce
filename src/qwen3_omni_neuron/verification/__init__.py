"""Comparison of a loaded model with transformers' results, stage by stage."""
