"""The runtime: requests in slots of the engines, and a worker thread per stage.

Read runtime.pipeline first: it gives each request a slot and a task in each stage. runtime.stage
has the stages' loop; runtime.policy decides whose call is next; runtime.stream is the caller's end.
"""
