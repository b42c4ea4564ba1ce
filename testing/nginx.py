"""nginx by the configuration of deploy/proxy, before a server of a test."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from testing.imports import ROOT

CONFIG = ROOT / "deploy" / "proxy" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
"""Path of nginx, None where it is not installed."""
_NAMES = "/etc/letsencrypt/live/omni.example.org"
_START_S = 10.0


@contextmanager
def nginx_before(
    url: str,
    folder: Path,
    certificate: tuple[Path, Path],
    times_s: tuple[float, ...] = (10, 30, 30),
) -> Iterator[str]:
    """Run nginx before a server until the block ends. Yields its URL, of https on the loopback.

    folder: for its files. certificate: with its key. times_s: its limits for headers, parts
    of a body, and clients that do not read.
    """
    assert NGINX is not None
    port = free_port()
    text = CONFIG.read_text(encoding="utf-8")
    for old, new in (
        ("listen 80;", f"listen 127.0.0.1:{free_port()};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("server 127.0.0.1:8000;", f"server {urlsplit(url).netloc};"),
        ("client_header_timeout 10s;", f"client_header_timeout {1000 * times_s[0]:.0f}ms;"),
        ("client_body_timeout 30s;", f"client_body_timeout {1000 * times_s[1]:.0f}ms;"),
        ("send_timeout 30s;", f"send_timeout {1000 * times_s[2]:.0f}ms;"),
        (f"{_NAMES}/fullchain.pem", str(certificate[0])),
        (f"{_NAMES}/privkey.pem", str(certificate[1])),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "site.conf").write_text(text, encoding="utf-8")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {paths} include {folder}/site.conf; }}\n"
    )
    command = [NGINX, "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < end_s and process.poll() is None, "nginx did not start"
                time.sleep(0.02)
        yield f"https://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
