"""config.json and generation_config.json of a tiny checkpoint, made from checkpoint/tiny/data.

`config.json` there has the released settings, in the spelling of transformers 4.x, and the text of
a token in place of its id. `sizes.json` has the settings in which each size differs from it:

tiny: every part of the model, and sizes that bring out mistakes (a second of speech is longer than
code2wav's window, the shared expert is wider than the routed ones). small: the released head sizes,
code groups, codebooks and upsampling. wide: every released width, with fewer layers. released: all
released sizes. speaking: the checkpoint that ships with the package.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from qwen3_omni_neuron.errors import OptionError

_DATA = resources.files("qwen3_omni_neuron.checkpoint.tiny") / "data"

Size = Mapping[str, Any]
"""Settings of config.json that differ from the released ones, nested as there.

A vocab_size of None means the tokenizer's number of tokens.
"""


def read_text(name: str) -> str:
    """Return the text of a file of checkpoint/tiny/data."""
    return (_DATA / name).read_text(encoding="utf-8")


SIZES: Mapping[str, Size] = json.loads(read_text("sizes.json"))


def config_dict(size: Size, token_ids: Mapping[str, int], dtype: str) -> dict[str, Any]:
    """Return the config.json of a size. token_ids: id of every token by its text.

    Raises OptionError for a setting that the released config.json does not have.
    """
    config = resized(json.loads(read_text("config.json")), size)
    text = config["thinker_config"]["text_config"]
    if text["vocab_size"] is None:
        text["vocab_size"] = -(-len(token_ids) // 64) * 64  # a multiple of 64, as released
    config["dtype"] = config["thinker_config"]["dtype"] = dtype
    return _with_ids(config, token_ids)


def generation_config_dict(token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return generation_config.json: the thinker's sampling defaults."""
    return _with_ids(json.loads(read_text("generation_config.json")), token_ids)


def resized(settings: Mapping[str, Any], changes: Size) -> dict[str, Any]:
    """Return settings, or a size, with some of their values changed, in the order of `settings`.

    Raises OptionError for a change of a setting that does not exist.
    """
    unknown = sorted(changes.keys() - settings.keys())
    if unknown:
        raise OptionError(
            f"There is no setting {unknown[0]!r} to change. There are: {', '.join(settings)}."
        )
    changed = {
        name: resized(settings[name], value) if isinstance(value, Mapping) else value
        for name, value in changes.items()
    }
    return {**settings, **changed}


def _with_ids(settings: Mapping[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return settings with the id of each token in place of its text."""

    def with_id(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _with_ids(value, token_ids)
        is_token = name.endswith("_token_id") and isinstance(value, str)
        return token_ids[value] if is_token else value

    return {name: with_id(name, value) for name, value in settings.items()}
