"""The runtime: requests in slots of the engines, and one worker thread a stage.

Read runtime.pipeline first: it gives each request a slot and a task in each stage. runtime.stage
has the loop that all stages share; runtime.policy decides whose call is next; runtime.stream is the
caller's end.
"""
