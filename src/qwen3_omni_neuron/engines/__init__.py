"""Code that the engines of all targets share.

protocols declares the runtime's calls; talker and thinker are engines over any target's parts;
remote has engines in their own processes; media and inputs prepare calls; buckets chooses the
compiled length; sampling draws tokens.
"""
