"""Differences of a loaded model from a reference, and how much rounding explains.

A row's difference is the error's length over the row's; for logits, without their mean. Each matrix
adds about its result's and weights' rounding: after n layers the error is about sqrt(n) times as
large. A different code, or likeliest token, is explained if the reference's margin is less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.compilation.plan import CompilePlan
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.verification.reference import Arrays

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
WEIGHTS = {"int8": 0.0083, "int4": 0.081}
"""Relative error of a rounded matrix: see docs/options.md."""
INPUTS = {"int8": 0.00017, "int4": 0.0055}
"""Relative error of their products on the CPU: see cpu.rounded_inputs."""
SAFETY = 8.0
"""Allowed multiple of a row's expected error."""
FLOOR = 2e-5
"""Smallest difference that counts: orders of sums and functions such as exp differ."""
FEW = {"float32": 0.01, "bfloat16": 0.1, "int4": 0.1}
"""Share of a stage's rows that may exceed it: a rounded router may choose another expert."""
FEW_CODES = 0.02
"""Share of codes that may exceed it."""
Pairs = Sequence[tuple[Arrays, Arrays]]
"""Each question's results: the reference's for the model's weights, and the model's."""


@dataclass(frozen=True)
class Difference:
    """Difference of one stage, over all questions.

    error: median of rows; None for codes. allowed: a row's error that rounding explains. beyond:
    share of rows or codes above it. few: allowed share. first: the first of them. agreement: share
    of likeliest tokens, or codes, equal to the reference's. sampled: of codes under the same noise.
    graph: kind of the stage's compiled graphs.
    """

    stage: str
    rows: int
    error: float | None
    allowed: float
    beyond: float
    few: float
    first: str
    graph: str = ""
    agreement: float | None = None
    sampled: float | None = None

    @property
    def holds(self) -> bool:
        """True if rounding explains the stage."""
        return (self.error is None or self.error <= self.allowed) and self.beyond <= self.few


@dataclass(frozen=True)
class JudgedStage:
    """Stage of a model. array: its rows in the results. layers: passed by a row."""

    name: str
    array: str
    layers: int
    graph: str


def stages_of(config: OmniConfig) -> list[JudgedStage]:
    """Return the stages in the order in which faults spread."""
    c, talker, code2wav = config.thinker, config.talker, config.code2wav
    assert talker is not None and code2wav is not None
    accept, deep, deepest = talker.accept_hidden_layer, talker.text.layers, c.text.layers
    # Layers and convolutions.
    ratios, rates = len(code2wav.upsampling_ratios), len(code2wav.upsample_rates)
    vocoder = code2wav.layers + 2 * ratios + 7 * rates
    rows = (
        ("audio encoder", "audio", c.audio.layers, "audio_encoder"),
        ("vision encoder", "vision", c.vision.layers, "vision_encoder"),
        (f"thinker's layers 1 to {accept}", "accepted", accept, "thinker_prefill"),
        (f"thinker's {deepest} layers, lm_head", "thinker_logits", deepest, "thinker_prefill"),
        ("thinker's layers, by steps", "thinker_logits", deepest, "thinker_decode"),
        ("text projection", "text_projection", 1, "text_projection"),
        ("hidden projection", "hidden_projection", 1, "hidden_projection"),
        ("talker's layers", "hidden", deep, "talker_prefill"),
        ("talker's codec_head", "talker_logits", deep, "talker_prefill"),
        ("talker's layers, by steps", "hidden", deep, "talker_decode"),
        ("talker's codec_head, by steps", "talker_logits", deep, "talker_decode"),
        ("code predictor", "codes", talker.predictor.layers, "code_predictor"),
        ("sum of the codes' embeddings", "feedback", 1, "code_predictor"),
        ("code2wav", "samples", vocoder, "code2wav"),
    )
    return [JudgedStage(*row) for row in rows]


def judge(
    config: OmniConfig, plan: CompilePlan, reference_dtype: str, rounded: bool, pairs: Pairs
) -> list[Difference]:
    """Compare all stages. rounded: the reference's weights have the plan's rounding."""
    wrong = [
        f"question {number}"
        for number, (expected, ours) in enumerate(pairs, 1)
        if not np.array_equal(expected["prompt"], ours["prompt"])
    ]
    share, first = len(wrong) / len(pairs), "".join(wrong[:1])
    found = [Difference("prompt's tokens", len(pairs), None, 0, share, 0, first)]
    if wrong:
        return found
    activations, predictor = (
        "bfloat16" if "bfloat16" in (own, reference_dtype) else "float32"
        for own in (plan.arithmetic, plan.predictor_arithmetic)
    )
    decoders = 0.0 if rounded else WEIGHTS.get(plan.dtype, 0.0)
    encoders = WEIGHTS["int8"] if decoders and plan.target == "cpu" else 0.0
    large = INPUTS["int8"] if plan.target == "cpu" and plan.dtype in INPUTS else 0.0
    layers = INPUTS[plan.dtype] if large else 0.0
    for stage in stages_of(config):
        depth, unit, weights = float(np.sqrt(2 * stage.layers)), ROUNDING[activations], 0.0
        if stage.array == "codes":
            # The predictor's input has the talker's rounding error.
            allowed = SAFETY * (depth * ROUNDING[predictor] + unit + large) + FLOOR
            found.append(_codes(stage, allowed, pairs))
            continue
        if stage.graph.endswith(("_prefill", "_decode")):
            weights = decoders + (layers if stage.graph.startswith("thinker") else large)
        elif stage.graph.endswith("_encoder"):
            weights = encoders + large
        allowed = SAFETY * depth * (unit + weights) + FLOOR
        few = FEW["int4" if layers > large and stage.graph.startswith("thinker") else activations]
        if one := _rows(stage, allowed, few, config, pairs):
            found.append(one)
    return found


def _rows(
    stage: JudgedStage, allowed: float, few: float, config: OmniConfig, pairs: Pairs
) -> Difference | None:
    errors: list[NDArray[np.float64]] = []
    beyond: list[NDArray[np.bool_]] = []
    same: list[NDArray[np.bool_]] = []
    first = ""
    for number, (expected, ours) in enumerate(pairs, 1):
        right, got = (_as_rows(stage, config, one[stage.array]) for one in (expected, ours))
        rows = _rows_by_graph(stage, len(right), len(expected["accepted"]) > 0)
        if stage.array == "feedback":  # depends on the codes
            rows = rows[(ours["greedy_codes"] == expected["codes"]).all(1)]
        if not len(rows):
            continue
        errors.append(_row_errors(right[rows], got[rows]))
        beyond.append(~(errors[-1] <= allowed))
        if stage.array.endswith("_logits"):
            name = stage.array.removesuffix("_logits")
            same.append((expected[f"{name}_top"] == ours[f"{name}_top"])[rows])
            beyond[-1] |= ~same[-1] & ~(expected[f"{name}_margins"][rows] <= allowed)
        if beyond[-1].any() and not first:
            first = f"question {number}, row {rows[beyond[-1].argmax()] + 1}"
    if not errors:
        return None
    every = np.concatenate(errors)
    if few > FEW["float32"]:
        few = max(few, 1 / len(every))  # at least one row
    share, agreement = float(np.concatenate(beyond).mean()), None
    if same:
        agreement = float(np.concatenate(same).mean())
    found = stage.name, len(every), float(np.median(every)), allowed, share, few, first
    return Difference(*found, stage.graph, agreement)


def _rows_by_graph(stage: JudgedStage, count: int, has_media: bool) -> NDArray[np.int64]:
    """Return the reply's rows that the stage's graph computes; all rows for other stages.

    A reply's first row comes from the prompt's graph, but the talker's without media from a step,
    which appends the first token.
    """
    rows = np.arange(count)
    if stage.array not in ("thinker_logits", "talker_logits", "hidden"):
        return rows
    of_prompt = int(stage.array == "thinker_logits" or has_media)
    return rows[of_prompt:] if stage.graph.endswith("_decode") else rows[:of_prompt]


def _as_rows(stage: JudgedStage, config: OmniConfig, x: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    if stage.array == "samples":
        assert config.code2wav is not None
        size = config.code2wav.frame_samples
        wide = np.pad(wide, (0, -len(wide) % size)).reshape(-1, size)
    if stage.array == "vision":  # a row with its levels
        wide = np.concatenate(wide, 1)
    return wide - wide.mean(-1, keepdims=True) if stage.array.endswith("_logits") else wide


def _row_errors(right: NDArray[np.float64], got: NDArray[np.float64]) -> NDArray[np.float64]:
    sizes = np.linalg.norm(right, axis=-1)
    least = max(1e-30, 0.1 * float(np.median(sizes)))
    errors: NDArray[np.float64] = np.linalg.norm(right - got, axis=-1) / np.maximum(sizes, least)
    return errors


def _codes(stage: JudgedStage, allowed: float, pairs: Pairs) -> Difference:
    """Compare each code whose frame's earlier codes are equal."""
    same: dict[str, list[NDArray[np.bool_]]] = {"greedy": [], "sampled": []}
    unexplained, first = 0, ""
    for kind, found in same.items():
        for number, (expected, ours) in enumerate(pairs, 1):
            agree = expected[f"{kind}_codes"] == ours[f"{kind}_codes"]  # [F, 16]; code 0 is given
            compared = np.logical_and.accumulate(agree, 1)[:, :-1]
            agree = agree[:, 1:]
            beyond = compared & ~agree & ~(expected[f"{kind}_margins"] <= allowed)
            found.append(agree[compared])
            unexplained += int(beyond.sum())
            if beyond.any() and not first:
                step, frame = np.argwhere(beyond.T)[0] + 1
                first = f"question {number}, frame {frame}, step {step}, {kind}"
    greedy, sampled = (np.concatenate(found) for found in same.values())
    count = len(greedy) + len(sampled)
    shares = float(greedy.mean()), float(sampled.mean())
    size = stage.name, count, None, allowed, unexplained / count, FEW_CODES, first
    return Difference(*size, stage.graph, *shares)
