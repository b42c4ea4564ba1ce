"""Chat templates give the text that transformers gives."""

from pathlib import Path
from typing import Any

import pytest

from qwen3_omni_neuron import SPEAKING_CHECKPOINT
from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.prompt.tokenizer import ChatTemplate, Tokenizer

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
