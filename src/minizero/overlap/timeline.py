"""Chapter 23, overlap: the records of all ranks on one clock, as a drawing and as a file for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from minizero.figures import line, rect, svg, text
from minizero.overlap.trace import Record, Span

LANES = "thread", "gathers", "reductions"


@dataclass
class Timeline:
    """`records` of all ranks, in seconds of rank 0's clock since the first of them began.

    `offsets` are the seconds that each clock was ahead of rank 0's. `doubt` says how far to trust them: the median
    deviation of the single measurements, of the worst rank.
    """

    records: list[Record]
    offsets: list[float]
    doubt: float

    def chrome(self) -> dict[str, Any]:
        """The timeline as trace events: pid = rank, tid = lane, ts and dur in microseconds.

        Work is made of complete events ("X"); flights, which may overlap, of asynchronous ones ("b" and "e"); the bytes
        are a counter ("C"). Names of ranks and lanes are metadata ("M").
        """
        events: list[dict[str, Any]] = []
        for rank, record in enumerate(self.records):

            def add(ph: str, name: str, lane: int, seconds: float, rank: int = rank, **more: Any) -> None:
                events.append({"ph": ph, "name": name, "pid": rank, "tid": lane, "ts": _microseconds(seconds), **more})

            add("M", "process_name", 0, 0, args={"name": f"rank {rank}"})
            for lane, name in enumerate(LANES):
                add("M", "thread_name", lane, 0, args={"name": name})
            for span in record.work:
                dur = _microseconds(span.seconds)
                add("X", f"{span.kind} {span.unit}", 0, span.start, cat=span.kind, dur=dur)
            for number, span in enumerate(record.flights):
                lane, number_in_all = 2 if span.kind == "reduce" else 1, f"{rank}.{number}"
                for ph, seconds in (("b", span.start), ("e", span.end)):
                    add(ph, span.unit, lane, seconds, cat=span.kind, id=number_in_all)
            for seconds, nbytes in record.totals():
                add("C", "gathered bytes", 0, seconds, args={"bytes": nbytes})
        clocks = {"clock offsets in s": self.offsets, "doubt in s": self.doubt}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": clocks}

    def save(self, path: str | Path) -> None:
        """Write the trace events to a JSON file, which ui.perfetto.dev and chrome://tracing open."""
        Path(path).write_text(json.dumps(self.chrome()), encoding="utf-8")


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def merge(record: Record, group: ProcessGroup | None = None, rounds: int = 9) -> Timeline:
    """The records of all ranks on the clock of the group's first rank; a collective, to be called by all.

    Clocks of different machines begin at different moments. All ranks leave a barrier at about the same time: what
    their clocks say then, less what the first one's says, is their offset. It is the median over `rounds` barriers.
    """
    clocks = []
    for _ in range(rounds):
        dist.barrier(group)
        clocks.append(perf_counter())
    found: list[tuple[list[float], Record]] = [(clocks, record)] * dist.get_world_size(group)
    dist.all_gather_object(found, (clocks, record), group=group)
    return align(*zip(*found, strict=True))


def align(clocks: Sequence[Sequence[float]], records: Sequence[Record]) -> Timeline:
    """One timeline from the ranks' records and from what each rank's clock said after the same barriers."""
    apart = [[theirs - first for theirs, first in zip(clock, clocks[0], strict=True)] for clock in clocks]
    offsets = [median(seconds) for seconds in apart]
    doubt = max(median(abs(s - offset) for s in seconds) for seconds, offset in zip(apart, offsets, strict=True))
    start = min(time - offset for r, offset in zip(records, offsets, strict=True) for time, *_ in r.live[:1])
    return Timeline([r.shifted(offset + start) for r, offset in zip(records, offsets, strict=True)], offsets, doubt)


# ---- drawing ------------------------------------------------------------------------------------------------------

FILLS = {"forward": "parameters", "backward": "gradients", "wait": "idle", "late": "idle", "land": "idle"}
LEGEND = {"forward": "parameters", "backward": "gradients", "collective": "communication", "waiting": "idle"}
WIDTH, LEFT, LANE = 460, 76, 21


def draw(timeline: Timeline, title: str = "", ranks: Iterable[int] = (0,), end: float | None = None) -> str:
    """An SVG drawing of some ranks, each with three lanes above its gathered bytes.

    A collective is drawn from its start until somebody had waited for it, those that overlap in rows. Drawings with the
    same `end` (seconds) have the same scale.
    """
    chosen = {rank: timeline.records[rank] for rank in ranks}
    last = end or max(span.end for record in chosen.values() for span in (*record.work, *record.flights))
    scale, y = (WIDTH - LEFT - 8) / last, 20.0
    shapes = [text(0, 13, title, font_weight="bold")]
    for rank, record in chosen.items():
        shapes.append(text(0, y + 13, f"rank {rank}"))
        y += 20
        reductions = [span for span in record.flights if span.kind == "reduce"]
        gathers = [span for span in record.flights if span.kind != "reduce"]
        for name, spans in zip(LANES, (record.work, gathers, reductions), strict=True):
            shapes += [text(0, y + 15, name), *_bars(spans, y, scale)]
            y += LANE + 4
        shapes += _curve(record, y, scale, last)
        y += 2 * LANE + 8
    shapes += _axis(y, scale, last)
    for i, (word, fill) in enumerate(LEGEND.items()):
        x = LEFT + i * (WIDTH - LEFT) / len(LEGEND)
        shapes += [rect(x, y + 40, 11, 11, fill), text(x + 15, y + 50, word)]
    return svg(WIDTH, y + 56, " ".join([title, *(_in_words(n, record) for n, record in chosen.items())]), *shapes)


def _bars(spans: Sequence[Span], y: float, scale: float) -> list[str]:
    ends: list[float] = []  # of the rows
    rows = []
    for span in sorted(spans, key=lambda span: span.start):
        row = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        ends[row : row + 1] = [span.end]
        rows.append(row)
    height, shapes = LANE / max(len(ends), 1), []
    for row, span in zip(rows, sorted(spans, key=lambda span: span.start), strict=True):
        x, top, width = LEFT + span.start * scale, y + row * height, span.seconds * scale
        shapes.append(rect(x, top, max(width - 0.4, 0.4), height - 1, FILLS.get(span.kind, "communication")))
        name = span.unit.rpartition(".")[2]
        if span.kind in ("forward", "backward", "gather", "reduce") and width > 7 * len(name) + 2 and name:
            ink = "white" if span.kind == "forward" else "black"
            size = min(12.0, height)
            shapes.append(
                text(x + width / 2, top + height / 2 + 0.35 * size, name, ink, text_anchor="middle", font_size=size)
            )
    return shapes


def _curve(record: Record, y: float, scale: float, last: float) -> list[str]:
    most = max((nbytes for _, nbytes in record.totals()), default=0) or 1
    shapes, height = [], 2 * LANE
    steps = [*record.totals(), (last, 0)]
    for (start, nbytes), (stop, _) in pairwise(steps):
        tall, width = height * nbytes / most, (min(stop, last) - start) * scale
        if tall and width > 0:
            shapes.append(rect(LEFT + start * scale, y + height - tall, width, tall, "parameters", opacity=0.5))
    shapes += [
        text(0, y + 12, "gathered"),
        text(0, y + 28, f"{most / 1e6:.3g} MB" if most >= 1e6 else f"{most / 1e3:.3g} kB"),
        line(LEFT, y, WIDTH - 8, y, "idle"),
    ]
    return shapes


def _axis(y: float, scale: float, last: float) -> list[str]:
    step = next(s for e in range(-6, 9) for s in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if last / s <= 5)
    shapes = [line(LEFT, y, WIDTH - 8, y)]
    for i in range(int(last / step) + 1):
        x = LEFT + i * step * scale
        shapes += [line(x, y, x, y + 4), text(x, y + 17, f"{i * step * 1e3:g}", text_anchor="middle")]
    return [*shapes, text(WIDTH - 8, y + 32, "ms", text_anchor="end")]


def _in_words(rank: int, record: Record) -> str:
    spent = {"forward": ["forward"], "backward": ["backward"], "waiting": ["wait", "late", "land"]}
    parts = ", ".join(f"{word} {1e3 * record.spent(*kinds):.0f} ms" for word, kinds in spent.items())
    most = max((nbytes for _, nbytes in record.totals()), default=0)
    return f"Rank {rank}: {parts}; at most {most:,} bytes of gathered parameters."
