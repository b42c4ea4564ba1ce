"""A checkpoint's chat template: messages -> the text of a prompt."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from qwen3_omni_neuron.errors import CheckpointError
from qwen3_omni_neuron.prompt.tokenizer import Tokenizer


class ChatTemplate:
    """Chat template of one checkpoint, run in a sandbox because anyone may have written it.

    It gets only strings, lists and dicts from the caller.
    Source: transformers utils/chat_template_utils.py, for the names that a template may use.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        """Read and compile the template. Raises CheckpointError if there is no usable one."""
        self._folder = folder
        self._named_tokens = tokenizer.named_tokens
        try:
            text = _read_template(folder, tokenizer.chat_template)
            self._template = _compile(text)
            self.takes_tools = "tools" in find_undeclared_variables(
                self._template.environment.parse(text)
            )
        except (TemplateError, OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder} has no usable chat template: {error}.") from error

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
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._named_tokens,
            )
        except Exception as error:  # a template can divide by zero, or call with wrong arguments
            raise CheckpointError(
                f"the chat template of {self._folder} refuses the conversation: {error}. Take the "
                "template that belongs to the checkpoint, or another conversation."
            ) from error


class _PublicNamespace(Namespace):
    """Namespace whose attributes a template may set, except private ones."""

    def __init__(self, *given: Any, **attributes: Any):
        super().__init__()
        for name, value in dict(*given, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TemplateError(f"a chat template may not set the private attribute {name}")
        super().__setitem__(name, value)


def _compile(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_new_dict,
        namespace=_PublicNamespace,
    )
    return environment.from_string(text)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _new_dict(*given: Any, **items: Any) -> dict[Any, Any]:
    """Make a dict for a template, which does not get the class `dict` itself."""
    return dict(*given, **items)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_template(folder: Path, of_tokenizer: Any) -> Any:
    """Read the processor's template from one of its files, or else use the tokenizer's."""
    jinja, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja.exists():
        return jinja.read_text(encoding="utf-8")
    if legacy.exists():
        return json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
    if of_tokenizer is None:
        raise CheckpointError(
            f"{folder} has no chat template: neither chat_template.jinja nor chat_template.json, "
            "nor one in tokenizer_config.json."
        )
    return of_tokenizer
