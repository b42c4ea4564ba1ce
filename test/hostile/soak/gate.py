"""The gate before each thing that a client does: for pauses, and while a server starts anew."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

IDLE_S = 300.0  # for all client actions to end


@dataclass(eq=False)
class Visit:
    """One action of a client, with a server that may be killed meanwhile."""

    url: str
    killed: bool = False


@dataclass
class Gate:
    """Clients wait here while there is no server, or while it must be idle.

    counts: number of actions by kind and outcome. wrong: kinds and outcomes that no client may see,
    except those of a killed server. The condition guards all fields.
    """

    counts: "Counter[str]" = field(default_factory=Counter)
    wrong: "Counter[str]" = field(default_factory=Counter)
    _url: str | None = None
    _dying: bool = False
    _ended: bool = False
    _visits: list[Visit] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def open(self, url: str) -> None:
        """Let clients in, to the server at a URL."""
        with self._changed:
            self._url, self._dying = url, False
            self._changed.notify_all()

    def killed(self) -> None:
        """Note that the server dies: errors of clients inside, or arriving, are not its fault."""
        with self._changed:
            self._dying = True
            for visit in self._visits:
                visit.killed = True

    def close(self) -> bool:
        """Let no client in, and wait until all have left. Returns whether all have left."""
        with self._changed:
            self._url = None
            return self._changed.wait_for(lambda: not self._visits, IDLE_S)

    def end(self) -> None:
        """End all waits: the clients are to stop."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def visit(self, kind: str, do: Callable[[str], str], good: Callable[[str], bool]) -> bool:
        """Run one action when the gate is open. Returns False if it never opens again.

        good: whether an outcome is one that a client may see.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._url is not None)
            if self._ended or self._url is None:
                return False
            visit = Visit(self._url, self._dying)
            self._visits.append(visit)
        try:
            outcome = do(visit.url)
            right = good(outcome)
        except Exception as error:  # an error of any library is counted by its kind
            outcome, right = f"{type(error).__name__}: {str(error)[:80]}", False
        with self._changed:
            self._visits.remove(visit)
            if not right and visit.killed:
                outcome = "cut by a killed stage"
            elif not right:
                self.wrong[f"{kind}: {outcome}"] += 1
            self.counts[f"{kind}: {outcome}"] += 1
            self._changed.notify_all()
        if visit.killed:
            time.sleep(0.5)  # as a client waits before it tries again
        return True
