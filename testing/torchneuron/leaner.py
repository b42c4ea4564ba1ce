"""A checkpoint whose graphs are captured in a fraction of the tiny one's time."""

from pathlib import Path
from typing import Any

from testing.tiny import write_tiny_checkpoint
from testing.tiny.sizes import SIZES

CODE_GROUPS = 3


def write_leaner_checkpoint(folder: Path, seed: int = 1) -> Path:
    """Write a tiny checkpoint with the fewest layers, codes and stages that use all operations."""
    changes: dict[str, Any] = {
        "thinker_config": {
            "text_config": {"num_hidden_layers": 2},
            "audio_config": {"encoder_layers": 1},
            "vision_config": {"depth": 2, "deepstack_visual_indexes": [0, 1]},
        },
        "talker_config": {
            "accept_hidden_layer": 1,
            "num_code_groups": CODE_GROUPS,
            "text_config": {"num_hidden_layers": 1},
            "code_predictor_config": {"num_code_groups": CODE_GROUPS},
        },
        "code2wav_config": {
            "num_hidden_layers": 1,
            "num_quantizers": CODE_GROUPS,
            "upsampling_ratios": [2],
            "upsample_rates": [3],
        },
    }
    return write_tiny_checkpoint(folder, seed, _merged(SIZES["tiny"], changes))


def _merged(size: Any, changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(size)
    for name, value in changes.items():
        merged[name] = _merged(size[name], value) if isinstance(value, dict) else value
    return merged
