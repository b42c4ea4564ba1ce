"""Error of rounded weights: of matrices, of logits over given inputs, and of what is heard.

    python -m bench.quantisation --size small --json quantisation.json
    python -m bench.quantisation --model src/qwen3_omni_neuron/speaking_checkpoint --assess 100

Computed by the modules in torch, in float32, over the weights that the C computes with in each
dtype (cpu.precision), their inputs rounded as there, and over other choices of numbers. A format is
named by its bits and by the inputs that share a scale: int8/32 has one for each 32 inputs, int8 one
for each output. One choice rounds no weight but what each layer returns, to bfloat16.

Without --model: a checkpoint of random weights, its inputs random, too; once more with weights of
heavy tails, and once more with the activations that were published for the real code predictor
(testing.tiny.outlier). Random weights are no measure of a dtype: their figures
are for comparison of formats. With --model, which is a checkpoint of train/train.py: sampled
float32 replies to questions of train.assess. Each model gets the inputs that float32 gives it.

Rows of measure "matrix": weights (stored, tails, outlier), model, matrix, format,
relative_error (root mean square). Of measure "fp8": the same error of formats of the thinker's
matrices against what these are when published in FP8, with a scale for a row or a block. Of measure
"logits": weights, model, layers, down and head (their formats), encoders, residual, dtypes
that are like this, inputs, positions; kl_mean, its standard error and kl_max, the divergence of the
probabilities from float32's, in nats; agreement and drawn, the shares of positions with the same
likeliest token, and with the same token drawn by the same noise from top-k 50 and top-p 0.8. The
code predictor's positions are 15 a frame.
Of measure "encoder": model, format of its matrices, relative_error of the rows that it gives.
Of the measures "frames" and "replies", over the outlier: numbers, or talker and predictor (their
arithmetic and weights, see bench/quantising/arithmetic.py); of frames over float32's inputs the
share with float32's codes and the share of codes, greedy and with the same noise; of
replies whose codes are fed back, the mean of the first frame that differs (or their length), and
the share in which none does. Of measure "speech", with --assess: dtype, and each figure of
train.assess with the interval of 95 %.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common.models import add_size_argument, made_checkpoint
from bench.quantising.cases import (
    Rows,
    Weights,
    decoder_logits,
    encoded,
    float32_replies,
    predictor_logits,
    random_inputs,
    talker_inputs,
    thinker_inputs,
)
from bench.quantising.codes import TOP_K, TOP_P, frame_rows, gumbel, loop_rows
from bench.quantising.rounding import (
    BFLOAT16,
    CHOICES,
    ENCODER_CHOICES,
    FP8_BLOCKS,
    INT8,
    INT8_32,
    ROWS_AT_ONCE,
    SPOKEN_CHOICES,
    STORED,
    Choice,
    RelativeErrors,
    as_fp8,
)
from qwen3_omni_neuron import Qwen3Omni
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.model.code_predictor import sample_top, top_p_limits
from qwen3_omni_neuron.model.config import OmniConfig
from qwen3_omni_neuron.model.torch_threads import one_torch_thread
from testing.command_line import (
    Figures,
    InputError,
    Row,
    natural,
    parser_of,
    positive,
    run,
)
from testing.headlines import Headline, headline

POSITIONS_AT_ONCE = 64
SUMMARISED = ("kl_mean", "kl_standard_error", "kl_max", "agreement", "drawn")
WEIGHTS = ("stored", "tails", "outlier")
PARTS = ("encoders", "thinker", "talker", "predictor")
ASSESSED = ("float32", "int8", "int4")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("quantisation", __doc__)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint that speaks")
    add_size_argument(parser, "without --model: ")
    parser.add_argument("--positions", type=positive, default=512)
    for name, values in (("--weights", WEIGHTS), ("--parts", PARTS)):
        parser.add_argument(
            name, nargs="+", choices=values, default=values, help="without --model: some of them"
        )
    parser.add_argument("--assess", type=natural, default=0, help="questions for each dtype")
    parser.add_argument("--seeds", type=natural, default=2, help="replies to each question")
    parser.add_argument("--replies", type=natural, default=8, help="over the outlier, fed back")
    parser.add_argument("--frames", type=positive, default=50, help="of each of them")
    return run("quantisation", parser, measure, arguments)


def measure(options: argparse.Namespace) -> Figures:
    """Measure every choice. The summary has the logits' figures, and what is heard, by dtype."""
    if options.assess and not options.model:
        raise InputError("--assess asks a checkpoint that speaks. Name it by --model.")
    # Several threads take longer for so few rows where they wait for each other.
    with one_torch_thread():
        if not options.model:
            rows = list(random_rows(options))
            return rows, summary_of(rows), headlines_of(rows)
        config = read_config(options.model)
        if config.dtype != "bfloat16" or config.talker is None or config.code2wav is None:
            raise InputError(f"{options.model} is no checkpoint in bfloat16 that speaks.")
        rows = list(trained_rows(options.model, config, options))
        return rows, summary_of(rows), headlines_of(rows)


def random_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare every choice over random weights and inputs."""
    plain = [kind for kind in options.weights if kind != "outlier"]
    if plain:
        with made_checkpoint(options.size) as folder:
            for kind in plain:
                weights = Weights(folder, read_config(folder), tails=kind == "tails")
                yield from weights_rows(weights, kind, options.parts, options.positions)
    if "outlier" in options.weights:
        with made_checkpoint(options.size, outlier=True) as folder:
            weights = Weights(folder, read_config(folder))
            predictor = [part for part in options.parts if part == "predictor"]
            yield from weights_rows(weights, "outlier", predictor, options.positions)
            about = {"weights": "outlier", "inputs": "random"}
            yield from frame_rows(weights, about, options.positions)
            if options.replies:
                yield from loop_rows(weights, about, options.replies, options.frames)


def weights_rows(
    weights: Weights, kind: str, parts: Sequence[str], positions: int
) -> Iterator[Row]:
    """Compare every choice over some weights and random inputs."""
    about = {"weights": kind, "inputs": "random"}
    of_thinker, of_talker, codes = random_inputs(weights, positions)
    thinker, talker = [of_thinker], [of_talker]
    if "encoders" in parts:
        yield from encoder_rows(weights, about)
    if "thinker" in parts:
        yield from fp8_rows(weights, about)
        every = CHOICES["thinker"]
        yield from thinker_rows(weights, about, every, partial(given_inputs, thinker))
    if "talker" in parts:
        yield from talker_rows(weights, about, talker)
    if "predictor" in parts:
        (hidden,) = hidden_states(weights, talker)
        yield from predictor_rows(weights, about, hidden, codes)


def encoder_rows(weights: Weights, about: Row) -> Iterator[Row]:
    """Compare formats of the encoders by the rows that they give."""
    exact: dict[str, Tensor] = {}
    errors = RelativeErrors()
    for choice in ENCODER_CHOICES:
        found = encoded(weights.config, *weights.encoder_modules(choice, errors))
        exact = exact or found
        for name, rows in found.items():
            error = float((rows - exact[name]).norm() / exact[name].norm())
            of_rows = {"model": name, "format": str(choice.encoders), "relative_error": error}
            yield {"measure": "encoder", **about, **of_rows}
    audio, vision = weights.encoder_modules(STORED)
    for name, rows in encoded(weights.config, audio.bfloat16(), vision.bfloat16()).items():
        error = float((rows.float() - exact[name]).norm() / exact[name].norm())
        of_rows = {"model": name, "format": "computed in bfloat16", "relative_error": error}
        yield {"measure": "encoder", **about, **of_rows}
    yield from matrix_rows({**about, "model": "encoders"}, errors)


def fp8_rows(weights: Weights, about: Row) -> Iterator[Row]:
    """Compare formats that keep matrices published in FP8. A table of its 256 numbers is exact."""
    for published, block in FP8_BLOCKS.items():
        errors = RelativeErrors()
        for kind, matrix in weights.thinker_matrices():
            for some in matrix.split(ROWS_AT_ONCE):
                exact = as_fp8(some, *block)
                for form in (BFLOAT16, INT8, INT8_32):
                    errors.add(kind, form, exact, form.rounded(exact.bfloat16()))
        for kind, name, error in errors.items():
            found = {"matrix": kind, "format": name, "relative_error": error}
            yield {"measure": "fp8", **about, "model": "thinker", "published": published, **found}


def trained_rows(folder: Path, config: OmniConfig, options: argparse.Namespace) -> Iterator[Row]:
    """Compare every choice over replies of a trained checkpoint, and assess it."""
    weights, about = Weights(folder, config), {"weights": "stored"}
    replies, newline_id = float32_replies(folder, options.positions)
    models = weights.tables()

    def rows_of(choice: Choice, spoken: bool = False) -> list[Rows]:
        asked = [reply for reply in replies if reply.spoken or not spoken]
        return thinker_inputs(models, weights.encoders(choice), asked)

    every = {**about, "inputs": "replies to questions"}
    given = rows_of(STORED)
    yield from thinker_rows(weights, every, CHOICES["thinker"], partial(given_inputs, given))
    spoken = {**about, "inputs": "replies to spoken questions"}
    of_choice = partial(rows_of, spoken=True)
    yield from thinker_rows(weights, spoken, SPOKEN_CHOICES, of_choice)
    _, accepted = decoder_logits(weights.thinker(STORED), config.thinker.text, given)
    aloud = [(r, rows) for r, rows in zip(replies, accepted, strict=True) if len(r.codes)]
    talker = talker_inputs(config, models, aloud, newline_id)
    yield from talker_rows(weights, every, talker)
    # The last row is that of the end.
    hidden = torch.cat([states[:-1] for states in hidden_states(weights, talker)])
    codes = torch.cat([reply.codes for reply, _ in aloud])
    yield from predictor_rows(weights, every, hidden, codes)
    if options.assess:
        yield from speech_rows(folder, options.assess, options.seeds)


def given_inputs(inputs: list[Rows], choice: Choice) -> list[Rows]:
    """Return inputs that are the same for each choice."""
    return inputs


def thinker_rows(
    weights: Weights,
    about: Row,
    choices: Sequence[Choice],
    inputs_of: Callable[[Choice], list[Rows]],
) -> Iterator[Row]:
    """Compare the thinker's next tokens."""

    def logits_of(choice: Choice, errors: RelativeErrors) -> Tensor:
        thinker = weights.thinker(choice, errors)
        return decoder_logits(thinker, weights.config.thinker.text, inputs_of(choice))[0]

    yield from compared({**about, "model": "thinker"}, choices, logits_of)


def talker_rows(weights: Weights, about: Row, inputs: list[Rows]) -> Iterator[Row]:
    """Compare the talker's code 0."""
    c = weights.config.talker
    assert c is not None

    def logits_of(choice: Choice, errors: RelativeErrors) -> Tensor:
        return decoder_logits(weights.talker(choice, errors), c.text, inputs)[0]

    yield from compared({**about, "model": "talker"}, CHOICES["talker"], logits_of)


def hidden_states(weights: Weights, inputs: list[Rows]) -> list[Tensor]:
    """Return the float32 talker's hidden states of the wanted rows of each sequence."""
    assert weights.config.talker is not None
    return decoder_logits(weights.talker(STORED), weights.config.talker.text, inputs)[1]


def predictor_rows(weights: Weights, about: Row, hidden: Tensor, codes: Tensor) -> Iterator[Row]:
    """Compare codes 1 to 15."""

    def logits_of(choice: Choice, errors: RelativeErrors) -> Tensor:
        return predictor_logits(weights.predictor(choice, errors), hidden, codes)

    yield from compared({**about, "model": "code predictor"}, CHOICES["code_predictor"], logits_of)


def compared(
    about: Row, choices: Sequence[Choice], logits_of: Callable[[Choice, RelativeErrors], Tensor]
) -> Iterator[Row]:
    """Compare the logits [n, vocab] of choices with those of the first one, which rounds nothing.

    logits_of: computes them, and counts the errors of the matrices.
    """
    errors, reference = RelativeErrors(), None
    for choice in choices:
        logits = logits_of(choice, errors)
        reference = logits if reference is None else reference
        yield {
            "measure": "logits",
            **about,
            "layers": str(choice.layers),
            "down": str(choice.down or choice.layers),
            "head": str(choice.head),
            "encoders": str(choice.encoders),
            "residual": str(choice.residual).removeprefix("torch."),
            "dtypes": list(choice.dtypes),
            "positions": len(logits),
            **divergence(reference, logits),
        }
    yield from matrix_rows(about, errors)


def matrix_rows(about: Row, errors: RelativeErrors) -> Iterator[Row]:
    """Return the errors of matrices as rows."""
    for kind, form, error in errors.items():
        found = {"matrix": kind, "format": form, "relative_error": error}
        yield {"measure": "matrix", **about, **found}


def divergence(reference: Tensor, other: Tensor) -> Row:
    """Return the divergence of two models' probabilities, from their logits [n, vocab]."""
    divergences, same, drawn, draw = [], 0, 0, torch.Generator().manual_seed(0)
    blocks = (logits.split(POSITIONS_AT_ONCE) for logits in (reference, other))
    for before, after in zip(*blocks, strict=True):
        p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        same += int((before.argmax(-1) == after.argmax(-1)).sum())
        noise, top_p = gumbel(draw, *before.shape), top_p_limits([TOP_P] * len(before))
        one, other_one = (sample_top(each, noise, TOP_K, top_p) for each in (before, after))
        drawn += int((one == other_one).sum())
    every = torch.cat(divergences)
    return {
        "kl_mean": float(every.mean()),
        "kl_standard_error": float(every.std() / len(every) ** 0.5),
        "kl_max": float(every.max()),
        "agreement": same / len(reference),
        "drawn": drawn / len(reference),
    }


def speech_rows(folder: Path, count: int, seeds: int) -> Iterator[Row]:
    """Assess each dtype, through the package."""
    from train.assess import questions, replies, shares
    from train.judge import Judge

    judge, asked = Judge(), questions(count, 0)
    for dtype in ASSESSED:
        with Qwen3Omni.load(folder, dtype=dtype, max_concurrency=1) as omni:
            found = replies(omni, judge, asked, range(seeds))
        row: dict[str, Any] = {"measure": "speech", "dtype": dtype, "replies": len(found)}
        for name, share in shares(found).items():
            row |= {name: share.value, f"{name}_cases": share.of, f"{name}_95": share.interval}
        yield row


def headlines_of(rows: Sequence[Row]) -> list[Headline]:
    """Return the error of int8 and int4 matrices, or the share of right replies of each dtype."""
    spoken = [row for row in rows if row["measure"] == "speech"]
    if spoken:
        return [
            headline(f"right text, {row['dtype']}", [row.get("replies_right")], "%")
            for row in spoken
        ]
    matrices = [row for row in rows if row["measure"] == "matrix"]
    formats = sorted({row["format"] for row in matrices})
    return [
        headline(
            f"error of a matrix, {name}",
            [row["relative_error"] for row in matrices if row["format"] == name],
            "%",
        )
        for name in formats
    ]


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the logits' figures by weights, inputs, model and formats; what is heard by dtype."""
    summary: dict[str, Any] = {}
    for row in rows:
        if row["measure"] == "logits":
            where = f"{row['model']}, weights {row['weights']}, {row['inputs']}"
            how = f"{row['layers']}, head {row['head']}"
            if row["down"] != row["layers"]:
                how += f", down {row['down']}"
            if row["encoders"] != "bfloat16":
                how += f", encoders {row['encoders']}"
            if row["residual"] != "float32":
                how += f", residual {row['residual']}"
            figures = {name: row[name] for name in SUMMARISED}
            summary.setdefault(where, {})[how] = figures
        elif row["measure"] == "frames":
            figures = {k: v for k, v in row.items() if k.endswith(("_frames", "_codes"))}
            summary.setdefault(f"frames, {row['model']}", {})[row["numbers"]] = figures
        elif row["measure"] == "replies":
            figures = {k: v for k, v in row.items() if k.endswith(("_first", "_same"))}
            how = f"talker {row['talker']}, predictor {row['predictor']}"
            summary.setdefault("replies", {})[how] = figures
        elif row["measure"] == "speech":
            heard = {k: v for k, v in row.items() if k not in ("measure", "dtype")}
            summary.setdefault("speech", {})[row["dtype"]] = heard
    return summary


if __name__ == "__main__":
    sys.exit(main())
