"""Text comes in whole characters."""

import pytest
from transformers import Qwen2TokenizerFast

from qwen3_omni_neuron.runtime.stream import TextStream


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> Qwen2TokenizerFast:
    return Qwen2TokenizerFast.from_pretrained(checkpoint)


def pieces(tokenizer: Qwen2TokenizerFast, ids: list[int]) -> list[tuple[str, list[int]]]:
    stream = TextStream(lambda held: tokenizer.decode(held, skip_special_tokens=True))
    return [stream.push(i) for i in (*ids, None)]


@pytest.mark.parametrize("text", ["hello", "déjà vu", "你好世界", "🙂", "🙂👩‍🚀!", "\ufffd stays"])
def test_no_character_is_cut(tokenizer, text) -> None:
    ids = tokenizer.encode(text)
    made = pieces(tokenizer, ids)
    assert "".join(piece for piece, _ in made) == text
    assert [i for _, taken in made for i in taken] == ids
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece, _ in made)
    if text == "🙂":  # it comes with the last of its tokens
        assert made == [*[("", [])] * 3, ("🙂", ids), ("", [])]


def test_an_unfinished_character_is_not_lost_and_special_tokens_give_no_text(tokenizer) -> None:
    ids = tokenizer.encode("a🙂")[:-1]
    made = pieces(tokenizer, ids)
    assert "".join(piece for piece, _ in made) == tokenizer.decode(ids)
    assert [i for _, taken in made for i in taken] == ids
    ids = tokenizer.encode("hi<|im_end|>")
    assert "".join(piece for piece, _ in pieces(tokenizer, ids)) == "hi"
