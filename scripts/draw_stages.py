"""Draw book/_static/stages.svg, the picture of README and intro: what each of four ranks keeps in stages 0 to 3.

    python scripts/draw_stages.py > book/_static/stages.svg

Single precision with Adam: 4 bytes per parameter for the parameters, 4 for the gradients, 8 for Adam's two moments.
One unit of height is one byte per parameter, so equal areas are equal memory.
"""

from __future__ import annotations

from itertools import accumulate

from minizero.figures import rect, text

RANKS = 4
KINDS = [("parameters", 4, 3, "parameters"), ("gradients", 4, 2, "gradients"), ("optimizer states", 8, 1, "optimizer")]
CUT = ["nothing is cut", "optimizer states are cut", "gradients are cut too", "parameters are cut too"]

BYTE = 7  # height of one byte per parameter
BAR, GAP = 30, 10  # width of a bar, distance between two
PANEL = (210, 184)  # a stage: width, height

# Inside a page the site's own colours win (book.css); alone, as an image, it follows the reader's system.
STYLE = """
  #zero-stages { color: #24292f; font: 12px system-ui, -apple-system, "Segoe UI", Arial, sans-serif; }
  @media (prefers-color-scheme: dark) { #zero-stages { color: #ced6dd; } }
"""


def bar(x: float, y: float, rank: int, stage: int) -> list[str]:
    """One rank: a block per kind of state; of a kind that is cut, the rank's quarter inside a dashed outline."""
    drawn = []
    tops = accumulate([0, *(size for _, size, _, _ in KINDS)])
    for top, (_, size, first_cut, fill) in zip(tops, KINDS, strict=False):
        upper, height = y + top * BYTE, size * BYTE
        if stage < first_cut:
            drawn.append(rect(x, upper, BAR, height - 1, fill))
        else:
            outline = {"stroke": "#8b8b8b", "stroke_dasharray": "2 2"}
            drawn.append(rect(x + 0.5, upper + 0.5, BAR - 1, height - 2, "none", **outline))
            part = height / RANKS
            drawn.append(rect(x, upper + rank * part, BAR, part - 1, fill))
    return drawn


def panel(x: float, y: float, stage: int) -> list[str]:
    """One stage: its name, the bytes that each rank keeps, and the ranks side by side."""
    kept = sum(size / RANKS if stage >= first_cut else size for _, size, first_cut, _ in KINDS)
    drawn = [
        text(x, y + 14, f"Stage {stage}: {kept:g} bytes", font_weight=600, font_size=14),
        text(x, y + 32, CUT[stage]),
    ]
    top = y + 44
    for rank in range(RANKS):
        left = x + 18 + rank * (BAR + GAP)
        drawn += bar(left, top, rank, stage)
        drawn.append(text(left + BAR / 2, top + 16 * BYTE + 16, str(rank), text_anchor="middle"))
    tops = accumulate([0, *(size for _, size, _, _ in KINDS)])
    for upper, (name, size, _, _) in zip(tops, KINDS, strict=False):
        drawn.append(text(x, top + (upper + size / 2) * BYTE + 4, name[0].upper()))
    drawn.append(text(x + 18 + RANKS * (BAR + GAP) - 4, top + 16 * BYTE + 16, "rank"))
    return drawn


def figure() -> str:
    """The whole picture: the meaning of the colours, then two rows of two stages."""
    width, head = 2 * PANEL[0] + 12, 34
    height = head + 2 * PANEL[1] + 8
    drawn = []
    for left, (name, size, _, fill) in zip((6, 138, 260), KINDS, strict=True):
        drawn.append(rect(left, 5, 12, 12, fill))
        drawn.append(text(left + 18, 15, f"{name[0].upper()} {name}, {size}"))
    for stage in range(4):
        row, column = divmod(stage, 2)
        drawn += panel(6 + column * (PANEL[0] + 6), head + row * (PANEL[1] + 8), stage)
    title = (
        "What each of four ranks keeps, in bytes per parameter. Stage 0: all 16. Stage 1: a quarter of the optimizer "
        "states, 10 in all. Stage 2: a quarter of the gradients too, 7. Stage 3: a quarter of everything, 4."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" id="zero-stages" role="img" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" aria-labelledby="zero-stages-title">',
            f'<title id="zero-stages-title">{title}</title>',
            f"<style>{STYLE}</style>",
            *drawn,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    print(figure())
