"""The WebSocket client of tests and benchmarks, for the events of /v1/realtime.

`testing.realtime` is of OpenAI's client, and of the types that it has for these events.
"""

import base64
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.sync.client import ClientConnection, connect

from qwen3_omni_neuron.events.encoding import pcm16
from testing.http_client import unchecked


def opened(
    url: str, key: str | None = None, path: str = "/v1/realtime", **options: Any
) -> ClientConnection:
    """Return an open session of a server. Raises websockets' and the system's errors.

    url: as HttpClient has it; its certificate is not checked. options: those of websockets.
    """
    how: dict[str, Any] = {"max_size": None, **options}
    how["additional_headers"] = {"authorization": f"Bearer {key}"} if key else {}
    how["ssl"] = unchecked() if url.startswith("https:") else None
    return connect(f"{url.replace('http', 'ws', 1)}{path}", **how)


def send(made: ClientConnection, kind: str, **fields: Any) -> int:
    """Send an event. Returns its bytes."""
    data = json.dumps({"type": kind, **fields})
    made.send(data)
    return len(data)


def append(made: ClientConnection, samples: NDArray[np.float32]) -> None:
    """Send samples as the next ones of the session's speech."""
    send(made, "input_audio_buffer.append", audio=base64.b64encode(pcm16(samples)).decode())


def received(made: ClientConnection, wait_s: float) -> dict[str, Any]:
    """Receive an event."""
    return dict(json.loads(made.recv(timeout=wait_s)))
