"""bench/quality.py: what it reads, counts, refuses; and the gate of the checkpoint that ships."""

import json
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from bench import quality
from testing.command_line import InputError
from testing.results import load_results

# Measured: 43 % of the words are wrong, of espeak-ng's 66 %, against other sentences 98 %.
MOST_OF_CHANCE = 0.6


def tone(seconds: float) -> np.ndarray:
    return np.sin(np.arange(round(seconds * quality.RATE)) / 10).astype(np.float32) / 2


def test_the_longest_silence_is_within_the_speech() -> None:
    quiet = np.zeros(quality.RATE, np.float32)
    sound = np.concatenate(
        [quiet, tone(0.5), quiet[:4800], tone(0.5), quiet[:12000], tone(1), quiet]
    )
    assert quality.longest_silence_s(sound) == pytest.approx(0.5, abs=0.01)
    assert quality.longest_silence_s(quiet) == 0
    assert quality.longest_silence_s(quiet[:0]) == 0


def test_errors_are_counted_over_all_words_or_characters() -> None:
    pairs = [("Red, one!", "red one"), ("blue two yes no", "blue yes no")]
    assert quality.error_rate(pairs, "en") == pytest.approx(1 / 6)
    assert quality.error_rate([("你好吗", "你好")], "zh") == pytest.approx(1 / 3)
    with pytest.raises(InputError, match=r"'Um\.' has no words"):
        quality.error_rate([("Um.", "red")], "en")


def test_what_cannot_be_heard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.txt").write_text("\n")
    with pytest.raises(InputError, match="is empty: it needs a sentence a line"):
        quality.read_sentences(tmp_path / "s.txt")
    with pytest.raises(InputError, match=r"none\.txt can't be read"):
        quality.read_sentences(tmp_path / "none.txt")
    with pytest.raises(InputError, match="needs --recogniser-model"):
        quality.recogniser(Namespace(recogniser_url="http://h", recogniser_model=None), ["red"])
    monkeypatch.setattr(quality.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pocketsphinx is not installed"):
        quality.recogniser(Namespace(recogniser_url=None, language="en"), ["red"])
    with pytest.raises(InputError, match="hears English alone"):
        quality.recogniser(Namespace(recogniser_url=None, language="de"), ["rot"])
    assert "pip install resemblyzer" in quality.alike({})["similarity"]


class Transcriptions(BaseHTTPRequestHandler):
    """Hears the same words in every sound."""

    asked: list[tuple[str, str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.asked.append((self.path, self.headers["authorization"], body))
        answer = json.dumps({"text": "Red one."}).encode()
        self.send_response(200 if b"whisper-1" in body else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_of_openais_api_hears() -> None:
    Transcriptions.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Transcriptions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        asked = Namespace(recogniser_url=url, recogniser_model="whisper-1")
        asked.key, asked.language = "sk-own", "de"
        assert quality.recogniser(asked, [])(tone(0.1)) == "Red one."
        asked.recogniser_model = "none"
        with pytest.raises(InputError, match=url):
            quality.recogniser(asked, [])(tone(0.1))
        server.shutdown()
    path, key, body = Transcriptions.asked[0]
    assert (path, key) == ("/v1/audio/transcriptions", "Bearer sk-own")
    assert b"RIFF" in body
    assert b'name="language"\r\n\r\nde' in body


def test_pocketsphinx_is_held_to_the_words_it_has() -> None:
    pytest.importorskip("pocketsphinx", reason="no wheel of pocketsphinx for this machine")
    hear = quality.pocketsphinx(["red seven", "yellow"])
    assert set(hear(tone(0.5)).split()) <= {"red", "seven", "yellow"}
    with pytest.raises(InputError, match="dictionary has no chelsie"):
        quality.pocketsphinx(["red chelsie"])


def test_the_checkpoint_that_ships_is_understood_by_another_recogniser(tmp_path: Path) -> None:
    pytest.importorskip("pocketsphinx", reason="no wheel of pocketsphinx for this machine")
    file = tmp_path / "r.json"
    assert quality.main(["--json", str(file)]) == 0
    found = load_results(file)
    summary = found.summary
    assert len(found.rows) == 30
    assert summary["error_rate"] < MOST_OF_CHANCE * summary["chance"]
    assert summary["error_rate"] < summary["reference_wer"]
    assert {"Aiden", "Chelsie", "Ethan"} == set(summary["voices"])
    assert summary["clipped"] == 0
    assert 0 < summary["silence_s"] < 0.5
    assert 0.3 < summary["word_s"] < 1.2
