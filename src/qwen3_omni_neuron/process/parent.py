"""A process that ends with the one that started it."""

import os
import threading
import time

PARENT_CHECK_S = 0.25


def end_with(parent: int) -> None:
    """Leave when the process of that id, which started this one, ends in any way, also out of the
    middle of a call. Returns at once."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
