"""Text is measured before it is read, and tokenised in portions, with other threads going on."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.errors import PromptTooLongError
from qwen3_omni_neuron.prompt import messages, tokenizer
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from qwen3_omni_neuron.prompt.pieces import cut
from qwen3_omni_neuron.prompt.tokenizer import ChatTemplate, LiteralText, Tokenizer

CONTEXT = 4096
HUGE = "word and " * 1_000_000
TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}
# Blanks and line ends of many kinds, contractions, digits, punctuation, scripts without blanks,
# what NFC joins, reorders, or writes otherwise, and names of special tokens.
NASTY = (
    *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\u3000", "\x1c", "\u0085", "\u200b"),
    *("'s", "'RE", "'", "7", "12", "\u00bd", "\u2167", ".", "!?", "...", "-", "=", "(", '"'),
    *("\u5929\u6c14", "\u304c", "\u3002", "\uff0c", "\u3001", "\uff1f", "\u2026", "\u0e01\u0e35"),
    *("\u00e9", "e\u0301", "\u0301", "\u0316", "\u304b\u3099", "\u1112\u1161\u11ab", "\ud55c"),
    *("\u0915\u093f", "\u212a", "\u212b", "\u037e", "\u1fef", "\u03b9\u0308\u0301", "\u0338"),
    *("word", "hello", " the", " goodbye", "assistant", "\U0001f600", "\u200d", "\ufeff", "\ufb01"),
    *("<|im_end|>", "<|im_start|>", "<think>", "<|audio_pad|>"),
)
nasty_texts = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=3)), max_size=40)


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return Tokenizer(SPEAKING_CHECKPOINT)


@pytest.fixture(scope="module")
def prompt_builder() -> PromptBuilder:
    return PromptBuilder(SPEAKING_CHECKPOINT, read_config(SPEAKING_CHECKPOINT))


@pytest.fixture
def small_steps(monkeypatch) -> None:
    """Measures and divides short texts as otherwise only long ones are."""
    monkeypatch.setattr(tokenizer, "AT_ONCE", 0)
    monkeypatch.setattr(tokenizer, "_PORTION", 7)


def said(text: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hello"}, {"role": role, "content": text}]


class Watched:
    """A tokenizer's backend that notes each call. method: name, and characters."""

    def __init__(self, backend: Any):
        self._backend = backend
        self.calls: list[tuple[str, int]] = []

    def encode(self, text: str, **options: Any) -> Any:
        self.calls.append(("encode", len(text)))
        return self._backend.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.calls.append(("batch", sum(map(len, texts))))
        return self._backend.encode_batch_fast(texts, **options)


@pytest.mark.usefixtures("small_steps")
@given(nasty_texts)
@example(["\u1112\u1161\u11ab"] * 20)
@example(["e\u0301"] * 20)
def test_a_text_has_at_least_as_many_tokens_as_it_is_measured_to_have(parts) -> None:
    text, shipped = "".join(parts), Tokenizer(SPEAKING_CHECKPOINT)
    for encode in (shipped.encode, shipped.encode_words):
        assert shipped.least_tokens(text) <= len(encode(text))


@pytest.mark.usefixtures("small_steps")
@given(nasty_texts)
def test_a_text_in_portions_has_the_tokens_of_the_whole(parts) -> None:
    text, shipped = "".join(parts), Tokenizer(SPEAKING_CHECKPOINT)
    assert "".join(tokenizer._portions(text)) == text
    for backend, encode in (
        (shipped._backend, shipped.encode),
        (shipped._words, shipped.encode_words),
    ):
        assert encode(text) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["<a b>", "<a\nb>"])
def test_a_text_is_not_divided_within_an_added_token(name, tmp_path, small_steps) -> None:
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((SPEAKING_CHECKPOINT / file).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    plain = Tokenizer(tmp_path)
    assert plain._divides
    number = plain._backend.get_vocab_size()
    tokens = {str(number): {"content": name, "special": True, "normalized": False}}
    text = ("{" + f'"added_tokens_decoder": {tokens}' + "}").replace("'", '"')
    text = text.replace("True", "true").replace("False", "false")
    (tmp_path / "tokenizer_config.json").write_text(text.replace("\n", "\\n"))
    assert Tokenizer(tmp_path).encode(f"hello {name} " * 5).count(number) == 5


def test_a_long_text_is_tokenised_without_the_lock_and_no_further_than_it_fits(
    monkeypatch, prompt_builder
) -> None:
    """The library's methods for batches alone release the interpreter lock."""
    watched = Watched(prompt_builder._tokenizer._words)
    monkeypatch.setattr(prompt_builder._tokenizer, "_words", watched)
    prompt_builder.encode_words("word " * 200)
    assert watched.calls == [("encode", 1000)]
    watched.calls.clear()
    text = "hello " * 100_000
    whole = prompt_builder.encode_words(text)
    assert len(watched.calls) == 10 and {name for name, _ in watched.calls} == {"batch"}
    watched.calls.clear()
    some = prompt_builder.encode_words(text, most=1000)
    assert some == whole[: len(some)] and len(some) > 1000
    assert len(watched.calls) == 1


@pytest.fixture
def nothing_reads(monkeypatch) -> Iterator[None]:
    """Refuses every reading of a text whose cost is more than that of a measure."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a text that fits nothing is read")

    for owner, name in (
        (Tokenizer, "_encode"),
        (ChatTemplate, "render"),
        (LiteralText, "mark"),
        (messages, "_SURROGATE"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    yield


@pytest.mark.usefixtures("nothing_reads")
@pytest.mark.parametrize("literal_text", [False, True])
@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ([{"role": "user", "content": HUGE}], r"messages\[0\]"),
        ([{"role": "system", "content": HUGE}, *said("Hi")], r"messages\[0\]"),
        ([{"role": "user", "content": [{"type": "text", "text": HUGE}]}], r"messages\[0\].conten"),
    ],
)
def test_a_text_that_fits_nothing_is_refused_before_it_is_read(
    prompt_builder, asked, where, literal_text
) -> None:
    refused = rf"{where}\S* has \d+ characters, .* \d+ tokens or more, but only {CONTEXT} fit"
    with pytest.raises(PromptTooLongError, match=refused):
        prompt_builder.prompt(asked, most_tokens=CONTEXT, literal_text=literal_text)


def test_a_text_that_just_fills_the_context_fits(prompt_builder) -> None:
    """Measured, tokenised in portions, and counted to the last token."""
    for literal_text in (False, True):
        for text in ("hello the " * 4000, "\u4f60\u597d\u3002" * 6000, "e\u0301" * 9000):
            whole = prompt_builder.prompt(said(text), literal_text=literal_text)
            most = len(whole)
            fits = prompt_builder.prompt(said(text), most_tokens=most, literal_text=literal_text)
            assert fits.token_ids.equal(whole.token_ids)
            with pytest.raises(
                PromptTooLongError, match=rf"are {most} tokens or more, but only {most - 1} fit"
            ):
                prompt_builder.prompt(said(text), most_tokens=most - 1, literal_text=literal_text)


def test_a_session_measures_what_it_is_given(omni) -> None:
    too_long = pytest.raises(PromptTooLongError, match="tokens or more")
    with omni.session() as session:
        with too_long:
            session.append(HUGE)
        with too_long:
            session.system = HUGE
        with too_long:
            session.read({"role": "user", "content": HUGE})
        tool = {**TOOL, "function": {"name": "find", "description": HUGE}}
        with too_long:
            session.set_options(tools=[tool])
        assert not session.messages and session.system is None


def test_turns_that_fit_alone_and_not_together_are_refused_when_they_are_answered(
    checkpoint,
) -> None:
    """Not when they are computed ahead, which a caller has not asked for."""
    with Qwen3Omni.load(checkpoint, max_concurrency=1) as omni, omni.session() as session:
        most = omni.info.context_length
        for _ in range(3):
            session.append("word " * most)
            session.prepare()
            session.append_audio([0.1] * 32000, 16000)
        with pytest.raises(PromptTooLongError, match=r"the prompt has \d+ characters"):
            session.respond()


@pytest.mark.parametrize("text", ["\u3002", "word ", "word, ", "a", "Yes. No! ", ".\u201d ", "\n"])
def test_cutting_a_text_takes_a_time_that_grows_with_its_length(text) -> None:
    """Counted in the characters whose tokens are counted."""

    def counted(length: int) -> int:
        counts: list[int] = []

        def count(piece: str) -> int:
            counts.append(len(piece))
            return len(piece)

        assert "".join(cut(whole := text * (length // len(text)), 128, count)) == whole
        return sum(counts)

    assert counted(64_000) < 16 * 64_000


def test_what_is_never_spoken_in_one_piece_is_not_tokenised(omni, monkeypatch) -> None:
    watched = Watched(omni.prompt_builder._tokenizer._words)
    monkeypatch.setattr(omni.prompt_builder._tokenizer, "_words", watched)
    with pytest.raises(PromptTooLongError, match=r"\d+ tokens or more without white space"):
        omni.stream_speech("z" * 3_000_000)
    assert sum(count for _, count in watched.calls) < 1000
