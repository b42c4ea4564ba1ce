"""Cutting of a long text into pieces that are spoken one by one."""

import random

from qwen3_omni_neuron.prompt.pieces import cut


def words(text: str) -> int:
    return len(text.split())


def test_a_piece_is_as_many_sentences_as_fit() -> None:
    for text, pieces in (
        ("One two. Three four five.", ["One two. ", "Three four five."]),
        ("One. Two. Three. Four five.", ["One. Two. Three. ", "Four five."]),
        ('He said "no." Then he left.', ['He said "no." ', "Then he left."]),
        ("It costs 3.50 today.", ["It costs 3.50 today."]),
        ("no end here\nnor is here", ["no end here\n", "nor is here"]),
        ("one two, three four five", ["one two, ", "three four five"]),
        ("one two three four five six", ["one two three four ", "five six"]),
        ("One, two three four five six. Seven.", ["One, ", "two three four five ", "six. Seven."]),
    ):
        assert cut(text, 4, words) == pieces


def test_sentences_need_no_space_where_the_script_has_none() -> None:
    text = "今天天气很好。我们去公园吧！你呢？"
    assert cut(text, 8, len) == ["今天天气很好。", "我们去公园吧！", "你呢？"]
    assert cut("今天天气很好，我们去公园", 8, len) == ["今天天气很好，", "我们去公园"]


def test_a_word_is_never_cut() -> None:
    assert cut("short " + "x" * 90 + " end", 10, len) == ["short ", "x" * 90 + " ", "end"]


def test_pieces_joined_are_the_text() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice('ab .,!?\n。，"') for _ in range(rng.randrange(60)))
        for most in (1, 3, 10):
            pieces = cut(text, most, words)
            assert "".join(pieces) == text
            assert all(words(piece) <= most for piece in pieces)
