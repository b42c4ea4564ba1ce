"""Strings that name media: paths, file:// and data: URLs; anything else is refused by its name."""

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from qwen3_omni_neuron.errors import InputError
from qwen3_omni_neuron.prompt.media.audio import load_waveform
from qwen3_omni_neuron.prompt.media.image import load_image
from qwen3_omni_neuron.prompt.media.video import load_video
from testing.made_videos import make_video
from testing.media_cases import QUESTION_WAV, noise_image

KINDS = ("audio", "image", "video")
LOADERS: dict[str, Callable[[Any], Any]] = {
    "audio": lambda value: load_waveform({"audio": value}, 16000, "here"),
    "image": lambda value: np.asarray(load_image({"image": value}, "here")),
    "video": lambda value: load_video({"video": value}, "here", audio_rate=None).frames,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """A file of each kind, in a folder and with a name that a URL must escape."""
    folder = tmp_path_factory.mktemp("folder") / "50% größer, #1?"
    folder.mkdir()
    made = {kind: folder / f"a {kind}.bin" for kind in KINDS}
    made["audio"].write_bytes(QUESTION_WAV.read_bytes())
    noise_image(64, 48).save(made["image"], "PNG")
    made["video"].write_bytes(make_video())
    return made


def test_every_string_of_a_file_gives_what_its_path_gives(files) -> None:
    for kind in KINDS:
        file, load = files[kind], LOADERS[kind]
        expected = load(file)
        content = base64.b64encode(file.read_bytes()).decode()
        for value in (
            str(file),
            file.as_uri(),
            f"file://localhost{quote(str(file))}",
            f"FILE://{str(file).replace('%', '%25')}",  # with nothing escaped that need not be
            f"data:{kind}/any;base64,{content}",
            f"DATA:{kind}/any;name=a.bin;BASE64,{content}",
            f"data:;base64,{content}",
        ):
            assert np.array_equal(load(value), expected), value[:100]


def test_bytes_of_a_name_that_are_not_utf_8(tmp_path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.png"
    Path(os.fsdecode(name)).write_bytes(b"")
    with pytest.raises(InputError, match="is empty: 0 bytes"):
        LOADERS["image"](f"file://{tmp_path}/%FF.png")


URL = "is a URL, which is not fetched here. Download it and give its path or bytes, or use a "
URL += "server started with --allow-media-host."
FORM = "here has a data URL that is not of the form data:TYPE;base64,CONTENT."


def test_a_string_of_no_file_is_refused_in_a_sentence() -> None:
    for kind in KINDS:
        for value, said in [
            ("https://example.com/a.wav", f"here: https://example.com/a.wav {URL}"),
            ("HTTP://127.0.0.1:9/a", f"here: HTTP://127.0.0.1:9/a {URL}"),
            ("s3://bucket/a.mp4", f"here: s3://bucket/a.mp4 {URL}"),
            (f"https://example.com/{'a' * 5000}", URL),
            ("file://host/a.wav", "here: file://host/a.wav names the host host. For a local file"),
            ("file://a.wav", "here: file://a.wav names the host a.wav. For a local file use"),
            ("file:///no/such%20file", "here: /no/such file does not exist."),
            ("file:///", "here: / is not a regular file."),
            ("file:///a%00b", "can't be opened"),
            ("file:///\ud800", "can't be opened"),
            ("data:audio/wav,abc", FORM),
            ("data:", FORM),
            ("data:;base64", FORM),
            (f"data:{'a' * 5000}", FORM),
            (f"data:;base64,{'!' * 5000}", "here has a data URL whose content is not base64 ("),
            ("data:;base64,AAA", "whose content is not base64 ("),
            ("data:;base64,AAAA\nAAAA", "whose content is not base64 ("),
            ("data:;base64,\u00e4", "whose content is not base64 ("),
            ("data:;base64,", "here is empty: 0 bytes."),
            ("no:such", "here: no:such does not exist."),  # a path
        ]:
            with pytest.raises(InputError, match=re.escape(said)) as caught:
                LOADERS[kind](value)
            assert len(str(caught.value)) < 500
