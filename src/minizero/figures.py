"""Chapter 00, figures: the book's colours, small SVG drawings, and explorers that need no kernel.

One idea: every picture a slider can lead to is drawn beforehand, so the page can show it without Python. A drawing is a
string of SVG; lines and text of `currentColor` follow the page, light or dark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import count
from typing import Any

import ipywidgets as widgets  # type: ignore[import-untyped]

# Okabe and Ito's colours, which colour-blind readers tell apart; one meaning each, in every chapter.
COLORS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
    "communication": "#D55E00",
    "idle": "#BBBBBB",
}
_numbers = count()  # an id in a page has to be unique


def rect(x: float, y: float, width: float, height: float, fill: str, **attributes: object) -> str:
    """A rectangle; `fill` is a key of `COLORS` or any SVG colour. `stroke_width=2` becomes `stroke-width="2"`."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{COLORS.get(fill, fill)}"'
        f"{_written(attributes)}/>"
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = "currentColor", **attributes: object) -> str:
    """A line from (x1, y1) to (x2, y2); `stroke` is a key of `COLORS` or any SVG colour."""
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{COLORS.get(stroke, stroke)}"{_written(attributes)}/>'


def text(x: float, y: float, content: str, fill: str = "currentColor", **attributes: object) -> str:
    """Text whose baseline begins at (x, y); `text_anchor="middle"` centres it there."""
    return f'<text x="{x:g}" y="{y:g}" fill="{COLORS.get(fill, fill)}"{_written(attributes)}>{escape(content)}</text>'


def _written(attributes: Mapping[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items())


def svg(width: float, height: float, alt: str, *shapes: str, font: float = 13) -> str:
    """An SVG drawing of `shapes`, at most `width` pixels wide and narrower on a narrow page.

    `alt` says in words what is to be seen, for readers who do not see it.
    """
    if not alt.strip():
        raise ValueError("alt must say in words what the drawing shows")
    name = f"drawing-{next(_numbers)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-labelledby="{name}" style="display:block;width:100%;max-width:{width:g}px;height:auto;color:inherit" '
        f'font-family="system-ui, sans-serif" font-size="{font:g}"><title id="{name}">{escape(alt)}</title>'
        f"{''.join(shapes)}</svg>"
    )


def explorer(draw: Callable[..., str], **choices: tuple[str, Sequence[Any]] | tuple[str, Sequence[Any], Any]) -> Any:
    """Controls above a drawing, which follows them with a kernel or without.

        explorer(lambda stage, ranks: svg(...), stage=("ZeRO stage", range(4)), ranks=("ranks", [1, 2, 4, 8], 4))

    Args:
        draw: called once for every combination of values; returns HTML or SVG. Some hundred drawings make a page heavy.
        choices: for each argument of `draw`, the label of its slider, the values it may take, at least two, and the
            one to begin with (default: the first).

    Returns the widget; a notebook shows it when it is a cell's last line.
    """
    for name, (label, values, *_) in choices.items():
        if not label or len(values) < 2:
            raise ValueError(f"{name} needs a label and at least two values, got {label!r} and {list(values)!r}")
    sliders = [
        widgets.SelectionSlider(
            options=[(str(value), value) for value in values],
            value=start[0] if start else values[0],
            description=label,
            style={"description_width": "auto"},
            layout={"width": "100%", "max_width": "480px"},
        )
        for label, values, *start in choices.values()
    ]

    wide = {"width": "100%"}

    def level(fixed: dict[str, Any]) -> widgets.Widget:
        if len(fixed) == len(choices):
            return widgets.HTML(f'<div class="frame">{draw(**fixed)}</div>', layout=wide)
        name, slider = list(choices)[len(fixed)], sliders[len(fixed)]
        levels = [level({**fixed, name: value}) for value in choices[name][1]]
        stack = widgets.Stack(levels, selected_index=slider.index, layout=wide)
        widgets.jslink((slider, "index"), (stack, "selected_index"))
        return stack

    return widgets.VBox([*sliders, level({})])
