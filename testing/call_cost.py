"""Work of one call of a decoder, counted from a checkpoint's config: nothing is measured here.

From it and a machine's measured rates follows the least time of the released model's reply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import nn

from qwen3_omni_neuron.checkpoint.modules import lay_out
from qwen3_omni_neuron.checkpoint.released import released_config
from qwen3_omni_neuron.cpu.precision import PRECISIONS, Precision, library_for, weight_form
from qwen3_omni_neuron.model.config import DecoderConfig
from testing.rates import MachineRates

# The reply whose time is counted: the prompt's rows, text tokens, frames of speech, and frames in
# one call of code2wav. bench/released.py makes it with a shorter prompt.
PROMPT, TOKENS, FRAMES, CHUNK = 128, 50, 200, 12
FRAME_S = 0.08


@dataclass(frozen=True)
class Work:
    """Bytes that one call has to read, and its multiply-adds.

    weight_bytes: each weight, counted again when needed after all others of its pass;
    distinct_bytes: each weight once. kv_bytes: keys and values of all positions, once. Only
    experts that the rows can have chosen count, and tables of rows do not count.
    """

    weight_bytes: int
    distinct_bytes: int
    kv_bytes: int
    multiply_adds: int


# A chunk of CHUNK frames; to count it on fake tensors takes seconds, and a test does.
RELEASED_CODE2WAV = Work(365_102_532, 365_102_532, 0, 30_695_301_120)


def work_of(
    part: str,
    module: nn.Module,
    c: DecoderConfig,
    dtype: str,
    rows: int,
    before: int = 0,
    passes: int = 1,
) -> Work:
    """Count the work of `rows` rows of one slot on the CPU, with logits of the last row only.

    part: "thinker", "talker" or "code_predictor", as in checkpoint.modules.Models; module: that
    part, which may be on the meta device; c: its decoder's config; dtype: one of
    cpu.precision.PRECISIONS; before: positions that the slot holds; passes: calls of the layers
    that the rows are spread over. The code predictor has a head for each
    pass.
    """
    precision = precision_of(dtype)
    weight_bytes = distinct_bytes = multiply_adds = 0
    for name, parameter in module.named_parameters():
        if "embedding" in name:
            continue
        nbytes, values = kept_bytes(precision, part, module, name), parameter.numel()
        times, runs = passes, rows
        if "head" in name:
            times = runs = 1
        elif c.moe is not None and name.endswith((".gate_up", ".down")):  # in a routed expert
            chosen = c.moe.experts_per_token
            values = values * chosen // c.moe.experts
            nbytes = nbytes * min(c.moe.experts, rows * chosen) // c.moe.experts
        weight_bytes += times * nbytes
        distinct_bytes += nbytes
        if "norm" not in name:
            multiply_adds += runs * values
    pairs = rows * before + rows * (rows + 1) // 2
    return Work(
        weight_bytes,
        distinct_bytes,
        2 * c.layers * c.kv_heads * c.head_dim * (before + rows) * precision.others.itemsize,
        multiply_adds + 2 * c.layers * c.heads * c.head_dim * pairs,
    )


def precision_of(dtype: str) -> Precision:
    """Return the types that weights are kept in here: torch's, without the C library."""
    precision = PRECISIONS[dtype]
    widened = precision.packed and library_for(dtype) is None
    return PRECISIONS["float32"] if widened else precision


def kept_bytes(precision: Precision, part: str, module: nn.Module, name: str) -> int:
    """Return the bytes of a parameter as it is kept: with padding, and with its scale in int8.

    A matrix that may be compact counts as if it were.
    """
    kept = weight_form(precision, part, module, name).layout(name)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in kept.values())


@dataclass(frozen=True)
class CallSeconds:
    """Seconds of one call of each part that a reply needs; code2wav's is for CHUNK frames."""

    prefill: float
    token: float
    talker: float
    predictor: float
    code2wav: float

    def reply(self, tokens: int = TOKENS, frames: int = FRAMES) -> float:
        """Return the seconds of a reply's calls, one after the other."""
        speech = frames * (self.talker + self.predictor) + frames / CHUNK * self.code2wav
        return self.prefill + tokens * self.token + speech

    @property
    def rtf(self) -> float:
        """Seconds of the reply of TOKENS and FRAMES for a second of its speech."""
        return self.reply() / (FRAMES * FRAME_S)


def released_limits(rates: MachineRates, dtypes: Mapping[str, str]) -> dict[str, CallSeconds]:
    """Return the least seconds of the released model's calls on a machine, by dtype.

    dtypes: the dtypes, each with that of the code predictor. A call takes what its bytes take at
    the machine's rate, or its multiply-adds, whichever is longer.
    """
    config = released_config()
    models, _ = lay_out(config, ("thinker", "talker"))
    thinker, talker = config.thinker.text, config.talker
    assert models.thinker and models.talker and models.code_predictor and talker
    groups, found = talker.code_groups, {}
    for dtype, predictor in dtypes.items():
        calls = (
            work_of("thinker", models.thinker, thinker, dtype, PROMPT),
            work_of("thinker", models.thinker, thinker, dtype, 1, PROMPT),
            work_of("talker", models.talker, talker.text, dtype, 1, PROMPT),
            work_of(
                *("code_predictor", models.code_predictor, talker.predictor, predictor, groups),
                passes=groups - 1,
            ),
            RELEASED_CODE2WAV,
        )
        limits = (
            max(
                (work.weight_bytes + work.kv_bytes) / rates.bytes_per_s,
                work.multiply_adds / rates.multiply_adds_per_s,
            )
            for work in calls
        )
        found[dtype] = CallSeconds(*limits)
    return found
