"""config.json and generation_config.json of a tiny checkpoint.

`sizes.json` has the settings in which each size differs from the released config.json:

tiny: every part of the model, and sizes that bring out mistakes (a second of speech is longer than
code2wav's window, the shared expert is wider than the routed ones). small: the released head sizes,
code groups, codebooks and upsampling. wide: every released width, with fewer layers. released: all
released sizes. speaking: the checkpoint that ships with the package.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.released import released_config_dict

_DATA = Path(__file__).parent / "data"
Size = Mapping[str, Any]
"""Settings of config.json that differ from the released ones, nested as there.

A vocab_size of None means the tokenizer's number of tokens.
"""


def read_text(name: str) -> str:
    """Return the text of a file of testing/tiny/data."""
    return (_DATA / name).read_text(encoding="utf-8")


SIZES: Mapping[str, Size] = json.loads(read_text("sizes.json"))
_TOKENS = {int(i): t for i, t in json.loads(read_text("tokenizer.json"))["named"].items()}
"""Tokens that the released config.json names, by their ids there."""


def config_dict(size: Size, token_ids: Mapping[str, int], dtype: str) -> dict[str, Any]:
    """Return the config.json of a size. token_ids: id of every token by its text."""
    config = resized(_with_ids(released_config_dict(), token_ids), size)
    text = config["thinker_config"]["text_config"]
    if text["vocab_size"] is None:
        text["vocab_size"] = -(-len(token_ids) // 64) * 64  # a multiple of 64, as released
    config["dtype"] = config["thinker_config"]["dtype"] = dtype
    return config


def generation_config_dict(token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return generation_config.json: the thinker's sampling defaults."""
    config: dict[str, Any] = json.loads(read_text("generation_config.json"))
    ids = {n: token_ids[config[n]] for n in ("eos_token_id", "pad_token_id")}
    return {**config, **ids}


def resized(settings: Mapping[str, Any], changes: Size) -> dict[str, Any]:
    """Return settings, or a size, with some of their values changed, in the order of `settings`."""
    assert changes.keys() <= settings.keys(), f"no settings {changes.keys() - settings.keys()}"
    changed = {
        name: resized(settings[name], value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return {**settings, **changed}


def _with_ids(settings: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return released settings with this tokenizer's ids of the tokens."""

    def with_id(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _with_ids(value, token_ids)
        named = name.endswith("_token_id") and value in _TOKENS
        return token_ids[_TOKENS[value]] if named else value

    return {name: with_id(name, value) for name, value in settings.items()}
