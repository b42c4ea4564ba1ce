"""Formats of the messages between a pool and its fork server: fixed structs."""

import struct

ORDER = struct.Struct("<cQQQ")
"""Order to the fork server: FORK or KILL, the child's number, for FORK its bytes and CPU seconds.

FORK passes the files of the child: its end of its connection, and one or two more.
"""
FORK, KILL = b"F", b"K"
MOST_FILES_OF_FORK = 3
REPORT = struct.Struct("<Qi")
"""Report of the fork server: child's number, and its return code in subprocess's form."""
NO_FORK = 1 << 16  # return code in a report when the fork failed
OUT_OF_MEMORY = 12  # exit status of a child
