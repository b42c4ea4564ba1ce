"""Decoding of media that need a codec, in separate processes.

serving.decoding.pool runs in the caller's event loop: it takes jobs (serving.decoding.job),
schedules their owners in turn (serving.decoding.turns), and has a child process decode each job
(serving.decoding.work). The children are forks of one small process
(serving.decoding.fork_server, which serving.decoding.link starts): a fork takes a few
milliseconds, has limits of its own, can be killed, and contains a codec's crash.
serving.decoding.wire has the formats of the processes' messages. No message of a child is trusted:
a hostile file may have taken over its codec. serving.decoding.pcm reads plain WAV, which needs no
codec, in the caller's process.
"""
