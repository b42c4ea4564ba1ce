"""The engines in C: one call does the work of hundreds of torch operations.

Python uses only library.h, through cffi: the build generates module _declarations from it. Only
write_kv_row in decoder.c writes KV caches. model/ defines the results; tests compare the C with it.
"""
