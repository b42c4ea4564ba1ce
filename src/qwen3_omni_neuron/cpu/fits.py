"""Memory of a model on the CPU by dtype: its weights, its slots, and how many fit a machine.

Counted from config.json, the headers of a quantised checkpoint and the layout of a compiled tree;
nothing is measured. Pages of a mapped tree that are used count as memory, and those of the vision
encoder are only used by images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.checkpoint.quantised import QuantisedForm
from qwen3_omni_neuron.compilation.plan import SAME, models_of
from qwen3_omni_neuron.cpu.precision import PRECISIONS
from qwen3_omni_neuron.cpu.target import LIMITS
from qwen3_omni_neuron.cpu.weights import NOT_QUANTISED, model_bytes
from qwen3_omni_neuron.model.config import DecoderConfig, OmniConfig

GB = 1e9
PROCESS_BYTES = 500_000_000  # Python, torch, the tokenizer, and the buffers of calls
DTYPES = tuple(name for name, precision in PRECISIONS.items() if precision.packed)


@dataclass(frozen=True)
class Fit:
    """Memory of one dtype.

    tree_bytes: size of its compiled tree; vision_bytes: size of the part of it that only images
    need; slot_bytes: size of the KV caches of one slot.
    """

    dtype: str
    tree_bytes: int
    vision_bytes: int
    slot_bytes: int

    def memory_bytes(self, slots: int = 1) -> int:
        """Return the memory of a process without images, with so many slots in use."""
        return self.tree_bytes - self.vision_bytes + slots * self.slot_bytes + PROCESS_BYTES

    def slots(self, memory_bytes: int) -> int:
        """Return how many slots fit a machine's memory, 0 where the weights do not fit."""
        return max(0, (memory_bytes - self.memory_bytes(0)) // self.slot_bytes)


def fits_of(
    config: OmniConfig,
    context_length: int,
    talker_context_length: int,
    quantised: Mapping[str, QuantisedForm] = NOT_QUANTISED,
) -> list[Fit]:
    """Count every dtype that the C computes, with KV caches in float32.

    context_length, talker_context_length: positions of a slot of the thinker and of the talker.
    quantised: Checkpoint.quantised, whose numbers int8 and int4 keep.
    """
    slot = _kv_bytes(config.thinker.text, context_length)
    if config.talker is not None:
        slot += _kv_bytes(config.talker.text, talker_context_length)
    found, (_, parts) = [], lay_out(config)
    for dtype in DTYPES:
        numbers = dtype, LIMITS.predictor_dtypes.get(dtype, (SAME,))[0]
        sizes = {
            model: model_bytes(parts, *numbers, model, quantised) for model in models_of(config)
        }
        found.append(Fit(dtype, sum(sizes.values()), sizes["vision"], slot))
    return found


def fits_text(fits: Sequence[Fit], positions: int, memory_bytes: int) -> list[str]:
    """Return a Markdown table of what fits a machine. positions: of a slot, for its heading."""
    lines = [
        f"| dtype | tree, GB | memory with one conversation of {positions} positions, GB | "
        f"conversations that fit {memory_bytes / GB:.1f} GB |",
        "| --- | ---: | ---: | ---: |",
    ]
    for fit in fits:
        slots, lacking = fit.slots(memory_bytes), fit.memory_bytes() - memory_bytes
        verdict = str(slots) if slots else f"none: {lacking / GB:.1f} GB are missing"
        memory = f"{fit.memory_bytes() / GB:.1f}"
        lines.append(f"| {fit.dtype} | {fit.tree_bytes / GB:.1f} | {memory} | {verdict} |")
    return lines


def _kv_bytes(c: DecoderConfig, positions: int) -> int:
    return 2 * c.layers * c.kv_heads * c.head_dim * positions * torch.float32.itemsize
