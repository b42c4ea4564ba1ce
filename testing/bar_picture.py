"""Pictures of how-it-works.md as SVG: rows with a bar of several parts each, drawn from the code.

What one frame of speech costs is counted from the released model's config; what the prefix cache
saves is read from the timings of three turns with the checkpoint that ships.
"""

from collections.abc import Mapping
from html import escape

from qwen3_omni_neuron import SPEAKING_CHECKPOINT, Qwen3Omni
from qwen3_omni_neuron.cpu.rates import Rates
from qwen3_omni_neuron.cpu.work import CHUNK, FRAME_S, FRAMES, TOKENS, released_limits
from testing.imports import ROOT

WIDTH, LABEL, TOTAL, MARGIN = 580, 160, 74, 10  # legible on a phone, too
ROW, BAR, HEAD = 40, 28, 58
COLOURS = ("#4063d8", "#389826", "#9558b2", "#cb3c33")
# The machine of BENCHMARK.md, "The released size", with AVX-512.
MACHINE = Rates(bytes_per_s=28.7e9, multiply_adds_per_s=180.9e9, threads=2)
# Dtypes, each with that of the code predictor by default.
DTYPES = {"mixed": "mixed", "int8": "mixed", "int4": "mixed"}
SPOKEN = [{"type": "audio", "audio": str(ROOT / "examples" / "sum.wav")}]
SYSTEM = "You are a helpful assistant."
QUESTIONS = (SPOKEN, "say seven red goodbye", SPOKEN)


def draw(
    rows: Mapping[str, Mapping[str, float]], unit: str, line: tuple[float, str] | None = None
) -> str:
    """Draw bars from the same zero.

    rows: sizes of a bar's parts by their names, by the label of the row. unit: unit of the sizes.
    line: a size at which a vertical line stands, and what it says.
    """
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    colours = dict(zip(names, COLOURS, strict=False))
    most = max(*(sum(parts.values()) for parts in rows.values()), line[0] if line else 0.0)
    scale = (WIDTH - LABEL - TOTAL - MARGIN) / most
    height = HEAD + ROW * len(rows) + MARGIN
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_legend(colours),
    ]
    for number, (label, parts) in enumerate(rows.items()):
        drawn += _bar(label, parts, HEAD + ROW * number, scale, unit, colours)
    if line is not None:
        x = LABEL + line[0] * scale
        drawn += [
            f'<path d="M{x:.1f} {HEAD - 12} V{height - 10}" stroke="#202020" '
            'stroke-dasharray="5 4"/>',
            _text(x, HEAD - 17, line[1], "middle"),
        ]
    return "\n".join((*drawn, "</svg>", ""))


def _legend(colours: Mapping[str, str]) -> list[str]:
    drawn, x = [], float(MARGIN)
    for name, colour in colours.items():
        drawn.append(f'<rect x="{x:.1f}" y="9" width="14" height="14" fill="{colour}"/>')
        drawn.append(_text(x + 20, 21, name))
        x += 40 + 8 * len(name)
    return drawn


def _bar(
    label: str, parts: Mapping[str, float], y: int, scale: float, unit: str, of: Mapping[str, str]
) -> list[str]:
    middle, x = y + BAR / 2 + 5, float(LABEL)
    drawn = [_text(MARGIN, middle, label)]
    for name, size in parts.items():
        width = size * scale
        drawn.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{of[name]}"/>'
        )
        if width > 12 * len(f"{size:.0f}"):
            drawn.append(_text(x + width / 2, middle, f"{size:.0f}", "middle", "#ffffff"))
        x += width
    return [*drawn, _text(x + 8, middle, f"{sum(parts.values()):.0f} {unit}")]


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "#202020") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
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
    return draw(rows, "ms", (1e3 * FRAME_S, f"{1e3 * FRAME_S:.0f} ms: as long as a frame plays"))


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
    return draw(rows, "rows")
