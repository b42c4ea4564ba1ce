"""The text on its way to the talker, alone: its rows, its bound, its end."""

import threading
from collections.abc import Iterator

import pytest

from qwen3_omni_neuron.runtime.buffers import TokenBuffer

TTS_EOS, TTS_PAD = 90, 91


class BrokeError(Exception):
    pass


class Buffer(TokenBuffer):
    """One of three tokens that counts how often its writer was woken."""

    def __init__(self, changed: threading.Condition):
        self.woken = 0
        super().__init__(changed, self._count, TTS_EOS, TTS_PAD, capacity=3)

    def _count(self) -> None:
        self.woken += 1


@pytest.fixture
def text() -> Iterator[Buffer]:
    changed = threading.Condition(threading.RLock())
    with changed:
        yield Buffer(changed)


def test_rows_are_the_tokens_then_tts_eos_once_then_tts_pad(text: Buffer) -> None:
    for token in (0, 5, 0):
        text.put(token)
    text.close()
    rows = [text.take() for _ in range(7)]
    assert rows == [0, 5, 0, TTS_EOS, TTS_PAD, TTS_PAD, TTS_PAD]


def test_a_full_buffer_has_no_room_and_wakes_its_writer_when_it_has(text: Buffer) -> None:
    for token in range(3):
        assert text.has_space and text.may_put(1)
        text.put(token)
    assert not text.has_space and not text.may_put(1)
    assert text.woken == 0
    assert text.take() == 0
    assert text.woken == 1
    text.take()
    assert text.woken == 1, "nobody waits for more room than there was"


def test_a_writer_of_several_tokens_is_woken_when_there_is_room_for_them_all(text: Buffer) -> None:
    text.put(0)
    text.put(1)
    assert text.may_put(1) and not text.may_put(3)
    assert [(text.take(), text.woken) for _ in range(2)] == [(0, 0), (1, 1)]


def test_without_a_reader_there_is_room_for_ever(text: Buffer) -> None:
    for token in range(3):
        text.put(token)
    text.abandon()
    assert text.woken == 0, "the writer has not waited"
    for token in range(9):
        assert text.has_space
        text.put(token)
    assert not text.ready


def test_a_second_close_does_not_change_how_a_buffer_ended(text: Buffer) -> None:
    text.close()
    text.close(BrokeError())
    assert text.take() == TTS_EOS


def test_an_error_comes_before_the_text_that_is_left(text: Buffer) -> None:
    text.put(1)
    text.close(BrokeError())
    assert text.ready
    for take in (text.take, text.take_first):
        with pytest.raises(BrokeError):
            take()
