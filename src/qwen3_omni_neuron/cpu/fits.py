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
    need; slot_bytes: size of the KV caches of one slot; positions: number of the thinker's
    positions in that slot; position_bytes: size of one more position in the thinker's and in the
    talker's KV cache; most_positions: number of positions that the thinker's config allows;
    compact: whether all bfloat16 matrices are counted in 12 bits a number.
    """

    dtype: str
    tree_bytes: int
    vision_bytes: int
    slot_bytes: int
    positions: int
    position_bytes: int
    most_positions: int
    compact: bool = False

    def memory_bytes(self, slots: int = 1) -> int:
        """Return the memory of a process without images, with so many slots in use."""
        return self.tree_bytes - self.vision_bytes + slots * self.slot_bytes + PROCESS_BYTES

    def slots(self, memory_bytes: int) -> int:
        """Return how many slots fit a machine's memory, 0 where the weights do not fit."""
        return max(0, (memory_bytes - self.memory_bytes(0)) // self.slot_bytes)

    def longest(self, memory_bytes: int) -> int:
        """Return how many positions one slot can have there, 0 where the weights do not fit."""
        more = (memory_bytes - self.memory_bytes(1)) // self.position_bytes
        return max(0, min(self.positions + more, self.most_positions))


def fits_of(
    config: OmniConfig,
    context_length: int,
    talker_context_length: int,
    quantised: Mapping[str, QuantisedForm] = NOT_QUANTISED,
    predictor_dtype: str = "auto",
    compact: bool = True,
) -> list[Fit]:
    """Count every dtype that the C computes, with KV caches in float32.

    context_length, talker_context_length: positions of a slot of the thinker and of the talker.
    quantised: Checkpoint.quantised, whose numbers int8 and int4 keep. predictor_dtype: see
    CompilePlan; dtypes that do not allow it have their own. compact: whether bfloat16 matrices are
    kept in 12 bits a number, in the dtypes that have any: counted as if that lost nothing in all.
    """
    thinker = _position_bytes(config.thinker.text)
    talker = 0 if config.talker is None else _position_bytes(config.talker.text)
    slot = context_length * thinker + talker_context_length * talker
    positions = context_length, thinker + talker, config.thinker.text.max_positions
    found, (_, parts) = [], lay_out(config)
    for dtype in DTYPES:
        allowed = LIMITS.predictor_dtypes.get(dtype, (SAME,))
        numbers = dtype, predictor_dtype if predictor_dtype in allowed else allowed[0]
        is_compact = compact and dtype in LIMITS.compact_dtypes
        sizes = {
            model: model_bytes(parts, *numbers, model, quantised, is_compact)
            for model in models_of(config)
        }
        tree, vision = sum(sizes.values()), sizes["vision"]
        found.append(Fit(dtype, tree, vision, slot, *positions, compact=is_compact))
    return found


def fits_text(fits: Sequence[Fit], memory_bytes: int) -> list[str]:
    """Return a Markdown table of what fits a machine."""
    lines = [
        f"| dtype | tree, GB | memory with one conversation of {fits[0].positions} positions, GB | "
        f"conversations that fit {memory_bytes / GB:.1f} GB | the longest that fits, positions |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for fit in fits:
        slots, lacking = fit.slots(memory_bytes), fit.memory_bytes() - memory_bytes
        verdict = str(slots) if slots else f"none: {lacking / GB:.1f} GB are missing"
        memory = f"{fit.memory_bytes() / GB:.1f}"
        longest = fit.longest(memory_bytes) or "none"
        size = f"{fit.tree_bytes / GB:.1f}"
        lines.append(f"| {fit.dtype} | {size} | {memory} | {verdict} | {longest} |")
    if any(fit.compact for fit in fits):
        lines.append(
            "bfloat16 matrices count 12 bits a number; one whose numbers do not fit takes 16."
        )
    return lines


def _position_bytes(c: DecoderConfig) -> int:
    return 2 * c.layers * c.kv_heads * c.head_dim * torch.float32.itemsize
