"""Settings of the server: their bounds, and the flags that are made from them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron.cli import main, make_parser
from qwen3_omni_neuron.errors import OptionError
from qwen3_omni_neuron.serving.settings import ServerSettings


def test_wrong_settings_are_refused() -> None:
    for wrong, said in (
        ({"tls_cert": Path("cert.pem")}, "TLS needs both --tls-cert and --tls-key"),
        ({"max_body_bytes": 0}, "max_body_bytes must be an integer of 1 or more"),
        ({"body_timeout_s": 0.0}, "body_timeout_s must be a number above 0"),
        ({"requests_per_minute": 0}, "requests_per_minute must be an integer of 1 or more"),
        ({"decoder_bytes": 1}, "decoder_bytes must be an integer of 67108864 or more"),
        ({"allowed_hosts": ("http://a",)}, r"names alone, .* got \('http://a',\)"),
        ({"voice_aliases": ("marin",)}, r"NAME=VOICE, .* got \('marin',\)"),
        ({"port": 65536}, "port must be an integer from 0 to 65535"),
        ({"max_media": "3"}, "max_media must be an integer of 0 or more, got '3'."),
        ({"max_media": True}, "max_media must be an integer of 0 or more, got True."),
        ({"media_hosts": "a"}, "media_hosts must be a list of texts, got 'a'."),
    ):
        with pytest.raises(OptionError, match=said):
            ServerSettings(**wrong)


def test_a_setting_is_given_by_its_flag_or_has_its_default() -> None:
    parsed = vars(make_parser().parse_args(["serve"]))
    assert not any(parsed[name] for name in vars(ServerSettings()) if name in parsed)
    words = "--max-media-s 0.5 --allow-host a --log-content --port 81 --max-body-bytes 1e6"
    parsed = make_parser().parse_args(["serve", *words.split(), "--allow-host", "b"])
    assert (parsed.max_media_s, parsed.allowed_hosts) == (0.5, ["a", "b"])
    assert (parsed.log_content, parsed.port, parsed.max_body_bytes) == (True, 81, 1_000_000)
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--max-media", "few"])


def test_without_the_servers_packages_serve_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['pydantic'] = None; "
        "from qwen3_omni_neuron.cli import main; sys.exit(main(['serve', '--port', '81']))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install 'qwen3-omni-neuron[serve]'" in done.stderr


def test_settings_do_not_show_their_keys() -> None:
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))


def test_slots_and_positions_of_serve_are_those_of_the_load(monkeypatch) -> None:
    loads: list[dict[str, Any]] = []
    monkeypatch.setattr("qwen3_omni_neuron.cli.serve._load", lambda _, load: loads.append(load))
    run = "qwen3_omni_neuron.serving.server.Server.run"
    monkeypatch.setattr(run, lambda server: server._load() or 0)
    assert main(["serve", "--max-concurrency", "3", "--context-length", "99"]) == 0
    assert main(["serve"]) == 0
    assert (loads[0]["max_concurrency"], loads[0]["context_length"]) == (3, 99)
    assert loads[1]["max_concurrency"] == 8 and "context_length" not in loads[1]
    assert loads[1]["max_queued"] == 64
