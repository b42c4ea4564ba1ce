"""Names that the last release had and this one refuses, each with what to use instead.

The tables are emptied at the next release. A value completes the sentence "NAME was removed: ...".
"""

_SPILLED = "a conversation that lost its slot is prefilled again; raise max_concurrency"

OPTIONS: dict[str, str] = {
    "spill_bytes": _SPILLED,
    "spill_folder": _SPILLED,
    "spill_folder_bytes": _SPILLED,
}
"""Keyword arguments of loads, requests and compiles, and settings of the server."""

FLAGS: dict[str, str] = {}
"""Flags of the command line that are not made from an option."""

VERBS: dict[str, str] = {}
"""Verbs of the command line."""

FIELDS: dict[str, str] = {}
"""Fields and values of request bodies and of realtime events."""

PATHS: dict[str, str] = {}
"""Paths of the server."""


def removed(name: str, table: dict[str, str]) -> str:
    """Return the sentence that refuses a removed name; empty for any other name."""
    return f"{name} was removed: {table[name]}" if name in table else ""
