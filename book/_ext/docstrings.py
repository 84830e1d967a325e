"""Sphinx extension: docstrings are Markdown, as one reads them in the source, and types come from annotations alone.

Autodoc wants reStructuredText, which says three things differently: code in a sentence, an indented block of code, a
table. Napoleon, which reads the sections ``Args:``, ``Returns:`` and ``Raises:``, takes ``Elements of the buffer: a
multiple of N``, on a property or below ``Returns:``, for "type: description"; an empty comment before it prevents that.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

CODE = re.compile(r"(?<![`:\w])`([^`\n]+)`(?!`)(\w?)")
ONE_LETTER = re.compile(r"(?<=: )(\w)\.$")  # "ranks: N." would begin a list that counts in letters
NO_TYPE = ["..", ""]


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def inline(line: str) -> str:
    line = ONE_LETTER.sub(r"\1\.", line)
    # a letter after code needs a mark in between, as in "`unit`s"
    return CODE.sub(lambda found: f"``{found[1]}``" + (rf"\ {found[2]}" if found[2] else ""), line)


def table(rows: list[str]) -> list[str]:
    """A Markdown table, whose second row underlines its head."""
    text = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows[:1] + rows[2:]:
        first, *others = (inline(cell.strip()) for cell in row.strip().strip("|").split("|"))
        text += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
    return text


def prose(lines: list[str]) -> list[str]:
    text = []
    for line in lines:
        text.append(inline(line))
        if line.strip() == "Returns:":
            text += [" " * (indentation(line) + 4) + NO_TYPE[0], ""]
    return text


def as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    text = NO_TYPE.copy() if what in {"property", "attribute", "data"} else []
    outer = 0  # how far the last line of prose is indented; four more, after an empty line, is code
    in_code = False
    for filled, group in groupby(lines, key=lambda line: bool(line.strip())):
        block = list(group)
        is_code = filled and indentation(block[0]) >= outer + 4
        if not filled:
            text += block
        elif is_code:
            text += block if in_code else [" " * outer + "::", "", *block]
        elif block[0].startswith("|"):
            text += table(block)
        else:
            text += prose(block)
            outer = indentation(block[-1])
        in_code = is_code or (in_code and not filled)
    lines[:] = text


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # napoleon's is 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
