"""Settings in a checkpoint's preprocessor_config.json."""

from pathlib import Path
from typing import Any

from qwen3_omni_neuron.checkpoint.json_files import read_json, reason
from qwen3_omni_neuron.errors import CheckpointError, format_value


def read_preprocessor(folder: Path) -> dict[str, Any]:
    """Read the settings of the image processor and the feature extractor.

    Raises CheckpointError where the folder has no usable preprocessor_config.json.
    """
    path = folder / "preprocessor_config.json"
    try:
        settings = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no preprocessor_config.json.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} has no usable preprocessor_config.json: {reason(error)}. Download it again."
        ) from error
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{folder} has no usable preprocessor_config.json: it holds a "
            f"{type(settings).__name__}, not an object. Download it again."
        )
    return settings


def whole_setting(settings: dict[str, Any], name: str, default: int, most: int) -> int:
    """Return a setting that is a whole number from 1 to `most`. Raises CheckpointError."""
    value = settings.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise CheckpointError(
            f"preprocessor_config.json has {name} {format_value(value)}; a whole number from 1 to "
            f"{most} is needed."
        )
    return value


def check_served(settings: dict[str, Any], served: dict[str, Any]) -> None:
    """Raise CheckpointError where a setting differs from its only supported value."""
    for name, only in served.items():
        value = settings.get(name, only)
        if value != only:
            raise CheckpointError(
                f"preprocessor_config.json has {name} {format_value(value)}; {only!r} alone is "
                "served."
            )
