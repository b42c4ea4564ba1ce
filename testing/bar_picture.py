"""Bars from the same zero as SVG, and the pictures of how-it-works.md, drawn from the code.

What one frame of speech costs is counted from the released model's config; what the prefix cache
saves is read from the timings of three turns with the checkpoint that ships.
"""

from collections.abc import Mapping
from html import escape

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from testing.call_cost import CHUNK, FRAME_S, FRAMES, TOKENS, released_limits
from testing.imports import ROOT
from testing.rates import MachineRates

Rows = Mapping[str, Mapping[str, float]]
Line = tuple[float, str]

WIDTH, LABEL, TOTAL, MARGIN = 480, 158, 74, 10  # text is 10 px high on a phone of 360 px
BAR, GAP, HEAD, LINE_HEAD = 24, 12, 64, 24
DARK = "#202020"
# White text on each, and each on white, has a contrast of 4.5 or more.
COLOURS = ("#4063d8", "#2e7d1f", "#9558b2", "#cb3c33")
# Rates of the machine of docs/benchmarks/released.md with AVX-512.
MACHINE = MachineRates(bytes_per_s=30.4e9, multiply_adds_per_s=102e9, threads=2)
# Dtypes, each with that of the code predictor by default.
DTYPES = {"mixed": "mixed", "int8": "mixed", "int4": "mixed"}
SPOKEN = [{"type": "audio", "audio": str(ROOT / "examples" / "sum.wav")}]
SYSTEM = "You are a helpful assistant."
QUESTIONS = (SPOKEN, "say seven red goodbye", SPOKEN)


def draw(
    title: str,
    rows: Rows,
    unit: str,
    line: Line | None = None,
    *,
    stacked: bool = True,
    decimals: int = 0,
) -> str:
    """Draw bars under a title.

    rows: sizes of a row's parts by their names, by the label of the row. unit: unit of the sizes.
    line: a size at which a vertical line stands, and what it says. stacked: a row is one bar of
    its parts; otherwise each part has a bar. decimals: most decimals of a size that is written.
    """
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    colours = dict(zip(names, COLOURS, strict=False))
    bars = {label: _bars(parts, stacked) for label, parts in rows.items()}
    sizes = [sum(bar.values()) for group in bars.values() for bar in group]
    scale = (WIDTH - LABEL - TOTAL - MARGIN) / max(*sizes, line[0] if line else 0.0)
    y = head = HEAD + (LINE_HEAD if line else 0)
    drawn = [_text(MARGIN, 22, title, weight="bold"), *_legend(colours)]
    for label, group in bars.items():
        drawn.append(_text(MARGIN, y + BAR * len(group) / 2 + 5, label))
        for bar in group:
            drawn += _bar(bar, y, scale, unit, colours, decimals)
            y += BAR
        y += GAP
    if line is not None:
        x = LABEL + line[0] * scale
        drawn += [
            f'<path d="M{x:.1f} {head - 10} V{y - GAP / 2:.0f}" stroke="{DARK}" '
            'stroke-dasharray="5 4"/>',
            _text(x, head - 15, line[1], "end" if x > 0.6 * WIDTH else "middle"),
        ]
    beginning = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {y}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>',
    ]
    drawn.sort(key=lambda element: element.startswith("<text"))  # words above bars and line
    return "\n".join((*beginning, *drawn, "</svg>", ""))


def _bars(parts: Mapping[str, float], stacked: bool) -> list[Mapping[str, float]]:
    return [parts] if stacked else [{name: size} for name, size in parts.items()]


def _legend(colours: Mapping[str, str]) -> list[str]:
    drawn, x = [], float(MARGIN)
    for name, colour in colours.items():
        drawn.append(f'<rect x="{x:.1f}" y="34" width="14" height="14" fill="{colour}"/>')
        drawn.append(_text(x + 20, 46, name))
        x += 38 + 8 * len(name)
    return drawn


def _bar(
    parts: Mapping[str, float],
    y: int,
    scale: float,
    unit: str,
    colours: Mapping[str, str],
    decimals: int,
) -> list[str]:
    middle, x = y + BAR / 2 + 5, float(LABEL)
    drawn = []
    for name, size in parts.items():
        width, written = size * scale, f"{round(size, decimals):g}"
        drawn.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colours[name]}"/>'
        )
        if len(parts) > 1 and width > 12 * len(written):
            drawn.append(_text(x + width / 2, middle, written, "middle", "#ffffff"))
        x += width
    return [*drawn, _text(x + 8, middle, f"{round(sum(parts.values()), decimals):g} {unit}")]


def _text(
    x: float, y: float, text: str, anchor: str = "start", fill: str = DARK, weight: str = "normal"
) -> str:
    # White around dark words keeps them apart from a line below them.
    edge = ' stroke="#ffffff" stroke-width="4" paint-order="stroke"' if fill == DARK else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{fill}"{edge}>{escape(text)}</text>'
    )


def frame_costs() -> str:
    """Draw the least milliseconds of a frame of the released model by dtype, on one machine."""
    limits = released_limits(MACHINE, DTYPES)
    limits["int4, predictor same"] = released_limits(MACHINE, {"int4": "int4"})["int4"]
    rows = {
        label: {
            "code predictor": 1e3 * limit.predictor,
            "talker": 1e3 * limit.talker,
            "code2wav": 1e3 * limit.code2wav / CHUNK,
            "thinker": 1e3 * limit.token * TOKENS / FRAMES,
        }
        for label, limit in limits.items()
    }
    line = (1e3 * FRAME_S, f"{1e3 * FRAME_S:.0f} ms: as long as a frame plays")
    return draw("Least time of one frame by dtype, ms", rows, "ms", line)


def turns_of_a_conversation() -> str:
    """Draw the rows of three prompts: those that the prefix cache held, and the others."""
    rows: dict[str, dict[str, float]] = {}
    messages: list[dict[str, object]] = [{"role": "system", "content": SYSTEM}]
    with Qwen3Omni.load(SPEAKING_CHECKPOINT, max_concurrency=1) as omni:
        for number, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            result = omni.generate_text(messages, thinker_do_sample=False)
            messages.append({"role": "assistant", "content": result.text})
            held = result.timings.reused_tokens
            new = result.timings.prompt_tokens - held
            rows[f"turn {number}"] = {"held by the cache": held, "computed": new}
    return draw("Rows of the thinker's prompt", rows, "rows")
