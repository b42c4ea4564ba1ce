"""The engines in C: one call does the work of hundreds of torch operations.

engines: builds those of all stages, over what follows.
library.h: all that Python uses of the C. The build makes module _declarations of it, through which
cffi fills structs and calls functions.
steps: decode steps and prompts of thinker and talker, over their slots. talker: the talker's
calls. predictor: a frame of the code predictor. code2wav: the vocoder. audio_convolutions: the
first layers of the audio encoder. encoder_layers: the other layers of both encoders. sampler:
samples tokens from logits. binding: addresses of tensors, packing and descriptions of weights.
installed: checks the compiled library. sources: digest and declarations of the C sources.
Keys and values are written to a KV cache in decoder.c only, by write_kv_row.

model/ defines what is computed; tests compare the C with it.
"""
