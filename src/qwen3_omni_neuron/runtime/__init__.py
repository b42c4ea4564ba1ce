"""The runtime: requests in slots of the engines, and one worker thread a stage.

Read runtime.pipeline first: it gives each request a slot and a task in each stage. runtime.stage
has the loop that all stages share, and contains the failures of engines; runtime.thinker_stage,
runtime.talker_stage and runtime.vocoder_stage choose what each does next, by the rules of
runtime.policy, which also decides whose request is next. runtime.prefill is what the first two do
alike with prompts; its prefix cache knows which rows each slot holds, so that no row is computed
twice. runtime.buffers carry tokens and audio between threads, runtime.schedule decides the
sizes of audio chunks, and runtime.stream is the caller's end: an iterator over a reply's events.
runtime.playback estimates what a player still has to play.
"""
