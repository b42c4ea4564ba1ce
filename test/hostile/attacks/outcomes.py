"""Outcomes of an attack, and how a refusal is judged."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

ANSWERED, REFUSED, CUT, SILENT = "answered", "refused", "cut", "silent"
"""Outcomes: a whole answer, a refusal, a connection that the server closed without either, and no
reaction within the time."""
LEFT, CHECKED, FAILED = "left", "checked", "failed"
"""Outcomes: a client that disconnected by itself and a checked fact, which are always right; and an
attack that could not be carried out, which is always wrong."""

REFUSALS = frozenset((400, 401, 403, 404, 408, 411, 413, 415, 429, 431, 503))
"""Statuses of a refusal; 422 is not among them, as OpenAI answers 400."""
PROXY_REFUSALS = frozenset((405, 414, 501))
SECOND_TRY = (429, 503)  # right only with Retry-After
SHAPE = {"message", "type", "param", "code"}
CLOSES = frozenset((1000, 1002, 1003, 1007, 1008, 1009, 1012, 1013))
_INNER = re.compile(r"Traceback|File \"|\.py\b|site-packages|qwen3_omni_neuron[./]|0x[0-9a-f]{8}")
WAIT_S = 90.0
MANY_BYTES = 16 << 20  # size of a request whose refusal may take longer


@dataclass(frozen=True)
class Outcome:
    """Answer, refusal or end that one client got.

    how: ANSWERED and so on. status: HTTP status, 0 without one; or a WebSocket's close code. code:
    code of the error. wrong: what is wrong with it, empty if nothing is. late_s: time from the last
    byte to the refusal. sent_bytes: size of the request or event.
    """

    how: str
    status: int = 0
    code: str = ""
    wrong: str = ""
    late_s: float = 0.0
    sent_bytes: int = 0
    label: str = ""

    @property
    def words(self) -> str:
        """The outcome in a few words, the same for equal outcomes."""
        parts = (self.label, self.how, str(self.status or ""), self.code, self.wrong)
        return " ".join(filter(None, parts))

    @property
    def limit_s(self) -> float:
        """Time in which a refusal of a request with `sent_bytes` has to come."""
        return 3.0 if self.sent_bytes >= MANY_BYTES else 1.0


def check(holds: bool, wrong: str, label: str = "") -> Outcome:
    """Return an outcome for a fact that no answer shows. wrong: its text if the fact is false."""
    return Outcome(CHECKED, wrong="" if holds else wrong, label=label)


def wrong_of(status: int, headers: Mapping[str, str], body: bytes) -> tuple[str, str]:
    """Return the code of a refusal, and what is wrong with it: status, shape, header, or words."""
    if headers.get("server", "").startswith("nginx"):  # it refused before the server saw it
        return "", "" if status in REFUSALS | PROXY_REFUSALS else f"status {status} of the proxy"
    if status not in REFUSALS:
        return "", f"status {status}: {body[:80].decode(errors='replace')!r}"
    try:
        error = json.loads(body)["error"]
        missing = SHAPE - error.keys()
        text, code = str(error["message"]), str(error["code"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", f"not OpenAI's shape: {body[:80].decode(errors='replace')!r}"
    if missing:
        return code, f"without {', '.join(sorted(missing))}"
    if status in SECOND_TRY and "retry-after" not in headers:
        return code, f"{status} without Retry-After"
    return code, inner_of(text)


def inner_of(text: str) -> str:
    """Return the part of a message that no client should see: a stack, a path, a module; or ""."""
    found = _INNER.search(text)
    # An address differs each time.
    return f"its message has {found[0][:4]!r}" if found else ""
