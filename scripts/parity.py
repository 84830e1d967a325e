"""Does ZeRO from scratch compute, send and keep what it should? The same training, many ways, next to each other.

    python scripts/parity.py                  # or `make parity`; a few minutes on two cores

One GPT, one text, one seed: first in one process, then under torch DDP, FSDP2, DeepSpeed 1-3 and minizero 0-3, with 2
and 4 ranks, each in processes of its own. A row of the table is one such run:

* loss, AdamW, SGD: how far from the one process. Loss: the largest difference of any step with AdamW. AdamW: relative
  norm of the difference of all parameters after the last step. SGD: the same of what five steps moved; scale: how much
  too long that way is, which a factor in the gradient makes it. SGD float64: the largest difference of a parameter.
* wire MB: what each rank sends per step. Theory is 2Ψ(N-1)/N elements for stages 0-2, 3Ψ(N-1)/N for stage 3. Ledger
  adds up the collectives; lo is the loopback interface, which counts every byte, TCP/IP headers and all.
* state MB: parameters, gradients and optimizer states alive on the fullest rank between backward and step. Tensors are
  all storages that Python can reach, allocator is what malloc gave out since before the model was built.

Rows that end in -bf16 compute and send in bf16 and keep fp32 masters, from weights that bf16 can hold. So does the one
process they are held against.
Rows that end in -acc4 take twice the batch, in four micro-batches, and clip to a global norm, whose logarithm counts as
a loss. They are held against one process that takes the batch whole.
Rows that end in -offload keep masters and optimizer states in host memory, beside the weights that are gathered.

All must compute the same, up to rounding. How much that is differs from machine to machine, so it is measured in the
same run: the one process trains again with its batch split as the ranks split it, in another order, and with norms in
float64. The table begins with how far that takes it from itself, and with the limits that follow. In float64 the limit
is 1e-12 on any machine.

minizero must meet theory on the wire and in memory as well; there the others are shown, not judged: gloo's
reduce-scatter is an all-reduce, and what they keep besides is their choice. Exit code 1 if a row fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compare.job import METHODS, Job
from compare.launch import RankFailure, enter_empty_network, launch, prepare_deepspeed

KINDS = ("", "-acc4", "-bf16")  # of each one process is trained, which the others are compared with


def kind_of(method: str) -> str:
    """Which one process a method is compared with."""
    return next((kind for kind in KINDS[1:] if method.endswith(kind)), "")


# Limits are so many times what one process differs from itself. Splitting the batch is one draw of rounding, a method
# is another: with width 384, one layer and 4 steps, methods were at most 1.1 times as far off in the weights of AdamW
# and SGD. Three is more than that, and a planted fault is beyond four limits (tests/machines/test_scripts.py).
FACTOR = 3
EXACT = {"loss64": 1e-12, "parameters64": 1e-12}
EPSILON = 2.0**-23  # of fp32, in which all weights that an optimizer moves are kept
# Room for TCP/IP headers and barriers on the loopback interface, and for Adam's step counters, one for each parameter.
LOOPBACK_EXTRA, STATE_EXTRA = 0.02, 0.01


def limits(rounding: dict[str, float], steps: int) -> dict[str, float]:
    """How far from one process a method may end up, from how far that was from itself, and at least as follows.

    Losses: four times the distance of two neighbouring fp32 numbers. AdamW: that distance once in every step and
    weight. SGD: the same, once, seen from how far SGD moved. Rounding has no direction, so of the scale, which is its
    share in one direction among millions, a tenth is allowed.
    """
    floors = {
        "loss32": 4 * EPSILON * rounding["loss"],
        "parameters32": steps * EPSILON,
        "sgd32": EPSILON * rounding["reach"],
    }
    found = {name: max(FACTOR * rounding[name], floor) for name, floor in floors.items()}
    return found | {"scale32": found["sgd32"] / 10}


def steps_in_fp32(method: str, row: dict[str, Any]) -> bool:
    """Whether a float64 training was one in name only.

    DeepSpeed 0.19.8 takes a float64 model, but reduces its gradients and steps its parameters in fp32: its settings
    for both know fp16, bf16 and fp32 alone. The error of that is about 1e-7 of a step's change, and grows from there.
    """
    return method.startswith("deepspeed") and row.get("parameters64", 0.0) > EXACT["parameters64"]


def faults(method: str, row: dict[str, Any]) -> list[str]:
    """Why a row fails: nothing, if it passes."""
    allowed = dict(row["limits"])
    if not (method.endswith("-bf16") or "refused64" in row or steps_in_fp32(method, row)):
        allowed |= EXACT
    found = [f"{key} {row[key]:.1e} > {limit:.1e}" for key, limit in allowed.items() if not row[key] <= limit]
    if "refused64" in row and not method.startswith("deepspeed"):
        found.append(f"float64 refused: {row['refused64']}")
    if method.startswith("minizero"):
        wire, state = row["wire_expected"], row["state_expected"]
        if abs(row["ledger"] - wire) >= 1:  # a byte of rounding
            found.append(f"ledger {row['ledger']:.1f} bytes, expected {wire:.1f}")
        if row["loopback"] is not None and not wire <= row["loopback"] <= wire * (1 + LOOPBACK_EXTRA):
            found.append(f"loopback {row['loopback']:.1f} bytes, expected {wire:.1f} and at most 2 % more")
        if not state <= row["state"] <= state * (1 + STATE_EXTRA):
            found.append(f"state {row['state']:.0f} bytes, expected {state:.0f} and at most 1 % more")
    return found


# ---- the table ---------------------------------------------------------------------------------------------------

NAMES = "method|ranks|loss|AdamW|SGD|scale|SGD float64|wire MB: theory|ledger|lo|state MB: theory|tensors|allocator|"
HEADER = NAMES.split("|")
ROUNDED = ["loss32", "parameters32", "sgd32", "scale32"]


def line(cells: list[str]) -> str:
    """One line of the table: the first column starts at the left, the others end at the right."""
    return f"{cells[0]:<17}" + "".join(
        f"{cell:>{max(9, len(name) + 2)}}" for name, cell in zip(HEADER[1:], cells[1:], strict=True)
    )


def cells(method: str, world: int, row: dict[str, Any]) -> list[str]:
    """What the table says about a run."""

    def mega(key: str) -> str:
        return f"{row[key] / 1e6:.3f}" if (row.get(key) or -1) >= 0 else "n/a"

    verdict = "FAILED" if row["faults"] else "passed"
    exact = "refused" if "refused64" in row else small(row, "parameters64") if not steps_in_fp32(method, row) else "n/a"
    bytes_ = [mega(key) for key in ("wire_theory", "ledger", "loopback", "state_theory", "state", "allocated")]
    return [method, str(world), *(small(row, key) for key in ROUNDED), exact, *bytes_, verdict]


def small(figures: dict[str, Any], key: str) -> str:
    """A figure with two digits, if it is there."""
    return f"{figures[key]:.1e}" if key in figures else "n/a"


def yardstick(kind: str, one: dict[str, Any]) -> str:
    """Two lines of the table: how far the one process is from itself, and what is allowed."""
    itself = [small(one["rounding"], key) for key in ROUNDED]
    allowed = [small(one["limits"], key) for key in ROUNDED]
    exact, rest = "n/a" if kind == "-bf16" else small(EXACT, "parameters64"), [""] * 7
    lines = [f"one{kind}", "1", *itself, "", *rest], [f"limit{kind}", "", *allowed, exact, *rest]
    return "\n".join(line(cells).rstrip() for cells in lines)


# ---- the runs ----------------------------------------------------------------------------------------------------


def run(job: Job, world: int) -> dict[str, Any]:
    """Start the ranks of one job; what they measured. A run that breaks has "faults"."""
    script = Path(__file__).with_name("compare") / "parity_rank.py"
    try:
        launch(script, [json.dumps(asdict(job))], world, job.timeout + 5)
    except RankFailure as failure:
        print(f"\n{job.method} on {world} ranks did not finish:\n{failure}\n", file=sys.stderr, flush=True)
        return {"faults": [f"rank {failure.ranks[0]} failed first, see above"]}
    measured: dict[str, Any] = json.loads(Path(job.result).read_text())
    return measured


def why_no_deepspeed(methods: list[str]) -> str | None:
    """None if DeepSpeed is not asked for or works; else why its rows have to fail."""
    if any(method.startswith("deepspeed") for method in methods):
        try:
            prepare_deepspeed()
        except RankFailure as failure:
            print(f"\n{failure}\n", file=sys.stderr, flush=True)
            return "DeepSpeed cannot be used here, see above"
    return None


def compare(arguments: argparse.Namespace, count_loopback: bool, folder: str) -> list[dict[str, Any]]:
    """Run the one processes, then every method with every number of ranks; print the table as it grows."""
    sizes = {name: getattr(arguments, name) for name in ("width", "layers", "context", "steps", "timeout")}
    sizes |= {"count_loopback": count_loopback, "result": f"{folder}/result.json", "ranks": arguments.ranks}
    kinds = {kind: {**sizes, "batch": arguments.batch, "reference": f"{folder}/one{kind}.pt"} for kind in KINDS}
    kinds["-acc4"]["batch"] *= 2
    ones: dict[str, dict[str, Any]] = {}
    for kind in sorted({kind_of(method) for method in arguments.methods}):
        ones[kind] = one = run(Job(method=f"one{kind}", **kinds[kind]), 1)
        if "faults" in one:
            why = ["nothing to compare with: the one process failed"]
            return [{"method": m, "ranks": n, "faults": why} for n in arguments.ranks for m in arguments.methods]
        one["limits"] = limits(one["rounding"], arguments.steps)
    print(
        f"{one['parameters']:,} parameters, {arguments.steps} steps; limits are {FACTOR} times what one process differs"
    )
    print(f"from itself when it splits its batch otherwise\n\n{line(HEADER)}")
    print("\n".join(yardstick(kind, one) for kind, one in ones.items()), flush=True)
    rows, no_deepspeed = [], why_no_deepspeed(arguments.methods)
    for world in arguments.ranks:
        for method in arguments.methods:
            kind = kind_of(method)
            if method.startswith("deepspeed") and no_deepspeed:
                row: dict[str, Any] = {"faults": [no_deepspeed]}
            else:
                row = run(Job(method=method, **kinds[kind]), world) | {"limits": ones[kind]["limits"]}
                row.setdefault("faults", [] if "faults" in row else faults(method, row))
            print(line(cells(method, world, row)), flush=True)
            rows.append({"method": method, "ranks": world, **row})
    return rows


def notes(rows: list[dict[str, Any]], no_network: str | None) -> None:
    """Under the table: why rows fail, and why a figure is not there."""
    for row in rows:
        for fault in row["faults"]:
            print(f"{row['method']} on {row['ranks']} ranks: {fault}")
    in_fp32 = [row["parameters64"] for row in rows if "parameters64" in row and steps_in_fp32(row["method"], row)]
    if in_fp32:
        print(f"SGD float64 n/a: DeepSpeed took the float64 model but stepped it in fp32, up to {max(in_fp32):.1e} off")
    for refusal in sorted({row["refused64"] for row in rows if "refused64" in row}):
        print(f"SGD float64 refused: DeepSpeed does so where it takes fp16 to be supported: {refusal}")
    if no_network:
        print(f"lo n/a: {no_network}; the ledger alone speaks for the wire")


def main() -> int:
    """Print the table, write the JSON, count."""
    arguments = parse()
    no_network = enter_empty_network()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(arguments, no_network is None, folder)
    notes(rows, no_network)
    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    failed = sum(bool(row["faults"]) for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=16, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, all ranks together")
    parser.add_argument("--steps", type=int, default=20, help="training steps, at least 4")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one run (default: 240)")
    parser.add_argument("--json", type=Path, default=Path("parity.json"), help="where the figures go (parity.json)")
    arguments = parser.parse_args()
    if arguments.steps < 4:
        parser.error("--steps must be at least 4: two to settle, one to count bytes, one to look at memory")
    for world in arguments.ranks:
        if world < 2 or arguments.batch % world:
            parser.error(f"--ranks must be 2 or more and divide --batch {arguments.batch}, got {world}")
        if 2 * arguments.batch % (4 * world) and any(method.endswith("-acc4") for method in arguments.methods):
            parser.error(f"--batch must be a multiple of {2 * world} for four micro-batches on {world} ranks")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
