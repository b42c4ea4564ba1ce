"""Comparison of a loaded model with transformers' results for the same weights, stage by stage.

`write` asks transformers (by `oracle` and `forced`, which import it); `reference` is the file of
results; `verify` asks the loaded model (by `stages`, `alone`), and `judgement` compares; `report`
is the page.
"""
