"""Tokenizer and chat template, held against transformers on the same files."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2TokenizerFast

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.prompt.tokenizer import ChatTemplate, Tokenizer
from testing.imports import ROOT
from testing.repeats import examples
from testing.tiny.sizes import read_text
from testing.tiny.tokenizer import ROLES, SPECIAL_TOKENS, write_tokenizer
from train.vocabulary import SYSTEMS

TEXTS = [
    "",
    " ",
    "Hello, world! It's 1234 o'clock; I'LL go.",
    "user and you is\n\n  of to \t\r\n end ",
    "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n",
    "<think>twelve</think> <tool_call>",
    "e\u0301 is \u00e9, \ufb01, \u212b",
    "\u4f60\u597d \U0001f600\u200d\U0001f525 \u0927\u094d\u092f",
]
PIECES = st.one_of(st.text(max_size=12), st.sampled_from(SPECIAL_TOKENS), st.just(" the one"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def ours(folder) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder) -> Any:
    return Qwen2TokenizerFast.from_pretrained(folder)


def agree(ours: Tokenizer, theirs: Any, text: str) -> None:
    token_ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == token_ids
    for some in (token_ids, token_ids[1:], token_ids[::2]):  # also pieces of characters
        expected = theirs.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(some) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers(ours, theirs, text) -> None:
    agree(ours, theirs, text)


@given(st.lists(PIECES, max_size=6).map("".join))
@settings(max_examples=examples(300), deadline=None)
def test_tokens_of_any_text_are_those_of_transformers(ours, theirs, text) -> None:
    agree(ours, theirs, text)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_the_shipped_checkpoint_are_those_of_transformers(text) -> None:
    agree(
        Tokenizer(SPEAKING_CHECKPOINT),
        Qwen2TokenizerFast.from_pretrained(SPEAKING_CHECKPOINT),
        text,
    )


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text(ours, text) -> None:
    token_ids = ours.encode(text)
    whole = b"".join(map(ours.token_bytes, token_ids)).decode()
    assert whole == ours._backend.decode(token_ids, skip_special_tokens=False)
    assert ours.token_bytes(1 << 30) == b""


def test_a_tokenizer_saved_by_transformers_is_the_same(ours, theirs, tmp_path) -> None:
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink(missing_ok=True)
    saved = Tokenizer(tmp_path)
    for text in TEXTS:
        assert saved.encode(text) == ours.encode(text)
        assert saved.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert saved.named_tokens["audio_bos_token"] == "<|audio_start|>"
    for index in range(len(theirs)):
        assert saved.token(index) == ours.token(index) == theirs.convert_ids_to_tokens(index)


def test_added_tokens_behind_another_vocabulary_are_refused(folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"more": len(vocab)}))
    with pytest.raises(CheckpointError, match=r"has <\|endoftext\|> as token \d+, but after"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
@pytest.mark.parametrize("broken", [None, "{"])
def test_files_that_cannot_be_used_are_refused(folder, tmp_path, name, broken) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    if broken is not None:
        (tmp_path / name).write_text(broken)
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no usable tokenizer"):
        Tokenizer(tmp_path)


def test_the_shipped_template_takes_tools_and_prompts_without_them_are_as_trained(tmp_path) -> None:
    """Training has rendered the plain template, of tiny checkpoints."""
    tokenizer = Tokenizer(SPEAKING_CHECKPOINT)
    (tmp_path / "chat_template.jinja").write_text(
        read_text("chat_template.jinja"), encoding="utf-8"
    )
    trained, ours = ChatTemplate(tmp_path, tokenizer), ChatTemplate(SPEAKING_CHECKPOINT, tokenizer)
    assert (trained.takes_tools, ours.takes_tools) == (False, True)
    dice = random.Random(5)
    parts = [{"type": kind, kind: "x"} for kind in ("audio", "image", "video", "text")]
    texts = ["say red", "", 'a "quoted" word', "\n tool {{ x }}\n", *SYSTEMS]
    for _ in range(300):
        messages = [
            {
                "role": dice.choice(ROLES),
                "content": dice.choice([dice.choice(texts), dice.choices(parts, k=3)]),
            }
            for _ in range(dice.randint(1, 6))
        ]
        assert ours.render(messages) == trained.render(messages)
    answered = [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]},
        {"role": "tool", "content": '"red"'},
    ]
    as_said = [*answered[:2], {"role": "user", "content": "say red"}]
    assert ours.render(answered, [{"type": "function"}]) == trained.render(as_said)
    written = json.loads((SPEAKING_CHECKPOINT / "chat_template.json").read_text(encoding="utf-8"))
    by_training = (ROOT / "train/chat_template.jinja").read_text(encoding="utf-8")
    assert written == {"chat_template": by_training}


TEMPLATES = (
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}.",
    "{% for m in messages %}{{ m.content.replace('e', '__').upper() }}{% endfor %}",
    "{% block b %}{{ ', '.join(messages | map(attribute='content')) }}{% endblock %}",
    "{{ '%s of %05d' | format(messages[0].role, 7) }} {{ '{:>9}'.format(3) }} {{ 'x%d' % 3 }}",
    "{{ messages | tojson(indent=2) }}{{ tools | tojson }}{{ '<ä>' | tojson }}",
    "{% set n = namespace(x='') %}{% for m in messages %}{% if loop.index > 2 %}{% break %}"
    "{% endif %}{% set n.x = n.x ~ m.role %}{% endfor %}\n    {% if true %}\n{{ n.x }}{% endif %}",
    "{{ bos_token }}{% macro f(a) %}[{{ a | trim | indent(2) }}]{% endmacro %}{{ f(' a\nb ') }}",
    "{%- for m in messages %}{%- if m.role == 'system' %}{% continue %}{% endif %}\n"
    "  {{ m | tojson }}{{ dict(a='<b>') | tojson(indent=1) }}{{ eos_token }}{{ audio_bos_token }}\n"
    "{%- endfor %}",
    "{{ raise_exception('no') if not add_generation_prompt }}{{ strftime_now('%%') }}",
)
MESSAGES: list[dict[str, Any]] = [
    {"role": role, "content": f"the {role}'s sentence"} for role in ("system", "user", "assistant")
]


def rendered(folder: Path, source: str) -> str:
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate(folder, Tokenizer(SPEAKING_CHECKPOINT)).render(MESSAGES)


@pytest.mark.parametrize("source", TEMPLATES)
def test_texts_are_those_of_transformers(tmp_path, source) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    named = Tokenizer(SPEAKING_CHECKPOINT).named_tokens
    variables = {"messages": MESSAGES, "tools": None, "documents": None, **named}
    expected = _compile_jinja_template(source).render(add_generation_prompt=True, **variables)
    assert rendered(tmp_path, source) == expected


def test_a_template_that_fails_is_named_with_its_reason(tmp_path) -> None:
    for source, said in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "no usable chat template"),
        ("{{ messages | no_such_filter }}", "no usable chat template"),
    ):
        with pytest.raises(CheckpointError, match=said):
            rendered(tmp_path, source)
