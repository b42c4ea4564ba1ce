"""Functions of model/ in C: one call does the work of hundreds of torch operations.

steps: decode steps and short prompts of thinker and talker. predictor: a frame of the code
predictor. code2wav: the vocoder. binding: structures and calls of the library.
installed: checks the compiled library, and chooses C or torch. sources: hash of the C sources.
Keys and values are written to a KV cache in decoder.c only: decode_rows calls write_kv_row.

model/ defines what is computed; tests compare the C with it.
"""
