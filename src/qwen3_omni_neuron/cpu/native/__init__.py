"""Functions of model/ in C: one call does the work of hundreds of torch operations.

steps: decode steps and prompts of thinker and talker. predictor: a frame of the code predictor.
code2wav: the vocoder. audio_convolutions: the first layers of the audio encoder. linear: linear
layers of encoders and projections. draws: tokens from logits. matrix: how weights are packed.
binding: structures and calls of the library. installed: checks the compiled library. sources: hash
of the C sources.
Keys and values are written to a KV cache in decoder.c only, by write_kv_row.

model/ defines what is computed; tests compare the C with it.
"""
