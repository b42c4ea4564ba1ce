"""Comparison of a loaded model with transformers' results for the same weights, stage by stage.

questions: what both are asked.
oracle: the reference, transformers' own generate.
device: the CPU or GPU on which it computes.
forced: results of each stage of the reference over given inputs.
rounding: the reference with the weights of dtypes int8 and int4.
reference: the file of these results, written and read.
stages: results of each stage of a loaded model over the same inputs.
judgement: differences of the two, and what rounding explains of them.
alone: checks of a model that need no reference.
report: the page of results.

Only `oracle` and `forced` import transformers, and only where a reference is written.
"""
