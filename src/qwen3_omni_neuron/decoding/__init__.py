"""Media that need a codec, decoded in processes apart.

decoding.pool is the side of the caller, in its event loop: it takes jobs (decoding.job), lets their
owners take turns (decoding.turns), and has a child process decode each (decoding.work). The
children are forks of one small process (decoding.fork_server, which decoding.link starts): they
cost a few milliseconds, have limits of their own, can be killed, and take a codec's crash with
them. decoding.wire is the form of what the processes say to each other. Nothing of a child is
trusted: it may be a codec that a hostile file has taken over. decoding.pcm reads plain WAV, which
needs no codec, without any of that.
"""
