"""Code that the engines of all targets share.

engines.protocols declares what the runtime calls; engines.talker is the one talker engine, over the
parts of any target; engines.remote has engines that run in processes of their own; engines.media
and engines.inputs prepare calls; engines.inputs chooses the compiled length; engines.sampling
samples tokens from the engines' logits.
"""
