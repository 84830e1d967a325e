"""Chapter 00, what ranks show in a cell: text as a terminal would have it, displays, and only so much of either.

`Output` lives in a rank and bounds what leaves it; `Shown` is what arrives, and `together` puts those of all ranks into
one text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

HEAD = TAIL = 16_000  # characters of a cell's text that a rank shows: so many of its first, and of its last
_SHORTEST = 40  # what a line counts for at least
_AT_ONCE = 8 * HEAD  # characters of one print that are looked at
LONGEST = 2_000  # characters of one line
DISPLAYS = 20  # figures, tables and the like of one rank in one cell
LARGEST = 8_000_000  # characters of one display
_LIVE = 48, 200  # lines of all ranks together, and characters of each, while the cell runs

_MOVES = re.compile(r"(\r?\n|\r|\x1b\[A)")  # what moves a terminal's cursor: to the next line, back to its start, up
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_OTHER = re.compile(r"(?!\x1b\[[\d;]*m)\x1b\[[0-9;?]*[@-~]")  # what else a terminal obeys
_UNSEEN = re.compile(r"(?!\x1b\[)[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
_OPEN = 16  # a progress bar may go so many lines up


@dataclass
class _Line:
    """The first `LONGEST` characters of a line, and the number of those beyond."""

    text: str = ""
    beyond: int = 0

    def write(self, piece: str, anew: bool) -> None:
        text = piece if anew else self.text + piece
        self.text, self.beyond = text[:LONGEST], max(0, len(text) - LONGEST) + (0 if anew else self.beyond)

    def __str__(self) -> str:
        text = _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", _OTHER.sub("", self.text))
        more = f" … {self.beyond:,} more characters" if self.beyond else ""
        return text.rstrip() + ("\x1b[0m" if _COLOURS.search(text) else "") + more


class Screen:
    """Lines of text as a terminal would have them: a carriage return writes a line (a progress bar) anew.

    The first `HEAD` and the last `TAIL` characters are kept; a line between them says how much is missing.
    """

    def __init__(self, text: str = "") -> None:
        self._head: list[str] = []
        self._room = HEAD
        self._tail: deque[str] = deque()
        self._left_out, self._tail_size = 0, 0
        self._open = deque([_Line()])  # the last lines, which may still be written anew
        self._row, self._anew = 0, False  # where the cursor is in them, and whether at the start of a line
        self.write(text)

    def write(self, text: str) -> None:
        """Take in what a program prints."""
        if len(text) > _AT_ONCE:
            middle = text[_AT_ONCE // 2 : -_AT_ONCE // 2]
            self.write(text[: _AT_ONCE // 2])
            if "\n" in middle:
                self._move("\n")
                self._leave_out(middle.count("\n") - 1)
            else:
                self._open[self._row].beyond += len(middle)
            text = text[-_AT_ONCE // 2 :]
        for place, piece in enumerate(_MOVES.split(text)):
            if place % 2:
                self._move(piece)
            elif piece:
                self._open[self._row].write(piece, self._anew)
                self._anew = False

    def _move(self, move: str) -> None:
        self._anew = True
        if move == "\x1b[A":
            self._row = max(0, self._row - 1)
        elif move != "\r":
            if self._row == len(self._open) - 1:
                self._open.append(_Line())
            self._row += 1
            if len(self._open) > _OPEN:
                self._row -= 1
                self._keep(str(self._open.popleft()))

    def _keep(self, line: str) -> None:
        if self._room > 0:
            self._head.append(line)
            self._room -= max(len(line), _SHORTEST)
            return
        self._tail.append(line)
        self._tail_size += max(len(line), _SHORTEST)
        while self._tail_size > TAIL:
            self._tail_size -= max(len(self._tail.popleft()), _SHORTEST)
            self._leave_out(1)

    def _leave_out(self, lines: int) -> None:
        self._left_out += lines
        self._room = 0

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        limit = "of much output, a rank shows the beginning and the end"
        left_out = [f"… {self._left_out:,} lines left out: {limit} …"] if self._left_out else []
        lines = [*self._head, *left_out, *self._tail, *map(str, self._open)]
        return lines if lines[-1] else lines[:-1]


@dataclass
class _Display:
    key: str | None  # the display id
    bundle: dict[str, Any]  # MIME types and their data


@dataclass
class Shown:
    """What one rank shows: lines of text, and displays that are more than text, as bundles of MIME types."""

    lines: list[str] = field(default_factory=list)
    rich: list[dict[str, Any]] = field(default_factory=list)


class Output:
    """What one rank has shown in a cell so far, from the messages that its kernel would have sent."""

    def __init__(self) -> None:
        self._parts: list[Screen | _Display] = []
        self._left_out = 0
        self._clear_first = False

    def take(self, kind: str, content: dict[str, Any]) -> None:
        """Take in one message: "stream", "display_data", "execute_result", "update_display_data", "clear_output"."""
        if kind == "clear_output":
            self._clear_first = True
        if kind != "clear_output" or not content.get("wait"):
            self._clear()
        if kind == "stream":
            self._write(content["text"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self._show(kind, content.get("transient", {}).get("display_id"), _without_widgets(content["data"]))

    def _clear(self) -> None:
        if self._clear_first:
            self._parts, self._left_out, self._clear_first = [], 0, False

    def _write(self, text: str) -> None:
        if not self._parts or isinstance(self._parts[-1], _Display):
            self._parts.append(Screen())
        self._parts[-1].write(text)  # type: ignore[union-attr]

    def _show(self, kind: str, key: str | None, bundle: dict[str, Any]) -> None:
        displays = [part for part in self._parts if isinstance(part, _Display)]
        if kind == "update_display_data":
            for display in displays:
                if display.key == key:
                    display.bundle = bundle
        elif key is None and set(bundle) == {"text/plain"}:
            self._write(f"{bundle['text/plain']}\n")
        elif len(displays) < DISPLAYS:
            self._parts.append(_Display(key, bundle))
        else:
            self._left_out += 1

    @property
    def shown(self) -> Shown:
        """Where it stands now."""
        shown = Shown()
        for part in self._parts:
            if isinstance(part, _Display) and set(part.bundle) > {"text/plain"}:
                shown.rich.append(part.bundle)
            else:
                screen = part if isinstance(part, Screen) else Screen(part.bundle.get("text/plain", ""))
                shown.lines += screen.lines
        if self._left_out:
            shown.lines.append(f"… {self._left_out:,} more displays left out: a rank shows {DISPLAYS} of a cell")
        return shown


def _without_widgets(data: dict[str, Any]) -> dict[str, Any]:
    """What of a display is shown. A widget lives in the rank, where no browser can reach it: its text must do."""
    bundle = {mime: value for mime, value in data.items() if "widget" not in mime}
    size = sum(len(value) for mime, value in bundle.items() if mime != "text/plain" and isinstance(value, str))
    if size > LARGEST:
        return {"text/plain": f"{bundle.get('text/plain', '')[:LONGEST]}\n… a display of {size:,} characters left out"}
    return bundle


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers, shortly: 0, 2, 3 and 4 are "0,2-4"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def ranks_named(span: str) -> str:
    """ "rank 2", or "ranks 0,2-4"."""
    return f"rank {span}" if span.isdigit() else f"ranks {span}"


def alike(values: Sequence[tuple[int, Any]]) -> list[tuple[str, Any]]:
    """Pairs of rank and value, those with equal values as one: (0, a), (1, b), (2, a) is ("0,2", a), ("1", b)."""
    groups: list[tuple[list[int], Any]] = []
    for rank, value in values:
        for members, other in groups:
            if value == other:
                members.append(rank)
                break
        else:
            groups.append(([rank], value))
    return [(spans(members), value) for members, value in groups]


def together(lines: Sequence[tuple[int, list[str]]], live: bool = False) -> str:
    """The lines of each rank as one text, in rank order; of ranks that say the same, once, as in "[0,2-3]".

    With `live` they stay apart, and only the last of each are there: what has been said may be on its way.
    """
    said = [(rank, of_rank) for rank, of_rank in lines if of_rank]
    if live:
        share = max(3, _LIVE[0] // max(1, len(said)))
        groups = [(str(rank), [line[: _LIVE[1]] for line in _last(of_rank, share)]) for rank, of_rank in said]
    else:
        groups = alike(said)
    width = max((len(label) for label, _ in groups), default=0) + 2
    return "\n".join(f"{f'[{label}]':{width}} {line}".rstrip() for label, of_rank in groups for line in of_rank)


def _last(lines: list[str], count: int) -> list[str]:
    return lines if len(lines) <= count else [f"… {len(lines) - count + 1} lines above", *lines[1 - count :]]
