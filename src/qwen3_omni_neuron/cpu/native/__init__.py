"""The engines in C: one call does the work of hundreds of torch operations.

library.h is all that Python uses of the C. The build makes module _declarations of it, through
which cffi fills structs and calls functions. Keys and values are written to a KV cache in decoder.c
only, by write_kv_row. model/ defines what is computed; tests compare the C with it.
"""
