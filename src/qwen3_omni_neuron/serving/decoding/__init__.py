"""Media that need a codec, decoded in processes apart.

serving.decoding.pool is the side of the caller, in its event loop: it takes jobs
(serving.decoding.job), lets their owners take turns (serving.decoding.turns), and has a child
process decode each (serving.decoding.work). The children are forks of one small process
(serving.decoding.fork_server, which serving.decoding.link starts): they cost a few milliseconds,
have limits of their own, can be killed, and take a codec's crash with them. serving.decoding.wire
is the form of what the processes say to each other. Nothing of a child is trusted: it may be a
codec that a hostile file has taken over. serving.decoding.pcm reads plain WAV, which needs no
codec, without any of that.
"""
