"""Comparison of a loaded model with transformers' results for the same weights, stage by stage.

questions: what both are asked.
write: asks transformers on the CPU or a GPU.
oracle: the reference, transformers' own generate.
forced: results of each stage of the reference over given inputs.
rounded_weights: the reference with the weights of dtypes int8 and int4.
reference: the file of these results.
verify: asks the loaded model, and compares.
stages: results of each stage of a loaded model over the same inputs.
judgement: differences of the two, and what rounding explains of them.
alone: checks of a model that need no reference.
report: the page of results.

`write`, `oracle` and `forced` import transformers: only where a reference is written.
"""
