"""Engines over loaded parts: encoders, projections, code predictor, vocoder."""
