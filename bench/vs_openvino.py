"""One checkpoint, the same prompts and greedy settings through OpenVINO's pipeline and ours.

    python -m bench.vs_openvino --size small --json result.json

OpenVINO runs in an environment of its own (--environment; `make bench-openvino` makes it), with the
checkpoint as optimum-intel exports it, and ours from a compiled tree. Checkpoint, exports and trees
stay in --models for the next run.
Each side of each dtype is measured in processes of its own, ours and OpenVINO's in turn. Dtypes:

    float32   float32 on both sides; text, and audio to 1e-4, must be equal
    auto      what each side does unless it is told otherwise; OpenVINO's CPU plugin computes in
              bfloat16 where the CPU has it
    int8      int8 weights
    int4      int4 weights where each side has them, the rest int8; only where --dtypes names it

A reply has --text-tokens tokens and --frames frames. Figures:

    load_s           until the first request can be sent, imports included
    first_reply_s    the first whole reply after loading
    reply_s          a whole reply; ours is streamed, OpenVINO's is not, since it decodes every
                     streamed chunk alone, with gaps between them
    first_text_s     first token of that reply
    first_sample_s   first sample of a reply in chunks of one frame
    token_s          between tokens, of a reply without speech
    prefill_s        first token after --long-prompt tokens
    loaded_mb        memory of the process after loading
    peak_mb          its peak, all replies included

A row is one process, its figures the medians of its rounds, and the machine's load average before
the pair of processes (about --threads when nothing else runs); the summary has the medians of the
rows, and OpenVINO's over ours.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.common.models import add_size_argument
from bench.peers.side import Job, count_prompts
from qwen3_omni_neuron.checkpoint.config_json import read_config
from qwen3_omni_neuron.prompt.builder import PromptBuilder
from testing.command_line import Figures, InputError, Row, parser_of, positive, run
from testing.headlines import Headline, headline
from testing.tiny import write_tiny_checkpoint

ROOT = Path(__file__).parents[1]
# Arguments of the export for each dtype; without any, it keeps the checkpoint's bfloat16.
EXPORTS: dict[str, tuple[str, ...]] = {
    "float32": ("--weight-format", "fp32"),
    "auto": (),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4"),
}
DEFAULT_DTYPES = ("float32", "auto", "int8")
SHORT_PROMPT = 45  # tokens
SIDES = ("ours", "openvino")
# The checkpoint's chat template is a separate file, which the export leaves out.
CHAT_TEMPLATE = "chat_template.json"
AUDIO_TOLERANCE = 1e-4

Answer = dict[str, Any]  # see bench.peers.side.measure
TextAndAudio = tuple[list[int], list[float]]  # one reply's token ids and probes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = parser_of("vs_openvino", __doc__)
    add_size_argument(parser)
    parser.add_argument("--dtypes", type=dtypes, default=list(DEFAULT_DTYPES))
    parser.add_argument("--text-tokens", type=positive, default=24)
    parser.add_argument("--frames", type=positive, default=48)
    parser.add_argument("--long-prompt", type=positive, default=497, help="its tokens")
    parser.add_argument("--processes", type=positive, default=3, help="of each side and dtype")
    parser.add_argument("--repeats", type=positive, default=5, help="counted rounds of a process")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-openvino")
    parser.add_argument("--models", type=Path, help="default: models in --environment")
    return run("vs_openvino", parser, measure, arguments)


def dtypes(text: str) -> list[str]:
    """Parse "float32,int8"."""
    names = text.split(",")
    if unknown := set(names) - EXPORTS.keys():
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))} is none of {', '.join(EXPORTS)}"
        )
    return names


def measure(options: argparse.Namespace) -> Figures:
    """Export what is missing, then measure every dtype."""
    # Absolute, because every process starts in the repository.
    environment = options.environment.absolute()
    models = options.models.absolute() if options.models else environment / "models"
    checkpoint = models / f"{options.size}-checkpoint"
    if not (checkpoint / "config.json").exists():
        write_tiny_checkpoint(checkpoint, size=options.size)
    exports = {dtype: exported(checkpoint, dtype, environment) for dtype in options.dtypes}
    trees = {dtype: compiled(checkpoint, dtype) for dtype in options.dtypes}
    short, long = count_prompts(options.repeats)
    config = read_config(checkpoint)
    prompt_builder = PromptBuilder(checkpoint, config)
    turn_ids = {config.im_start_id, config.im_end_id}
    job = Job(
        str(checkpoint),
        "",
        "float32",
        options.threads,
        options.text_tokens,
        options.frames,
        options.repeats,
        prompts(prompt_builder, SHORT_PROMPT, short),
        prompts(prompt_builder, options.long_prompt, long),
    )
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for dtype in options.dtypes:
        ours = replace(job, dtype=dtype, compiled=str(trees[dtype]))
        theirs = replace(ours, model=str(exports[dtype]), compiled="")
        for number in range(options.processes):
            about = {"dtype": dtype, "process": number, "load_average": os.getloadavg()[0]}
            answers = {
                "ours": answer_of(Path(sys.executable), "ours", ours),
                "openvino": answer_of(environment / "bin" / "python", "openvino", theirs),
            }
            check_same_work(answers, ours, turn_ids)
            for side, answer in answers.items():
                versions[side] = answer["version"]
                rows.append({**about, "side": side, **medians(answer)})
    found = {dtype: compared([r for r in rows if r["dtype"] == dtype]) for dtype in options.dtypes}
    summary = {"openvino_genai_version": versions["openvino"], **found}
    return rows, summary, [line for dtype in options.dtypes for line in headlines(dtype, rows)]


def headlines(dtype: str, rows: Sequence[Row]) -> list[Headline]:
    """Return two lines about a dtype: our figures, and OpenVINO's over them."""
    alike = [row for row in rows if row["dtype"] == dtype]
    ratios, ours = compared(alike)["ratios"], [row for row in alike if row["side"] == "ours"]
    return [
        headline(
            f"{name}, {dtype}",
            [row[figure] for row in ours],
            "s",
            f"OpenVINO takes {ratios[figure]:.3g} times as long",
        )
        for name, figure in (("TTFB", "first_sample_s"), ("whole reply", "reply_s"))
    ]


def exported(checkpoint: Path, dtype: str, environment: Path) -> Path:
    """Return the folder of OpenVINO's export, which is made if it is missing."""
    folder = checkpoint.with_name(checkpoint.name.replace("checkpoint", f"openvino-{dtype}"))
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [str(environment / "bin" / "optimum-cli"), "export", "openvino"]
    command += ["--model", str(checkpoint), "--task", "text-to-audio", *EXPORTS[dtype]]
    output_of([*command, str(unfinished)], HF_HUB_OFFLINE="1")
    shutil.copy(checkpoint / CHAT_TEMPLATE, unfinished)
    return unfinished.rename(folder)


def compiled(checkpoint: Path, dtype: str) -> Path:
    """Return the folder of our compiled tree, of which what is missing or stale is compiled."""
    folder = checkpoint.with_name(checkpoint.name.replace("checkpoint", f"ours-{dtype}"))
    command = [sys.executable, "-m", "qwen3_omni_neuron", "compile", "--model", str(checkpoint)]
    command += ["--out", str(folder), "--target", "cpu", "--dtype", dtype, "--max-concurrency", "1"]
    output_of(command)
    return folder


def prompts(prompt_builder: PromptBuilder, tokens: int, count: int) -> list[str]:
    """Return `count` texts whose prompts have exactly this number of tokens.

    They differ from their first token on: each is digits, and no two digits make one token.
    """
    one_digit = prompt_builder.prompt([{"role": "user", "content": "0"}])
    digits = tokens - len(one_digit) + 1
    most_texts = 10**digits if digits > 0 else 0
    if count > most_texts:
        raise InputError(
            f"{count} different prompts of {tokens} tokens are wanted, and there are {most_texts}: "
            f"the conversation around the text has {len(one_digit) - 1}. Allow more tokens."
        )
    draw = random.Random(0)
    first_digits = min(digits, len(str(count)))
    texts = [
        f"{number:0{first_digits}d}" + "".join(draw.choices("0123456789", k=digits - first_digits))
        for number in range(count)
    ]
    for text in texts:
        found = len(prompt_builder.prompt([{"role": "user", "content": text}]))
        assert found == tokens, f"{text} has {found} tokens: a digit is not one token"
    return texts


def answer_of(python: Path, side: str, job: Job) -> Answer:
    """Measure one side in a new process."""
    output = output_of([str(python), "-m", f"bench.peers.{side}"], json.dumps(asdict(job)))
    return dict(json.loads(output.splitlines()[-1]))


def output_of(command: Sequence[str], text: str = "", **environment: str) -> str:
    """Run a command and return what it prints. Raises InputError with the end of its errors.

    It may write bytecode, whatever this process may: pip wrote the bytecode of OpenVINO's side, and
    a checkout's is written by its first process.
    """
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={**inherited, **environment},
        )
    except FileNotFoundError as error:
        raise InputError(
            f"{command[0]} does not exist. `make bench-openvino` makes OpenVINO's environment; "
            "--environment names another one."
        ) from error
    if done.returncode:
        raise InputError(
            f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return done.stdout


def check_same_work(answers: Mapping[str, Answer], job: Job, turn_ids: AbstractSet[int]) -> None:
    """Check that both sides had equal prompt and reply lengths and, in float32, equal replies.

    turn_ids: tokens that mark turns. OpenVINO looks for them in the reply as well: a reply of
    random weights that contains one gets other audio, and its audio is not compared.
    Raises InputError, which names the first difference.
    """
    ours, theirs = (answers[side] for side in SIDES)
    for name in ("prompt_tokens", "samples"):
        if ours[name] != theirs[name]:
            raise InputError(
                f"{job.dtype}: {name} are {ours[name]} here and {theirs[name]} in OpenVINO."
            )
    for side, answer in answers.items():
        lengths = {len(token_ids) for token_ids in answer["token_ids"]}
        if lengths != {job.text_tokens}:
            raise InputError(
                f"{job.dtype}: replies ({side}) have {lengths} tokens, not {job.text_tokens}."
            )
    if job.dtype == "float32":
        replies = [zip(a["token_ids"], a["probes"], strict=True) for a in (ours, theirs)]
        for number, (one, other) in enumerate(zip(*replies, strict=True)):
            check_equal(number, one, other, turn_ids)


def check_equal(
    number: int, ours: TextAndAudio, theirs: TextAndAudio, turn_ids: AbstractSet[int]
) -> None:
    """Check that two replies have the same text and audio."""
    (ours_ids, ours_probes), (theirs_ids, theirs_probes) = ours, theirs
    if ours_ids != theirs_ids:
        raise InputError(
            f"float32: reply {number} is {ours_ids} here and {theirs_ids} in OpenVINO. Where the "
            "exports are older than the checkpoint, delete them (--models)."
        )
    if not turn_ids.isdisjoint(ours_ids):
        return
    for ours_probe, theirs_probe in zip(ours_probes, theirs_probes, strict=True):
        # Not "above": a NaN is neither above nor below.
        if not abs(ours_probe - theirs_probe) < AUDIO_TOLERANCE:
            raise InputError(
                f"float32: the audio of reply {number} has a sample {ours_probe:.6f} here and "
                f"{theirs_probe:.6f} in OpenVINO, further apart than {AUDIO_TOLERANCE}. Its text "
                "is equal: look at talker, code predictor and code2wav."
            )


def medians(answer: Answer) -> dict[str, float]:
    """Return the figures of a process, each list as its median."""
    return {
        name: statistics.median(value) if isinstance(value, list) else value
        for name, value in answer["figures"].items()
    }


def compared(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the medians of both sides' rows of one dtype, and OpenVINO's over ours."""
    names = [name for name in rows[0] if name.endswith(("_s", "_mb"))]
    found: dict[str, Any] = {
        side: {
            name: statistics.median(r[name] for r in rows if r["side"] == side) for name in names
        }
        for side in SIDES
    }
    found["ratios"] = {name: found["openvino"][name] / found["ours"][name] for name in names}
    return found


if __name__ == "__main__":
    sys.exit(main())
