"""The engines in C: one call does the work of hundreds of torch operations.

engines: builds those of all stages. slots, thinker, talker: their calls, over what follows.
library.h: all that Python uses of the C. The build makes module _declarations of it, through which
cffi fills structs and calls functions.
steps: decode steps and prompts of thinker and talker. predictor: a frame of the code predictor.
code2wav: the vocoder. audio_convolutions: the first layers of the audio encoder. linear: linear
layers of encoders and projections. sampler: samples tokens from logits. matrix: packs weights.
binding: addresses of tensors, descriptions of weights. installed: checks the compiled library.
sources: digest and declarations of the C sources.
Keys and values are written to a KV cache in decoder.c only, by write_kv_row.

model/ defines what is computed; tests compare the C with it.
"""
