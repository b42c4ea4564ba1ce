"""`qwen3-omni-neuron compile`: compiles a checkpoint into a tree."""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_omni_neuron.checkpoint.adapters import AdapterPath
from qwen3_omni_neuron.cli import main
from qwen3_omni_neuron.cli.inspect import MB, aligned, model_row
from qwen3_omni_neuron.cli.model_arguments import add_checkpoint_argument, add_option, chosen_model
from qwen3_omni_neuron.cli.parsing import add_examples
from qwen3_omni_neuron.compilation.loading import DEFAULT_TARGET, find_target
from qwen3_omni_neuron.compilation.plan import MODELS, SETTINGS, make_plan, models_of
from qwen3_omni_neuron.compilation.runner import Outcome, Progress, compile_tree
from qwen3_omni_neuron.errors import CheckpointError, OptionError
from qwen3_omni_neuron.options import LOAD_OPTIONS

if TYPE_CHECKING:
    from qwen3_omni_neuron.compilation.manifest import ModelRecord
    from qwen3_omni_neuron.compilation.plan import CompilePlan

TRN2 = "torchneuron"  # the default of a dry run, and of the scripts in compile/
DRY_RUN_TARGETS = (TRN2, "neuron")


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(run=_compile)
    add_examples(
        parser,
        "compile --model CHECKPOINT --target cpu --dry-run",
        "compile --model CHECKPOINT --dtype int8 --out tree",
    )
    add_checkpoint_argument(parser)
    add_option(parser, LOAD_OPTIONS["adapters"])
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the compiled tree")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="compile nothing; print whether the plan fits, sizes on disk and in memory, graphs",
    )
    parser.add_argument(
        "--json", action="store_true", help="with --dry-run: print one line of JSON"
    )
    for setting in SETTINGS.values():
        add_option(parser, setting)
    parser.add_argument(
        "--instance",
        metavar="TYPE",
        help="EC2 instance for default --tp and --dry-run; default: smallest that fits --tp",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help=f"compile only this model ({', '.join(MODELS)}); repeatable",
    )
    parser.add_argument("--quiet", action="store_true", help="hide progress")


def compile_script(*models: str) -> int:
    """Run `compile` for target torchneuron as a script. Returns the exit status.

    models: names of the models to compile; none: all.
    """
    only = [word for model in models for word in ("--only", model)]
    return main(["compile", "--target", TRN2, *sys.argv[1:], *only])


def _compile(parsed: argparse.Namespace) -> int:
    if parsed.dry_run:
        return _dry_run(parsed)
    if parsed.out is None:
        raise OptionError("compile needs --out DIR or --dry-run.")
    if parsed.json:
        raise OptionError("--json needs --dry-run.")
    from qwen3_omni_neuron.checkpoint.files import resolve_checkpoint

    named = chosen_model(parsed)
    target = find_target(parsed.target or DEFAULT_TARGET)
    target.require()  # before a checkpoint is downloaded
    plan = _plan(parsed, resolve_checkpoint(named), target.limits.target)
    bar = _Bar(parsed.quiet)
    try:
        outcome = compile_tree(plan, parsed.out, target, parsed.only, bar)
    finally:
        bar.close()
    print(_table(outcome))
    if outcome.missing:
        reasons = "; ".join(f"{model}: {reason}" for model, reason in outcome.missing.items())
        print(
            f"{parsed.out} is incomplete ({reasons}). Run the command again without --only.",
            file=sys.stderr,
        )
    return 0


def _plan(parsed: argparse.Namespace, model: Path, target: str) -> "CompilePlan":
    from qwen3_omni_neuron.checkpoint.config_json import read_config

    settings = {name: getattr(parsed, name) for name in SETTINGS if name != "target"}
    limits = find_target(target).limits
    adapters = [AdapterPath.of(adapter) for adapter in parsed.adapters or ()]
    return make_plan(model, read_config(model), limits, parsed.instance, adapters, **settings)


def _dry_run(parsed: argparse.Namespace) -> int:
    from qwen3_omni_neuron.checkpoint.released import open_config

    with open_config(chosen_model(parsed)) as folder:
        plan = _plan(parsed, folder, parsed.target or TRN2)
        if plan.target in DRY_RUN_TARGETS:
            each_default = parsed.tp is None and parsed.instance is None
            lines, report = _dry_run_on_trn2(plan, parsed.instance, each_default)
        else:
            lines, report = _dry_run_here(plan, parsed.out or Path.cwd())
    print(json.dumps(report, allow_nan=False) if parsed.json else "\n".join(lines))
    return 0


def _dry_run_on_trn2(
    plan: "CompilePlan", instance: str | None, each_default: bool
) -> tuple[list[str], dict[str, Any]]:
    """Return, as text and for JSON, whether a plan fits a trn2, its sizes, and its graphs.

    instance: see neuron.graphs.memory.instances_of. each_default: use each instance's default
    degrees instead of the plan's.
    """
    from qwen3_omni_neuron.checkpoint.config_json import read_config
    from qwen3_omni_neuron.neuron.graphs import memory

    config = read_config(plan.model)
    defaults = find_target(plan.target).limits.tp if each_default else None
    instances = memory.instances_of(plan, instance, defaults)
    counted = memory.core_memory(config, plan, list(instances.values()))
    report = memory.plan_report(config, counted, instances)
    return list(memory.plan_lines(report, counted)), report


def _dry_run_here(plan: "CompilePlan", out: Path) -> tuple[list[str], dict[str, Any]]:
    from qwen3_omni_neuron.checkpoint.config_json import read_config
    from qwen3_omni_neuron.checkpoint.files import Checkpoint
    from qwen3_omni_neuron.checkpoint.modules import lay_out
    from qwen3_omni_neuron.checkpoint.quantised import read_settings
    from qwen3_omni_neuron.cpu.weights import model_bytes

    quantised = {}
    if read_settings(plan.model) is not None:
        try:
            quantised = Checkpoint(plan.model, plan.adapters).quantised
        except CheckpointError as error:  # perhaps only config.json
            print(f"counted as unquantised: {error}", file=sys.stderr)
    config = read_config(plan.model)
    _, parts = lay_out(config)
    numbers = plan.dtype, plan.predictor_dtype
    sizes = {m: model_bytes(parts, *numbers, m, quantised) for m in models_of(config)}
    rows = [("model", "dtype", "MB"), *((m, plan.dtype, f"{s / MB:.1f}") for m, s in sizes.items())]
    disk = next(folder for folder in (out, *out.parents) if folder.exists())
    tree_bytes, free = sum(sizes.values()), shutil.disk_usage(disk).free
    lines = [
        aligned([*rows, ("all", plan.dtype, f"{tree_bytes / MB:.1f}")]),
        f"\nThe disk of {out} has {free / MB:.1f} MB free.",
    ]
    return lines, {"models": sizes, "tree_bytes": tree_bytes, "free_bytes": free}


class _Bar(Progress):
    def __init__(self, quiet: bool) -> None:
        self._bar: Any = None
        self._quiet = quiet
        self._expected: Mapping[str, int] = {}
        self._done = 0

    def begins(self, expected_bytes: Mapping[str, int], reasons: Mapping[str, str]) -> None:
        from tqdm import tqdm

        if not self._quiet:
            for model, reason in reasons.items():
                print(f"{model}: to be compiled, {reason}", file=sys.stderr)
        self._expected = expected_bytes
        hidden = self._quiet or not sys.stderr.isatty()
        total = sum(expected_bytes.values())
        self._bar = tqdm(total=total, unit="B", unit_scale=True, disable=hidden)

    def advances(self, model: str, written_bytes: int) -> None:
        self._bar.set_description(model, refresh=False)
        self._show(min(written_bytes, self._expected[model]))

    def compiled(self, model: str, record: "ModelRecord") -> None:
        self._done += self._expected[model]
        self._show(0)
        if not self._quiet:
            took = f"{record.bytes / MB:.1f} MB in {record.seconds:.2f} s"
            self._bar.write(f"{model}: {took}", file=sys.stderr)

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
