"""`qwen3-omni-neuron compile`: compiles a checkpoint into a tree."""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.cli.inspect import MB, aligned, model_row
from qwen3_omni_neuron.cli.model_arguments import add_checkpoint_argument, chosen_model, sizes
from qwen3_omni_neuron.compilation.plan import (
    DEFAULT_CONCURRENCY,
    MODELS,
    Limits,
    flag_of,
    make_plan,
)
from qwen3_omni_neuron.compilation.runner import Outcome, Progress, compile_tree
from qwen3_omni_neuron.errors import CheckpointError, OptionError
from qwen3_omni_neuron.loading import DEFAULT_TARGET, TARGETS, find_target

if TYPE_CHECKING:
    from qwen3_omni_neuron.compilation.manifest import ModelRecord
    from qwen3_omni_neuron.compilation.plan import CompilePlan

DRY_RUN_TARGETS = ("neuron", "torchneuron")  # the first is the default
REDRAW_S, REDRAW_IN_A_LOG_S = 0.1, 30.0
_SIZES = {
    "prompt_buckets": "rows of a prompt",
    "decode_buckets": "positions that a decode step looks back on",
    "patch_buckets": "patches of a picture or video frame",
    "audio_windows": "windows of 8 s at once",
    "projection_rows": "rows that the talker's projections take",
    "batches": "slots that a step renews",
    "chunk_frames": "frames the vocoder decodes",
}


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_compile)
    add_checkpoint_argument(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the tree's folder")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="compile nothing; print what each graph takes on a trn2, whether all of it fits the "
        "memory of a core, and the least time of a call; with --target cpu what each dtype takes, "
        "and what fits this machine",
    )
    limits = [target.limits for target in TARGETS.values()]
    parser.add_argument(
        "--target",
        help=f"{' or '.join(TARGETS)}; default: {DEFAULT_TARGET}, and {DRY_RUN_TARGETS[0]} for a "
        "--dry-run",
    )
    degrees = ", ".join(f"{limit.target}: {limit.degrees[0]}" for limit in limits)
    parser.add_argument("--tp", type=int, help=f"cores that share a model; {degrees}")
    core_sizes = ", ".join(f"{limit.target}: {limit.core_sizes[0]}" for limit in limits)
    parser.add_argument("--lnc", type=int, help=f"physical cores a logical one; {core_sizes}")
    parser.add_argument(
        "--profile", default="safe", help="safe, or fast: NxDI's kernels for the experts"
    )
    dtypes = dict.fromkeys(dtype for limit in limits for dtype in limit.dtypes)
    parser.add_argument("--dtype", default="auto", help=f"auto, {', '.join(dtypes)}")
    parser.add_argument(
        "--predictor-dtype",
        default="auto",
        metavar="DTYPE",
        help=f"numbers of the code predictor: auto or {_predictor_dtypes(limits)}; default: the "
        "first one",
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help="requests at a time; default: %(default)s",
    )
    parser.add_argument(
        "--context-length", type=int, metavar="N", help="positions of a slot; default: 8192"
    )
    parser.add_argument(
        "--talker-context-length", type=int, metavar="N", help="the talker's; default: 4105 more"
    )
    parser.add_argument(
        "--predictor-top-k",
        type=int,
        metavar="K",
        help=f"largest of a request; {_top_ks(limits)}",
    )
    for name, what in _SIZES.items():
        defaults = _defaults(limits, name)
        parser.add_argument(
            flag_of(name),
            type=sizes,
            dest=name,
            metavar="N,N,...",
            help=f"{what}; {defaults}",
        )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help=f"compile one model of the tree alone: {', '.join(MODELS)}; repeatable",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where an earlier run ended, which is done with or without this",
    )


def _top_ks(limits: Sequence[Limits]) -> str:
    return ", ".join(f"{limit.target}: {limit.predictor_top_k or 'any'}" for limit in limits)


def _predictor_dtypes(limits: Sequence[Limits]) -> str:
    """Return the values of --predictor-dtype by target and dtype, where there are several."""
    by_values: dict[str, list[str]] = {}
    for limit in limits:
        for dtype, values in limit.predictor_dtypes.items():
            if dtype in limit.dtypes:
                by_values.setdefault(", ".join(values), []).append(f"{limit.target} {dtype}")
    return "; ".join(f"{values} ({', '.join(of)})" for values, of in by_values.items())


def _defaults(limits: Sequence[Limits], name: str) -> str:
    """Return the default of each target that has one for a list of sizes."""
    sizes = {limit.target: limit.sizes.get(name, ()) for limit in limits}
    return "; ".join(f"{t}: {','.join(map(str, of))}" for t, of in sizes.items() if of)


def _compile(parsed: argparse.Namespace) -> int:
    """Compile what is missing. Returns the exit status."""
    from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint

    model = resolve_checkpoint(chosen_model(parsed))
    if parsed.dry_run:
        plan = _plan(parsed, model, parsed.target or DRY_RUN_TARGETS[0])
        if plan.target not in DRY_RUN_TARGETS:
            return _dry_run_here(plan, parsed.out or Path.cwd())
        return _dry_run(plan, None if parsed.tp is None else (parsed.tp,))
    if parsed.out is None:
        raise OptionError("no folder for the tree: give --out DIR, or --dry-run.")
    plan = _plan(parsed, model, parsed.target or DEFAULT_TARGET)
    bar = _Bar()
    try:
        outcome = compile_tree(plan, parsed.out, find_target(plan.target), parsed.only, bar)
    finally:
        bar.close()
    print(_table(outcome))
    if outcome.missing:
        reasons = "; ".join(f"{model}: {reason}" for model, reason in outcome.missing.items())
        print(
            f"{parsed.out} is not complete yet ({reasons}). Run the command again without --only.",
            file=sys.stderr,
        )
    return 0


def _plan(parsed: argparse.Namespace, model: Path, target: str) -> "CompilePlan":
    from qwen3_omni_neuron.checkpoint.config_json import read_config

    names = (
        *("tp", "lnc", "profile", "dtype", "max_concurrency", "context_length"),
        *("talker_context_length", "predictor_top_k", "predictor_dtype"),
    )
    settings: dict[str, Any] = {name: getattr(parsed, name) for name in (*names, *_SIZES)}
    return make_plan(model, read_config(model), find_target(target).limits, **settings)


def _dry_run(plan: "CompilePlan", degrees: tuple[int, ...] | None) -> int:
    """Print the sizes and least times of a plan on a trn2.

    degrees: tensor parallelism degrees; None: 4 and 8, for one chip and for two.
    """
    from qwen3_omni_neuron.checkpoint.config_json import read_config
    from qwen3_omni_neuron.neuron.graphs.dry_run import TP_DEGREES, dry_run, dry_run_text

    print(dry_run_text(dry_run(read_config(plan.model), plan, degrees or TP_DEGREES)))
    return 0


def _dry_run_here(plan: "CompilePlan", out: Path) -> int:
    """Print what each dtype takes on the CPU, and what fits this machine and the disk of `out`."""
    from qwen3_omni_neuron.checkpoint.config_json import read_config
    from qwen3_omni_neuron.checkpoint.files import Checkpoint
    from qwen3_omni_neuron.checkpoint.quantised import read_settings
    from qwen3_omni_neuron.cpu.fits import GB, fits_of, fits_text
    from qwen3_omni_neuron.cpu.memory import memory_bytes

    quantised = {}
    if read_settings(plan.model) is not None:
        try:
            quantised = Checkpoint(plan.model).quantised
        except CheckpointError as error:  # the folder may have config.json alone
            print(f"counted as if it were not quantised: {error}", file=sys.stderr)
    lengths = plan.context_length, plan.talker_context_length
    fits = fits_of(read_config(plan.model), *lengths, quantised, plan.predictor_dtype)
    print("\n".join(fits_text(fits, memory_bytes())))
    disk = next(folder for folder in (out, *out.parents) if folder.exists())
    free = shutil.disk_usage(disk).free
    names = ", ".join(fit.dtype for fit in fits if fit.tree_bytes <= free)
    print(f"\nThe disk of {out} has {free / GB:.1f} GB free, for a tree in {names or 'no dtype'}.")
    return 0


class _Bar(Progress):
    """Progress bar on stderr: bytes written, elapsed and remaining time."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._expected: Mapping[str, int] = {}
        self._done = 0

    def begins(self, expected_bytes: Mapping[str, int], reasons: Mapping[str, str]) -> None:
        from tqdm import tqdm

        for model, reason in reasons.items():
            print(f"{model}: to be compiled, {reason}", file=sys.stderr)
        self._expected = expected_bytes
        self._bar = tqdm(
            total=sum(expected_bytes.values()),
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            mininterval=REDRAW_S if sys.stderr.isatty() else REDRAW_IN_A_LOG_S,
            disable=not expected_bytes,
        )

    def advances(self, model: str, written_bytes: int) -> None:
        self._bar.set_description(model, refresh=False)
        self._show(min(written_bytes, self._expected[model]))

    def compiled(self, model: str, record: "ModelRecord") -> None:
        self._done += self._expected[model]
        self._show(0)
        self._bar.write(
            f"{model}: {record.bytes / MB:.1f} MB in {record.seconds:.2f} s", file=sys.stderr
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self, written_bytes: int) -> None:
        self._bar.update(self._done + written_bytes - self._bar.n)


def _table(outcome: Outcome) -> str:
    rows = [("model", "bucket", "seconds", "MB")]
    for model, record in outcome.records.items():
        seconds = f"{record.seconds:.2f}" if model in outcome.compiled else "kept"
        rows.append(model_row(model, record, seconds))
    return aligned(rows)
