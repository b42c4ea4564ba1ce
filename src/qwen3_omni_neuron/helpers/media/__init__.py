"""Decoding of media that need a codec, in a child process for each item.

helpers.media.pool runs in the caller's event loop: it takes jobs (helpers.media.job), schedules
their owners in turn, and has a child decode each job (helpers.media.work). helpers.media.wire has
the formats of their messages. helpers.media.inline reads what needs no codec, plain WAV and the
header of a picture, in the caller's process.
"""
