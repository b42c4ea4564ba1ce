"""The real runtime over engines that only take time: a replay of stage latencies, no measurement.

    python -m bench.replay                                   # all of it, at the port's latencies
    python -m bench.replay --profile expected --placement split --first-chunk adaptive
    python -m bench.replay --profile my-trn2.json --concurrency 1,8 --json replay.json

--profile: a name in testing/profiles, or a file (see testing/replaying/profiles.py). "expected" has
the likely times of our graphs by the cost model, "expected-low" and "expected-high" their range,
"roofline" their floors, which no machine reaches. Each engine call holds its cores for the time in
the profile, on a virtual clock; calls that share cores take turns.
The schedule, queues, batches and threads are the package's own. The first row of each placement
calls the stages in port #167's way, which published its own result: 1759 ms.

`concurrency` requests run at a time; the next one comes when one has ended. TTFB: arrival to the
first sample; RTF: (arrival of the last sample - arrival) / duration; underruns: of players that
start at the first sample.
"""

import dataclasses
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from qwen3_omni_neuron.compilation.plan import CHUNK_FRAMES
from testing.command_line import Row, natural, parser_of, positive, sizes
from testing.headlines import PLAYS, Headline, headline, of_percentiles
from testing.replaying.cases import OURS, PORT, PROFILES, case
from testing.replaying.device import PLACEMENTS, Behaviour
from testing.replaying.load import make_load
from testing.replaying.profiles import ProfileError, StageProfile
from testing.results import results_of, save

PUBLISHED_TTFB_S = 1.759  # port #167's own measurement of PORT


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay the port's way in each placement, then ours; print the table."""
    parser = parser_of("replay", __doc__)
    names = ", ".join(sorted(file.stem for file in PROFILES.glob("*.json")))
    parser.add_argument("--profile", default="port-167", help=f"{names}, or a file")
    parser.add_argument("--placement", choices=(*PLACEMENTS, "both"), default="both")
    parser.add_argument(
        "--first-chunk",
        type=lambda text: [first_chunk(part) for part in text.split(",")],
        default="adaptive",
        help="adaptive, or frames, after which chunks grow; several, by commas",
    )
    parser.add_argument(
        "--concurrency", type=sizes, default="1", help="requests at a time; several, by commas"
    )
    parser.add_argument("--requests", type=positive, default=100)
    parser.add_argument("--seed", type=natural, default=0, help="of the requests' order")
    parser.add_argument(
        "--driver", action="store_true", help="spend the profile's driver times in ours, too"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    options = parser.parse_args(arguments)
    behaviours = options.first_chunk
    if options.driver:
        behaviours = [
            dataclasses.replace(b, driver=True, name=f"{b.name}, with the driver")
            for b in behaviours
        ]
    placements = list(PLACEMENTS) if options.placement == "both" else [options.placement]
    load = make_load(options.requests, options.seed)
    file = PROFILES / f"{options.profile}.json"
    try:
        profile = StageProfile.load(file if file.exists() else Path(options.profile))
        rows = [case(profile, PORT, placement, 1, load) for placement in placements]
        rows += [
            case(profile, behaviour, placement, count, load)
            for placement in placements
            for behaviour in behaviours
            for count in options.concurrency
        ]
    except ProfileError as error:
        parser.error(str(error))
    options.first_chunk = [behaviour.name for behaviour in behaviours]
    results = results_of("replay", arguments, options, rows, {}, headlines_of(rows))
    if options.json:
        save(results, options.json)
    print("\n".join([*table(rows), "", *against_the_port(rows), *results.headline_texts]))


def headlines_of(rows: Sequence[Row]) -> list[Headline]:
    """Return the figures of the first way of ours with the fewest requests at a time."""
    ours = [row for row in rows if row["driven"] != PORT.name]
    row = min(ours, key=lambda row: row["concurrency"])
    name, count = f"replay, {row['driven']}", row["requests"]
    ttfb = {"p50": row["ttfb_p50_s"], "p95": row["ttfb_p95_s"]}
    return [
        headline(f"{name}: TTFT, mean", [row["ttft_mean_s"]], "s"),
        of_percentiles(f"{name}: TTFB", ttfb, count, "s"),
        headline(f"{name}: RTF, mean", [row["rtf_mean"]], "", PLAYS),
    ]


def first_chunk(text: str) -> Behaviour:
    """Parse one value of --first-chunk: "adaptive", or a chunk size."""
    if text == "adaptive":
        return OURS
    if text in map(str, CHUNK_FRAMES):
        return ramp(int(text))
    compiled = ", ".join(map(str, CHUNK_FRAMES))
    raise ArgumentTypeError(f"a first chunk is adaptive, or one of {compiled}; got {text!r}.")


def ramp(first: int) -> Behaviour:
    """Return ours with fixed chunk sizes that begin with `first`; the last one repeats."""
    chunk_frames = CHUNK_FRAMES[CHUNK_FRAMES.index(first) :]
    return Behaviour(f"ours, fixed {first}, ...", chunk_frames=chunk_frames)


def table(rows: Sequence[Row]) -> list[str]:
    """Format the rows as a Markdown table, every line labelled a replay."""
    titles = "replay | stages driven | cores | at once | TTFT ms | TTFB ms mean, p50, p95"
    titles += " | RTF mean, p95 | underruns | silent ms | first chunks"
    lines = [f"| {titles} |", "| --- | --- | --- |" + " ---: |" * 6 + " --- |"]
    for r in rows:
        ms = {name: f"{1e3 * value:.0f}" for name, value in r.items() if name.endswith("_s")}
        lines.append(
            f"| replay of {r['profile']} | {r['driven']} | {r['placement']} | {r['concurrency']} "
            f"| {ms['ttft_mean_s']} "
            f"| {ms['ttfb_mean_s']}, {ms['ttfb_p50_s']}, {ms['ttfb_p95_s']} "
            f"| {r['rtf_mean']:.2f}, {r['rtf_p95']:.2f} | {r['underruns']} | {ms['silent_s']} "
            f"| {', '.join(map(str, r['first_chunks']))} |"
        )
    return lines


def against_the_port(rows: Sequence[Row]) -> list[str]:
    """Compare the port's way with its published time, if the latencies are the port's own."""
    return [
        f"replay: driven the port's way, mean TTFB {1e3 * r['ttfb_mean_s']:.0f} ms; the port "
        f"measured {1e3 * PUBLISHED_TTFB_S:.0f} "
        f"({100 * (r['ttfb_mean_s'] / PUBLISHED_TTFB_S - 1):+.1f} %)."
        for r in rows
        if (r["profile"], r["driven"], r["placement"]) == ("port-167", PORT.name, "shared")
    ]


if __name__ == "__main__":
    main()
