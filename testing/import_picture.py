"""A picture of the package's rooms by layer, and of their imports, as SVG."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, ROW, BOX_HEIGHT, MARGIN = 860, 74, 32, 24
CHARACTER, PADDING, GAP = 8.2, 22, 36
# Arrows are coloured by the room that imports: neighbours of a layer differ.
COLOURS = ("#4063d8", "#389826", "#9558b2", "#cb3c33", "#0f8b8d", "#b8860b")

Box = tuple[float, float, float]  # centre x, top y, width


def draw(imports: Mapping[str, set[str]], layers: Sequence[set[str]]) -> str:
    """Draw the rooms, the highest layer on top, with an arrow from each room to what it imports.

    An arrow is left out where others lead the same way through the layers between.
    """
    boxes = _boxes(layers)
    height = 2 * MARGIN + ROW * len(layers) - (ROW - BOX_HEIGHT)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(boxes)}
    for name, others in sorted(_shown(imports, layers).items()):
        for other in others:
            lines.append(_arrow(boxes[name], boxes[other], colours[name]))
    for name, (x, y, width) in boxes.items():
        lines += [
            f'<rect x="{x - width / 2:.1f}" y="{y}" width="{width:.1f}" height="{BOX_HEIGHT}" '
            f'rx="5" fill="#ffffff" stroke="{colours[name]}" stroke-width="1.6"/>',
            f'<text x="{x:.1f}" y="{y + 21}" text-anchor="middle">{escape(name)}</text>',
        ]
    return "\n".join((*lines, "</svg>", ""))


def _boxes(layers: Sequence[set[str]]) -> dict[str, Box]:
    found = {}
    for row, rooms in enumerate(reversed(layers)):
        widths = {name: CHARACTER * len(name) + PADDING for name in sorted(rooms)}
        total = sum(widths.values()) + GAP * (len(widths) - 1)
        # Layers of one room shift left and right in turn, so that arrows do not cross the rooms.
        shift = (-1) ** row * 0.22 * WIDTH if len(rooms) == 1 else 0.0
        left = (WIDTH - total) / 2 + shift
        for name, width in widths.items():
            found[name] = (left + width / 2, float(MARGIN + ROW * row), width)
            left += width + GAP
    return found


def _shown(imports: Mapping[str, set[str]], layers: Sequence[set[str]]) -> dict[str, list[str]]:
    level = {name: number for number, rooms in enumerate(layers) for name in rooms}

    def reached(name: str) -> set[str]:
        below = {other for other in imports[name] if level[other] < level[name]}
        return below.union(*map(reached, below))

    shown = {}
    for name in imports:
        below = {other for other in imports[name] if level[other] < level[name]}
        through = set().union(*(reached(other) for other in below))
        beside = imports[name] - below
        shown[name] = sorted((below - through) | beside)
    return shown


def _arrow(start: Box, end: Box, colour: str) -> str:
    (x0, y0, w0), (x1, y1, w1) = start, end
    style = f'fill="none" stroke="{colour}" stroke-width="1.3" stroke-opacity="0.75"'
    if y0 == y1:  # in one layer: from side to side, in an arc where another room stands between
        towards = 1 if x1 > x0 else -1
        a, b = x0 + towards * w0 / 4, x1 - towards * w1 / 4
        edge, away = (y0, -18) if towards > 0 else (y0 + BOX_HEIGHT, 18)
        path = f"M{a:.1f} {edge} C{a:.1f} {edge + away} {b:.1f} {edge + away} {b:.1f} {edge}"
        tip = _tip(b, edge, -1 if towards < 0 else 1, colour)
        return f'<path d="{path}" {style}/>{tip}'
    bottom = y0 + BOX_HEIGHT
    # Where an arrow meets a box: nearer to the side that it comes from.
    a = x0 + max(-w0 / 3, min(w0 / 3, (x1 - x0) / 6))
    b = x1 + max(-w1 / 3, min(w1 / 3, (x0 - x1) / 6))
    bend = (y1 - bottom) * 0.45
    path = f"M{a:.1f} {bottom} C{a:.1f} {bottom + bend:.1f} {b:.1f} {y1 - bend:.1f} {b:.1f} {y1}"
    return f'<path d="{path}" {style}/>{_tip(b, y1, 1, colour)}'


def _tip(x: float, y: float, direction: int, colour: str) -> str:
    """Return a triangle that points down (1) or up (-1)."""
    back = y - 7 * direction
    points = f"{x:.1f},{y} {x - 4:.1f},{back} {x + 4:.1f},{back}"
    return f'<polygon points="{points}" fill="{colour}"/>'
