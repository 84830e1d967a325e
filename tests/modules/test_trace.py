"""trace.py, timeline.py: what ranks did and when; nothing is left of it; one clock; a drawing and a file of events."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from slow_link import SlowLink
from torch import Tensor, nn

import minizero
from minizero.memory import gathered_bytes
from minizero.overlap import ByCount, Record, Span, Timeline, Trace, align, draw, merge, waits

pytestmark = pytest.mark.ch23
preload("minizero.overlap.prefetch", "minizero.overlap.timeline")
LAYERS = 4


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def sharded(stage: int = 3, prefetch: Any = 1) -> tuple[nn.Module, minizero.Zero]:
    torch.manual_seed(0)
    model = Chain()
    return model, minizero.Zero(model, model.blocks, stage=stage, prefetch=prefetch)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 6)).sum().backward()


# ---- what is recorded ---------------------------------------------------------------------------------------------


def one_step(stage: int, prefetch: int) -> Record:
    model, zero = sharded(stage, prefetch)
    step(model)
    with Trace(zero) as trace:
        step(model)
    return trace.record


def test_one_step_of_stage_3() -> None:
    for record in run_ranks(2, one_step, 3, 1):
        blocks = [f"blocks.{i}" for i in range(LAYERS)]
        computed = [(s.kind, s.unit) for s in record.work if s.kind in ("forward", "backward") and s.unit in blocks]
        order = [("forward", unit) for unit in blocks] + [("backward", unit) for unit in reversed(blocks)]
        assert list(dict.fromkeys(computed)) == order
        assert [s.unit for s in record.flights if s.kind == "gather"] == ["root", *blocks, "root", *reversed(blocks)]
        assert [s.unit for s in record.flights if s.kind == "reduce"] == [*reversed(blocks), "root"]
        assert Counter(s.kind for s in record.work if s.kind not in ("forward", "backward")) == {
            "launch": 3 * (LAYERS + 1),
            "late": 2,  # the root's, once in each pass
            "wait": 2 * LAYERS + 2 * (LAYERS + 1),  # for weights that were gathered ahead, and in all roll calls
            "reshard": 2 * (LAYERS + 1),
            "land": LAYERS + 1,
        }


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_compute_and_stage_2_reduces(stage: int) -> None:
    for record in run_ranks(2, one_step, stage, 1):
        units = ["root", *(f"blocks.{i}" for i in range(LAYERS))]
        for kind in ("forward", "backward"):
            assert {s.unit for s in record.work if s.kind == kind} == set(units)
        assert [s.unit for s in record.flights] == (units[:0:-1] + units[:1] if stage == 2 else [])
        assert {nbytes for _, unit, nbytes in record.live if unit == "blocks.0"} == {4 * 42}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_thread_does_one_thing_at_a_time(stage: int) -> None:
    for record in run_ranks(2, one_step, stage, 2):
        assert all(span.seconds >= 0 for span in (*record.work, *record.flights))
        assert all(one.end <= other.start for one, other in zip(record.work, record.work[1:], strict=False))
        assert record.spent(*{s.kind for s in record.work}) <= record.work[-1].end - record.work[0].start + 1e-9


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathered_bytes_are_those_of_theory(prefetch: int) -> None:
    for record in run_ranks(2, one_step, 3, prefetch):
        totals = [nbytes for _, nbytes in record.totals()]
        assert max(totals) == 4 * 8 + gathered_bytes([42] * LAYERS, 2, 4, prefetch)  # the root has 7, padded to 8
        assert totals[-1] == 0


# ---- nothing is left of it ----------------------------------------------------------------------------------------


def state_of(zero: minizero.Zero) -> list[Any]:
    """Everything a trace could leave: attributes of what it wraps, hooks of modules."""
    buckets = [bucket for buckets in zero._reducer._buckets.values() for bucket in buckets]
    objects = [zero._gatherer, *zero.units, *buckets]
    hooks = [(len(u.module._forward_hooks), len(u.module._forward_pre_hooks)) for u in zero.units]
    return [*(sorted(vars(o)) for o in objects), *hooks]


def leaves_nothing(stage: int) -> None:
    model, zero = sharded(stage)
    before = state_of(zero)
    with Trace(zero) as outer:
        assert state_of(zero) != before
        with Trace(zero) as inner:
            step(model)
        step(model)
    assert state_of(zero) == before
    assert len(outer.record.work) > len(inner.record.work) > 0
    so_far = len(outer.record.work)
    step(model)
    assert len(outer.record.work) == so_far

    def fail(*_: Any) -> None:
        raise ArithmeticError("in the middle")

    handle = model.blocks[2].register_forward_hook(fail)
    with pytest.raises(ArithmeticError), Trace(zero):
        step(model)
    handle.remove()
    assert state_of(zero) == before
    step(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_trace_leaves_nothing_also_after_an_error(stage: int) -> None:
    run_ranks(2, leaves_nothing, stage)


def gradients(traced: bool) -> list[Tensor]:
    model, zero = sharded()
    if traced:
        with Trace(zero):
            step(model)
    else:
        step(model)
    return [piece.grad for _, piece in zero.named_slices()]


def test_a_trace_changes_no_bit() -> None:
    for on, off in zip(run_ranks(2, gradients, True), run_ranks(2, gradients, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))


# ---- what overlap hides -------------------------------------------------------------------------------------------

GATHER, COMPUTE = 0.05, 0.06


class Sleep(torch.autograd.Function):
    """Computes for COMPUTE seconds in forward and in backward, without a processor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(COMPUTE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(COMPUTE)
        return gradient


class Sleepy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(super().forward(x))


def on_a_slow_link(count: int) -> list[float]:
    """Seconds waited in forward and in backward: the least of three steps, since a busy machine only adds to them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Sleepy(4, 4) for _ in range(LAYERS)])
    zero = minizero.Zero(model, list(model), prefetch=ByCount(count), transport=SlowLink(lambda nbytes: GATHER))
    waited = []
    for _ in range(3):
        with Trace(zero) as forward:
            loss = model(torch.ones(1, 4)).sum()
        with Trace(zero) as backward:
            loss.backward()
        waited.append([trace.record.spent("wait", "late") for trace in (forward, backward)])
    return [min(seconds) for seconds in zip(*waited, strict=True)]


def test_waiting_is_what_the_formula_says() -> None:
    """Sleeping takes no processor, and the limits are wide."""
    wanted = {count: sum(waits([COMPUTE] * LAYERS, [GATHER] * LAYERS, count)) for count in (0, 1)}
    assert wanted == {0: pytest.approx(LAYERS * GATHER), 1: pytest.approx(GATHER)}
    for count, seconds in wanted.items():
        for passes in run_ranks(2, on_a_slow_link, count):
            assert all(0.6 * seconds < found < seconds + GATHER * (LAYERS - 1) / 2 for found in passes)


# ---- all ranks on one clock ---------------------------------------------------------------------------------------


def record_at(start: float) -> Record:
    work = [Span("forward", "root", start, start + 2), Span("wait", "blocks.0", start + 2, start + 3)]
    flights = [Span("gather", "blocks.0", start + 1, start + 3), Span("vain", "blocks.1", start + 2, start + 4)]
    return Record(work, flights, [(start, "root", 100), (start + 1, "blocks.0", 40), (start + 3, "blocks.0", 0)])


def test_clocks_are_aligned_by_the_median_over_barriers() -> None:
    # rank 1's clock is 1,000 s ahead; it left one barrier late
    clocks = [[1.0, 2.0, 3.0], [1001.0, 1002.0, 1003.5]]
    timeline = align(clocks, [record_at(10.0), record_at(1010.5)])
    assert timeline.offsets == [0.0, 1000.0]
    assert timeline.doubt == 0.0
    assert [record.work[0].start for record in timeline.records] == [0.0, 0.5]
    assert timeline.records[1].flights[0] == Span("gather", "blocks.0", 1.5, 3.5)
    assert timeline.records[1].totals() == [(0.5, 100), (1.5, 140), (3.5, 100)]
    assert align([[1.0], [1001.0]], [record_at(10.0), record_at(1010.5)]).doubt == 0.0
    assert align([[0.0] * 3, [5.0, 5.2, 5.6]], [record_at(0.0), record_at(5.0)]).doubt == pytest.approx(0.2)


def merged_with_a_clock_of_its_own(folder: str) -> tuple[Timeline, str]:
    import minizero.overlap.timeline
    import minizero.overlap.trace

    ahead = 50.0 * dist.get_rank()
    for module in (minizero.overlap.timeline, minizero.overlap.trace):
        module.perf_counter = lambda: time.perf_counter() + ahead  # type: ignore[attr-defined]
    model, zero = sharded()
    step(model)
    with Trace(zero) as trace:
        step(model)
    timeline = merge(trace.record)
    path = Path(folder, f"{dist.get_rank()}.json")
    timeline.save(path)
    return timeline, path.read_text()


def test_ranks_with_other_clocks_are_put_side_by_side(tmp_path: Path) -> None:
    (timeline, text), (other, same) = run_ranks(2, merged_with_a_clock_of_its_own, str(tmp_path))
    assert timeline == other
    assert text == same
    assert timeline.offsets == [0.0, pytest.approx(50.0, abs=1.0)]
    assert abs(timeline.records[0].work[0].start - timeline.records[1].work[0].start) < 5.0
    events = json.loads(text)["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    check_format(json.loads(text))


def check_format(trace: dict[str, Any]) -> None:
    """What the description of the trace event format asks for."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    open_flights: dict[str, float] = {}
    last: dict[int, float] = {}
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= last.get(event["pid"], 0.0) - 0.002  # rounded to nanoseconds; none overlap
            last[event["pid"]] = event["ts"] + event["dur"]
        elif event["ph"] == "b":
            assert event["id"] not in open_flights
            open_flights[event["id"]] = event["ts"]
        elif event["ph"] == "e":
            assert event["ts"] >= open_flights.pop(event["id"])
        elif event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
        else:
            assert event["ph"] == "M"
            assert event["name"] in ("process_name", "thread_name")
    assert open_flights == {}


def test_events_are_in_microseconds_and_name_ranks_and_lanes() -> None:
    trace = Timeline([record_at(0.0), record_at(0.5)], [0.0, 7.0], 1e-5).chrome()
    check_format(trace)
    events = trace["traceEvents"]
    assert {"ph": "X", "name": "wait blocks.0", "cat": "wait", "pid": 1, "tid": 0, "ts": 2.5e6, "dur": 1e6} in events
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(r, t): lane for r in (0, 1) for t, lane in enumerate(("thread", "gathers", "reductions"))}
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 0] == [100, 140, 100]
    assert trace["otherData"] == {"clock offsets in s": [0.0, 7.0], "doubt in s": 1e-5}


# ---- the drawing --------------------------------------------------------------------------------------------------


def test_the_drawing_says_in_words_what_it_shows_and_stays_inside() -> None:
    timeline = Timeline([record_at(0.0), record_at(0.5)], [0.0, 0.0], 0.0)
    drawing = ElementTree.fromstring(draw(timeline, "Two ranks", ranks=(0, 1)))
    title = drawing.find("{*}title")
    assert title is not None
    assert title.text == (
        "Two ranks Rank 0: forward 2000 ms, backward 0 ms, waiting 1000 ms; at most 140 bytes of gathered parameters. "
        "Rank 1: forward 2000 ms, backward 0 ms, waiting 1000 ms; at most 140 bytes of gathered parameters."
    )
    width, height = map(float, drawing.attrib["viewBox"].split()[2:])
    bars = [{k: float(b.attrib[k]) for k in ("x", "y", "width", "height")} for b in drawing.findall(".//{*}rect")]
    assert len(bars) > 12
    assert all(b["x"] >= 0 and b["x"] + b["width"] <= width and b["y"] + b["height"] <= height for b in bars)
    words = [text.text for text in drawing.findall(".//{*}text")]
    assert {"rank 0", "rank 1", "thread", "gathers", "reductions", "gathered", "ms", "waiting"} <= set(words)


def test_flights_that_overlap_are_drawn_in_rows() -> None:
    record = Record([], [Span("gather", u, i, i + 3.0) for i, u in enumerate("abcd")], [])
    drawing = ElementTree.fromstring(draw(Timeline([record], [0.0], 0.0), "Rows"))
    rows = [b.attrib["y"] for b in drawing.findall(".//{*}rect") if b.attrib["fill"] == "#D55E00"][:4]
    assert len(set(rows)) == 3
    assert rows[3] == rows[0]  # it had landed
