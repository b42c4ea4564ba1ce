"""Code that the engines of all targets share.

protocols declares what the runtime calls; talker and thinker are engines over the parts of any
target; remote has engines in processes of their own; media and inputs prepare calls; buckets
chooses the compiled length; sampling draws tokens from logits.
"""
