"""The engines in C: one call replaces hundreds of torch operations.

Python uses only library.h, through cffi, from which the build generates module _declarations. Only
write_kv_row in decoder.c writes KV caches. model/ defines the results; tests compare them.
"""
