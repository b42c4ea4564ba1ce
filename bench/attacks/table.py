"""All kinds of attacks, by topic."""

from bench.attacks import connections, media, processes, sockets, texts
from bench.attacks.kinds import Kind

KINDS: tuple[Kind, ...] = (
    *texts.KINDS,
    *media.KINDS,
    *connections.KINDS,
    *sockets.KINDS,
    *processes.KINDS,
)
