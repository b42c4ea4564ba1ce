"""A checkpoint's chat template: messages -> the text of a prompt."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qwen3_omni_neuron.checkpoint.json_files import read_json, read_text, reason
from qwen3_omni_neuron.errors import CheckpointError, format_value
from qwen3_omni_neuron.prompt.tokenizer import Tokenizer


class ChatTemplate:
    """Chat template of one checkpoint, in the sandbox that transformers runs it in."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        """Read and compile the template. Raises CheckpointError if there is no usable one."""
        self._folder = folder
        self._named_tokens = tokenizer.named_tokens
        try:
            text = _read_template(folder, tokenizer.chat_template)
            environment = _environment()
            self._template = environment.from_string(text)
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(text))
        except CheckpointError:
            raise
        except Exception as error:  # Python's compiler, too, has limits of depth
            raise CheckpointError(
                f"{folder} has no usable chat template: {reason(error)}. Take the one that belongs "
                "to the checkpoint."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt's text, up to the beginning of the assistant's answer.

        tools: descriptions of functions that the reply may call.
        Raises CheckpointError where the template fails.
        """
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._named_tokens,
            )
            if not text.isascii():
                text.encode()  # half of a surrogate pair can't be tokenised
            return text
        except Exception as error:  # a template can divide by zero, or call with wrong arguments
            raise CheckpointError(
                f"the chat template of {self._folder} refuses the conversation: {reason(error)}. "
                "Take the template that belongs to the checkpoint, or another conversation."
            ) from error


class _Generation(Extension):
    """The tag `generation`, which marks replies for training: its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of a template.

    Source: transformers utils/chat_template_utils.py, _cached_compile_jinja_template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_template(folder: Path, of_tokenizer: Any) -> str:
    """Read the processor's template from one of its files, or else use the tokenizer's template."""
    jinja, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja.exists():
        return read_text(jinja)
    if legacy.exists():
        return _text_in(read_json(legacy))
    if of_tokenizer is None:
        raise CheckpointError(
            f"{folder} has no chat template: neither chat_template.jinja nor chat_template.json, "
            "nor one in tokenizer_config.json."
        )
    return _text_in({"chat_template": of_tokenizer})


def _text_in(raw: Any) -> str:
    template = raw.get("chat_template") if isinstance(raw, dict) else None
    if not isinstance(template, str):
        raise ValueError(f"chat_template is {format_value(template)}, and not a text")
    return template
