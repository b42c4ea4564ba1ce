"""Differences of a loaded model from a reference, and what rounding explains of them.

A row's difference is the length of the error over the length of the row; that of logits leaves
their mean out. Each matrix adds about the rounding of its result and weights: after n layers the
error is about sqrt(n) times as large. A code, or a likeliest token, that differs is explained if
the reference's own margin is less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.model.config import Code2WavConfig, OmniConfig
from qwen3_omni_neuron.verification.reference import Arrays, ReferenceAnswer

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
WEIGHTS = {"int8": 0.0083, "int4": 0.081}
"""Relative error of a rounded matrix: see docs/options.md."""
SAFETY = 8.0
"""How many times the expected error a row may have."""
FLOOR = 2e-5
"""Least difference that is called one: the order of sums, and functions such as exp, differ too."""
FEW = {"float32": 0.01, "bfloat16": 0.1}
"""Share of a stage's rows that may be beyond: a router that rounds may choose another expert."""
FEW_CODES = 0.02
"""Share of codes that may be beyond."""
THINKER_PROMPTS = "thinker_prefill"
"""Kind of the graphs in which the thinker reads prompts."""


@dataclass(frozen=True)
class NumberTypes:
    """Types of numbers that a model computes in: "float32" or "bfloat16".

    weights, encoders: "int8" or "int4" if the weights of decoders or encoders are rounded and the
    reference's are not.
    """

    activations: str
    predictor: str
    weights: str = ""
    encoders: str = ""


@dataclass(frozen=True)
class Difference:
    """Difference of one stage, over all questions.

    error: median of the rows; None for codes. allowed: what rounding explains of a row. beyond:
    share of the rows or codes that it does not explain. few: share that may be beyond. cosine:
    least of a row. largest: of two numbers. agreement: share of the likeliest tokens, or of codes,
    that are the reference's. sampled: of codes under the same random numbers. first: not explained.
    graph: kind of the stage's compiled graphs. steps: agreement by step of the code predictor.
    """

    stage: str
    rows: int
    error: float | None
    allowed: float
    beyond: float
    few: float
    cosine: float | None
    largest: float | None
    agreement: float | None = None
    sampled: float | None = None
    first: str = ""
    graph: str = ""
    steps: tuple[float, ...] = ()

    @property
    def holds(self) -> bool:
        """True if rounding explains the stage."""
        return (self.error is None or self.error <= self.allowed) and self.beyond <= self.few


@dataclass(frozen=True)
class JudgedStage:
    """Stage of a model.

    array: its rows in the results. layers: passed by a row. rounded: its weights are those of
    dtypes int8 and int4. predictor, encoder: what computes it.
    """

    name: str
    array: str
    layers: int
    unit: str
    graph: str
    rounded: bool = False
    predictor: bool = False
    encoder: bool = False


def stages_of(config: OmniConfig) -> list[JudgedStage]:
    """Return the stages in the order in which a fault reaches them."""
    c, talker, code2wav = config.thinker, config.talker, config.code2wav
    assert talker is not None and code2wav is not None
    accept, deep = talker.accept_hidden_layer, talker.text.layers
    below, whole = f"thinker's layers 1 to {accept}", f"thinker's {c.text.layers} layers, lm_head"
    deepest, predictor = c.text.layers, talker.predictor.layers
    head, steps = "talker's codec_head", "by steps"
    encoder, decoder = partial(JudgedStage, encoder=True), partial(JudgedStage, rounded=True)
    return [
        encoder("audio encoder", "audio", c.audio.layers, "row", "audio_encoder"),
        encoder("vision encoder", "vision", c.vision.layers, "row", "vision_encoder"),
        decoder(below, "accepted", accept, "row of media", THINKER_PROMPTS),
        decoder(whole, "thinker_logits", deepest, "token", THINKER_PROMPTS),
        decoder(f"thinker's layers, {steps}", "thinker_logits", deepest, "token", "thinker_decode"),
        JudgedStage("text projection", "text_projection", 1, "row", "text_projection"),
        JudgedStage(
            "hidden projection", "hidden_projection", 1, "row of media", "hidden_projection"
        ),
        decoder("talker's layers", "hidden", deep, "frame", "talker_prefill"),
        decoder(head, "talker_logits", deep, "frame", "talker_prefill"),
        decoder(f"talker's layers, {steps}", "hidden", deep, "frame", "talker_decode"),
        decoder(f"{head}, {steps}", "talker_logits", deep, "frame", "talker_decode"),
        decoder("code predictor", "codes", predictor, "frame", "code_predictor", predictor=True),
        JudgedStage("sum of the codes' embeddings", "feedback", 1, "frame", "code_predictor"),
        JudgedStage("code2wav", "samples", _depth(code2wav), "frame", "code2wav"),
    ]


def _depth(c: Code2WavConfig) -> int:
    """Layers and convolutions of code2wav."""
    return c.layers + 2 * len(c.upsampling_ratios) + 7 * len(c.upsample_rates)


def judge(
    config: OmniConfig,
    numbers: NumberTypes,
    pairs: Sequence[tuple[ReferenceAnswer, Arrays, Arrays]],
) -> list[Difference]:
    """Compare all stages.

    pairs: for each question, the reference, its results for the model's weights, and the model's.
    """
    wrong = [
        number
        for number, (answer, _, ours) in enumerate(pairs)
        if not np.array_equal(answer.arrays["prompt"], ours["prompt"])
    ]
    share = len(wrong) / len(pairs)
    first = f"question {wrong[0] + 1}" if wrong else ""
    prompts = Difference("prompt's tokens", len(pairs), None, 0, share, 0, None, None, first=first)
    if wrong:
        return [prompts]
    found = [prompts]
    for stage in stages_of(config):
        allowed = _allowed(stage, numbers)
        if stage.predictor:
            found.append(_codes(stage, allowed, pairs))
        elif one := _rows(stage, allowed, numbers, config, pairs):
            found.append(one)
    return found


def _allowed(stage: JudgedStage, numbers: NumberTypes) -> float:
    unit = ROUNDING[numbers.predictor if stage.predictor else numbers.activations]
    rounded = numbers.weights if stage.rounded else numbers.encoders if stage.encoder else ""
    weights = WEIGHTS.get(rounded, 0.0)
    # The predictor's input has the talker's rounding.
    given = ROUNDING[numbers.activations] if stage.predictor else 0.0
    return SAFETY * (float(np.sqrt(2 * stage.layers)) * (unit + weights) + given) + FLOOR


def _rows(
    stage: JudgedStage,
    allowed: float,
    numbers: NumberTypes,
    config: OmniConfig,
    pairs: Sequence[tuple[ReferenceAnswer, Arrays, Arrays]],
) -> Difference | None:
    """Compare rows of numbers."""
    errors, cosines, largest, first = [], [], 0.0, ""
    same: list[NDArray[np.bool_]] = []
    for number, (answer, expected, ours) in enumerate(pairs):
        theirs = expected.get(stage.array, answer.arrays.get(stage.array))
        assert theirs is not None
        right, got = _as_rows(stage, config, theirs), _as_rows(stage, config, ours[stage.array])
        rows = _rows_by_graph(stage, len(right), answer)
        if stage.array == "feedback":  # other codes have another sum
            rows = rows[(ours["greedy_codes"] == answer.arrays["codes"]).all(1)]
        if not len(rows):
            continue
        right, got = right[rows], got[rows]
        error, cosine = _row_errors(right, got)
        beyond = ~(error <= allowed)
        if stage.array.endswith("_logits"):
            name = stage.array.removesuffix("_logits")
            agree = (expected[f"{name}_top"] == ours[f"{name}_top"])[rows]
            beyond |= ~agree & ~(expected[f"{name}_margins"][rows] <= allowed)
            same.append(agree)
        errors.append(error)
        cosines.append(cosine)
        largest = max(largest, float(np.abs(right - got).max()))
        if beyond.any() and not first:
            first = f"question {number + 1}, {stage.unit} {rows[beyond.argmax()] + 1}"
        errors[-1] = np.where(beyond, np.maximum(error, np.nextafter(allowed, 1e9)), error)
    if not errors:
        return None
    every, few = np.concatenate(errors), FEW[numbers.activations]
    if numbers.activations == "bfloat16":
        few = max(few, 1 / len(every))  # one row may be, where there are few
    return Difference(
        stage.name,
        len(every),
        float(np.median(every)),
        allowed,
        float((~(every <= allowed)).mean()),
        few,
        float(np.concatenate(cosines).min()),
        largest,
        float(np.concatenate(same).mean()) if same else None,
        first=first,
        graph=stage.graph,
    )


def _rows_by_graph(stage: JudgedStage, count: int, answer: ReferenceAnswer) -> NDArray[np.int64]:
    """Return the reply's rows that the stage's graph computes; all rows for other stages.

    The first row of a reply comes from the graph for prompts, except the talker's if the prompt has
    no media: it appends the first token in a step.
    """
    rows = np.arange(count)
    if stage.array not in ("thinker_logits", "talker_logits", "hidden"):
        return rows
    of_prompt = stage.array == "thinker_logits" or len(answer.arrays["accepted"]) > 0
    return rows[int(of_prompt) :] if stage.graph.endswith("_decode") else rows[: int(of_prompt)]


def _as_rows(stage: JudgedStage, config: OmniConfig, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logits without their mean, samples by frame."""
    wide = x.astype(np.float64)
    if stage.array == "samples":
        assert config.code2wav is not None
        size = config.code2wav.frame_samples
        wide = np.pad(wide, (0, -len(wide) % size)).reshape(-1, size)
    if stage.array == "vision":  # a row with its levels
        wide = np.concatenate(wide, 1)
    return wide - wide.mean(-1, keepdims=True) if stage.array.endswith("_logits") else wide


def _row_errors(
    right: NDArray[np.float64], got: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each row's difference and cosine. Rows of nearly nothing count by the others' size."""
    sizes, ours = np.linalg.norm(right, axis=-1), np.linalg.norm(got, axis=-1)
    least = max(1e-30, 0.1 * float(np.median(sizes)))
    error = np.linalg.norm(right - got, axis=-1) / np.maximum(sizes, least)
    cosine = (right * got).sum(-1) / np.maximum(sizes * ours, 1e-30)
    return error, np.where(sizes < least, 1.0, cosine)


def _codes(
    stage: JudgedStage, allowed: float, pairs: Sequence[tuple[ReferenceAnswer, Arrays, Arrays]]
) -> Difference:
    """Compare codes among the frames whose earlier codes are the same."""
    unexplained, first = 0, ""
    # By kind: the same codes, and those compared, at each step.
    counts = np.zeros((2, 2, pairs[0][1]["greedy_margins"].shape[1]), int)
    for kind, (same_by_step, compared_by_step) in zip(("greedy", "sampled"), counts, strict=True):
        for number, (_, expected, ours) in enumerate(pairs):
            right, got = expected[f"{kind}_codes"], ours[f"{kind}_codes"]
            margins = expected[f"{kind}_margins"]
            follows = np.ones(len(right), bool)
            for step in range(margins.shape[1]):
                same = right[:, step + 1] == got[:, step + 1]
                beyond = follows & ~same & ~(margins[:, step] <= allowed)
                compared_by_step[step] += int(follows.sum())
                same_by_step[step] += int((follows & same).sum())
                unexplained += int(beyond.sum())
                if beyond.any() and not first:
                    frame = int(beyond.argmax()) + 1
                    first = f"question {number + 1}, frame {frame}, step {step + 1}, {kind}"
                follows &= same
    agreeing, compared = counts.sum(0)
    greedy, sampled = (float(one.sum() / of.sum()) for one, of in counts)
    return Difference(
        stage.name,
        int(compared.sum()),
        None,
        allowed,
        float(unexplained / compared.sum()),
        FEW_CODES,
        None,
        None,
        greedy,
        sampled,
        first,
        stage.graph,
        tuple((agreeing[compared > 0] / compared[compared > 0]).tolist()),
    )
