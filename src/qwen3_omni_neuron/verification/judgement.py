"""Differences of a loaded model from a reference, and what rounding explains of them.

A row's difference is the length of the error over the length of the row; that of logits leaves
their mean out. Each matrix that a row passes adds about the rounding of its own result and weights,
independent of the others', so that after n layers the error is about sqrt(n) times as large.

A code, or a likeliest token, that differs is explained where the reference's own margin is less
than what this error can move.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.model.config import Code2WavConfig, OmniConfig
from qwen3_omni_neuron.verification.reference import Answer, Arrays

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


@dataclass(frozen=True)
class Numbers:
    """Types of numbers that a model computes in.

    activations, predictor: "float32" or "bfloat16". weights: "int8" or "int4" where the
    decoders' weights are rounded and the reference's are not, else "".
    """

    activations: str
    predictor: str
    weights: str = ""


@dataclass(frozen=True)
class Difference:
    """Difference of one stage, over all questions.

    error: median of the rows; None for codes. allowed: what rounding explains of a row. beyond:
    share of the rows or codes that it does not explain. few: share that may be beyond. cosine:
    least of a row. largest: largest difference of two numbers. agreement: share of the likeliest
    tokens, or of codes, that are the reference's; None where there are none. sampled: share of
    codes under the same random numbers. first: the first row or code that is not explained, ""
    where there is none.
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

    @property
    def holds(self) -> bool:
        """True if rounding explains the stage."""
        return (self.error is None or self.error <= self.allowed) and self.beyond <= self.few


@dataclass(frozen=True)
class Stage:
    """Stage of a model, and its judgement.

    array: its rows in the results. layers: layers that a row has passed. rounded: whether the
    weights of dtypes int8 and int4 are in it. predictor: whether the code predictor computes it.
    """

    name: str
    array: str
    layers: int
    unit: str
    rounded: bool = False
    predictor: bool = False


def stages_of(config: OmniConfig) -> list[Stage]:
    """Return the stages in the order in which a fault reaches them."""
    c, talker, code2wav = config.thinker, config.talker, config.code2wav
    assert talker is not None and code2wav is not None
    accept, deep = talker.accept_hidden_layer, talker.text.layers
    below, whole = f"thinker's layers 1 to {accept}", f"thinker's {c.text.layers} layers, lm_head"
    return [
        Stage("audio encoder", "audio", c.audio.layers, "row"),
        Stage("vision encoder", "vision", c.vision.layers, "row"),
        Stage(below, "accepted", accept, "row of media", rounded=True),
        Stage(whole, "thinker_logits", c.text.layers, "token", rounded=True),
        Stage("text projection", "text_projection", 1, "row"),
        Stage("hidden projection", "hidden_projection", 1, "row of media"),
        Stage("talker's layers", "hidden", deep, "frame", rounded=True),
        Stage("talker's codec_head", "talker_logits", deep, "frame", rounded=True),
        Stage("code predictor", "codes", talker.predictor.layers, "frame", True, predictor=True),
        Stage("sum of the codes' embeddings", "feedback", 1, "frame"),
        Stage("code2wav", "samples", _depth(code2wav), "frame"),
    ]


def _depth(c: Code2WavConfig) -> int:
    """Return how many layers and convolutions a sample of code2wav passes."""
    return c.layers + 2 * len(c.upsampling_ratios) + 7 * len(c.upsample_rates)


def judge(
    config: OmniConfig, numbers: Numbers, pairs: Sequence[tuple[Answer, Arrays, Arrays]]
) -> list[Difference]:
    """Compare all stages.

    pairs: for each question, the reference, its results for the weights that the model computes
    with, and the model's results.
    """
    wrong = [n for n, (a, _, ours) in enumerate(pairs) if not _same(a.arrays, ours, "prompt")]
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
        elif one := _rows(stage, allowed, FEW[numbers.activations], config, pairs):
            found.append(one)
    return found


def _allowed(stage: Stage, numbers: Numbers) -> float:
    """Return the relative error of a row that rounding explains."""
    unit = ROUNDING[numbers.predictor if stage.predictor else numbers.activations]
    weights = WEIGHTS.get(numbers.weights, 0.0) if stage.rounded else 0.0
    # The code predictor's input has the talker's rounding.
    given = ROUNDING[numbers.activations] if stage.predictor else 0.0
    return SAFETY * (float(np.sqrt(2 * stage.layers)) * (unit + weights) + given) + FLOOR


def _same(reference: Arrays, ours: Arrays, name: str) -> bool:
    return bool(np.array_equal(reference[name], ours[name]))


def _rows(
    stage: Stage,
    allowed: float,
    few: float,
    config: OmniConfig,
    pairs: Sequence[tuple[Answer, Arrays, Arrays]],
) -> Difference | None:
    """Compare rows of numbers; None where no question has any."""
    errors, cosines, largest, first = [], [], 0.0, ""
    same: list[NDArray[np.bool_]] = []
    for number, (answer, expected, ours) in enumerate(pairs):
        theirs = expected.get(stage.array, answer.arrays.get(stage.array))
        assert theirs is not None
        right, got = _as_rows(stage, config, theirs), _as_rows(stage, config, ours[stage.array])
        beyond = np.zeros(len(right), bool)
        if stage.array == "feedback":  # of other codes it is another sum
            kept = (ours["greedy_codes"] == answer.arrays["codes"]).all(1)
            right, got = right[kept], got[kept]
        if not len(right):
            continue
        error, cosine = _row_errors(right, got)
        beyond = ~(error <= allowed)
        if stage.array.endswith("_logits"):
            name = stage.array.removesuffix("_logits")
            agree = expected[f"{name}_top"] == ours[f"{name}_top"]
            beyond |= ~agree & ~(expected[f"{name}_margins"] <= allowed)
            same.append(agree)
        errors.append(error)
        cosines.append(cosine)
        largest = max(largest, float(np.abs(right - got).max()))
        if beyond.any() and not first:
            first = f"question {number + 1}, {stage.unit} {int(beyond.argmax()) + 1}"
        errors[-1] = np.where(beyond, np.maximum(error, np.nextafter(allowed, 1e9)), error)
    if not errors:
        return None
    every = np.concatenate(errors)
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
    )


def _as_rows(stage: Stage, config: OmniConfig, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return an array as rows: of logits without their mean, of samples by frame."""
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
    stage: Stage, allowed: float, pairs: Sequence[tuple[Answer, Arrays, Arrays]]
) -> Difference:
    """Compare codes step by step, each among the frames whose earlier codes are the same."""
    compared, unexplained, first = 0, 0, ""
    shares = {}
    for kind in ("greedy", "sampled"):
        agreeing = seen = 0
        for number, (_, expected, ours) in enumerate(pairs):
            right, got = expected[f"{kind}_codes"], ours[f"{kind}_codes"]
            margins = expected[f"{kind}_margins"]
            follows = np.ones(len(right), bool)
            for step in range(margins.shape[1]):
                same = right[:, step + 1] == got[:, step + 1]
                beyond = follows & ~same & ~(margins[:, step] <= allowed)
                seen += int(follows.sum())
                agreeing += int((follows & same).sum())
                unexplained += int(beyond.sum())
                if beyond.any() and not first:
                    frame = int(beyond.argmax()) + 1
                    first = f"question {number + 1}, frame {frame}, step {step + 1}, {kind}"
                follows &= same
        shares[kind] = agreeing / seen
        compared += seen
    share = unexplained / compared
    agreement = shares["greedy"], shares["sampled"]
    return Difference(
        stage.name, compared, None, allowed, share, FEW_CODES, None, None, *agreement, first
    )
