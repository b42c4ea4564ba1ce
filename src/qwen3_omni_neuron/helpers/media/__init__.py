"""Decoding of media that need a codec, in a child process for each item.

helpers.media.pool runs in the caller's event loop: it takes jobs (helpers.media.job), schedules
their owners in turn, and has a child decode each job (helpers.media.work). helpers.media.wire has
the formats of their messages. helpers.media.pcm reads plain WAV, which needs no codec, in the
caller's process.
"""
