"""`qwen3-omni-neuron serve`: answers over HTTP, in the shapes of OpenAI's API."""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.cli.model_arguments import (
    SHIPPED,
    add_model_arguments,
    add_option,
    introduce,
    load_arguments,
    model_or_shipped,
)
from qwen3_omni_neuron.cli.parsing import add_examples
from qwen3_omni_neuron.errors import NotInstalledError
from qwen3_omni_neuron.serving.settings import (
    KEYS_VARIABLE,
    LOOPBACK,
    SETTINGS,
    SLOTS,
    ServerSettings,
    name_of_model,
)

if TYPE_CHECKING:
    from qwen3_omni_neuron.api import Qwen3Omni


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments, ServerSettings included."""
    parser.set_defaults(run=partial(_serve, parser))
    add_examples(parser, "serve", "serve --port 8001 --host 0.0.0.0 --api-keys keys.txt")
    parser.add_argument(
        "--ray",
        type=Path,
        metavar="CONFIG",
        help="serve a Serve YAML with Ray (docs/fleet.md); excludes other arguments",
    )
    add_model_arguments(parser, SHIPPED)
    for name, setting in SETTINGS.items():
        if name == "log_content":
            text = f"{setting.help}; default: {setting.default_text}"
            parser.add_argument(setting.flag, action="store_true", help=text)
        elif setting.flag:
            keys = name == "api_keys"
            add_option(parser, replace(setting, default=None, values=None) if keys else setting)
    levels = ("debug", "info", "warning", "error", "critical")
    text = "minimum log level; default: %(default)s"
    parser.add_argument("--log-level", type=str.lower, choices=levels, default="info", help=text)
    text = "log format; default: auto (human on a terminal, else json)"
    forms = ("auto", "human", "json")
    parser.add_argument("--log-format", choices=forms, default="auto", help=text)


def _serve(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    own = [
        action.option_strings[0]
        for action in parser._actions
        if action.dest != "ray" and getattr(parsed, action.dest, action.default) != action.default
    ]
    if parsed.ray is not None and own:
        parser.error(f"all settings come from {parsed.ray}: leave out {', '.join(sorted(own))}")
    model = model_or_shipped(parsed)
    try:
        if parsed.ray is not None:
            import ray.serve  # noqa: F401

            from qwen3_omni_neuron.serving.fleet.settings import run_config

            run_config(parsed.ray)
        from qwen3_omni_neuron.serving import logs
        from qwen3_omni_neuron.serving.server import Server
    except ImportError as error:
        extra = "serve" if parsed.ray is None else "ray"
        raise NotInstalledError(
            f"the server needs {error.name}, which is not installed. Run: "
            f"pip install 'qwen3-omni-neuron[{extra}]'."
        ) from error
    given = {n: value for n, value in vars(parsed).items() if n in SETTINGS and value is not None}
    given = {"model_name": name_of_model(model)} | given
    settings = ServerSettings(**given | {"api_keys": _keys(parsed.api_keys)})
    logs.log_to_stderr(parsed.log_level, parsed.log_format)
    if settings.host not in LOOPBACK and not settings.api_keys:
        print(
            f"qwen3-omni-neuron: others may reach {settings.host} without an API key. Set "
            "--api-keys FILE.",
            file=sys.stderr,
        )
    load = load_arguments(parsed, slots=SLOTS) | {"max_queued": settings.max_queued}
    return Server(settings, partial(_load, model, load)).run()


def _load(model: str, load: Mapping[str, Any]) -> "Qwen3Omni":
    from qwen3_omni_neuron.serving.model import load_and_answer

    omni = load_and_answer(model, **load)
    introduce(omni.info)
    return omni


def _keys(file: str | None) -> tuple[str, ...]:
    from qwen3_omni_neuron.serving.edge.keys import read_keys

    if file is not None:
        return read_keys(Path(file))
    return tuple(k for key in os.environ.get(KEYS_VARIABLE, "").split(",") if (k := key.strip()))
