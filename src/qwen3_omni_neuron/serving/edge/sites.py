"""Host names by which a server may be used, and origins of other hosts that may use it."""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from qwen3_omni_neuron.serving.openai.errors import ApiError
from qwen3_omni_neuron.serving.settings import ServerSettings


class Sites:
    """Check of the headers Host and Origin, in which a browser reports a page's true origin.

    Without keys any client may use the server. A page of any site can send requests to a server on
    loopback through its visitor's browser, and read the answers after DNS rebinding of the page's
    host name. So only known host names are accepted; an address can't be rebound.
    """

    def __init__(self, settings: ServerSettings):
        self._any_name = bool(settings.api_keys)
        self._names = {"localhost", *map(str.lower, (settings.host, *settings.allowed_hosts))}
        self._origins = settings.allowed_origins

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Refuse unknown host names, and pages of other hosts. Raises ApiError 403."""
        hosts, origins = list[str](), list[str]()
        for name, value in headers:
            if name == b"host":
                hosts.append(value.decode("latin-1").lower())
            elif name == b"origin":
                origins.append(value.decode("latin-1").lower())
        for host in hosts:
            if not self._any_name and not self._known(host):
                raise ApiError(
                    403,
                    f"this server has no keys, and {host[:100]!r} is not one of its names. Ask it "
                    "by its IP address, or allow the name with --allow-host (allowed_hosts of a "
                    "fleet).",
                    "host_not_allowed",
                )
        for origin in origins:
            if origin not in self._origins and [_host_of(origin)] != hosts:
                raise ApiError(
                    403,
                    f"a page of {origin[:100]!r} may not use this server. Allow it with "
                    "--allow-origin (allowed_origins of a fleet).",
                    "origin_not_allowed",
                )

    def _known(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:  # an unclosed bracket
            return False
        return name in self._names or _is_address(name)


def _host_of(origin: str) -> str | None:
    """Return host and port of an origin; None for `null`, the origin of a page without a host."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
