"""The documents' tables of options, made from the options themselves."""

import inspect
from collections.abc import Sequence

from qwen3_omni_neuron.api import Qwen3Omni
from qwen3_omni_neuron.options import REQUEST_OPTIONS, LoadArguments, Option, options_of


def request_option_table() -> str:
    """Return the options of a request as a Markdown table."""
    return _table(REQUEST_OPTIONS)


def load_option_table() -> str:
    """Return the keyword arguments of `Qwen3Omni.load` as a Markdown table."""
    parameters = inspect.signature(Qwen3Omni.load).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return _table(options_of(LoadArguments, defaults))


def _table(options: Sequence[Option]) -> str:
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for option in options:
        meaning = option.doc.help
        if option.doc.values is not None:
            meaning += f"; {option.doc.values.phrase}"
        lines.append(f"| `{option.name}` | {option.default_text} | {meaning} |")
    return "\n".join(lines) + "\n"
