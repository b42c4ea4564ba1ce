"""Files that flags of `speak` name: checked before a model is loaded, and named so in errors."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from qwen3_omni_neuron.errors import InputError
from qwen3_omni_neuron.prompt.media.audio import open_audio
from qwen3_omni_neuron.prompt.media.image import load_image
from qwen3_omni_neuron.prompt.media.video import load_video

_ITEM = re.compile(r'Send it as an item of type "(\w+)" \([^)]*\)')


class GivenMedia:
    """The media of a question in their order. Errors and warnings name each by its flag.

    files: the kind ("audio", "image" or "video") and the file of each. message: the message that
    they are in, as errors name it.
    """

    def __init__(self, files: Sequence[tuple[str, str]], message: str):
        self._files, self._message = files, message

    def check(self) -> None:
        """Read the head of each file. Raises an InputError for one that can't be used."""
        with self.named_by_flags():
            for index, (kind, file) in enumerate(self._files):
                _check(kind, file, self._where(index))

    @contextmanager
    def named_by_flags(self) -> Iterator[None]:
        """Let errors of the block name the flag of a file in place of its place in the messages."""
        try:
            yield
        except InputError as error:
            raise type(error)(self.by_flags(str(error))) from error

    def by_flags(self, text: str) -> str:
        """Return an error or a warning that names files by their flags."""
        for index, (kind, file) in enumerate(self._files):
            where, flag = self._where(index), f"--{kind} {file}"
            text = text.replace(f"{where}: {file} ", f"{flag}: the file ").replace(where, flag)
        return _ITEM.sub(r"Give it with --\1", text)

    def _where(self, index: int) -> str:
        return f"{self._message}.content[{index}]"


class _ReadableError(Exception):
    """The head of an image or a video was read, and nothing of it is decoded."""


def _check(kind: str, file: str, where: str) -> None:
    """Read the head of a file. Raises an InputError that begins with `where`."""

    def stop(*_: object) -> NoReturn:
        raise _ReadableError

    try:
        if kind == "audio":
            open_audio({"audio": file}, where)
        elif kind == "image":
            load_image({"image": file}, where, stop)
        else:
            load_video({"video": file}, where, audio_rate=None, check=stop)
    except _ReadableError:
        return
