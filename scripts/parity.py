"""Does ZeRO from scratch compute, send and keep what it should? The same training, many ways, next to each other.

    python scripts/parity.py                  # or `make parity`; a few minutes on two cores

One GPT, one text, one seed: first in one process, then under torch DDP, FSDP2, DeepSpeed 1-3 and minizero 0-3, with 2
and 4 ranks, each in processes of its own. A row of the table is one such run:

* loss, parameters: how far from the one process. Loss: the largest difference of any step, fp32. AdamW fp32: relative
  norm of the difference of all parameters after the last step. SGD float64: its largest element, after five steps.
* wire MB: what each rank sends per step. Theory is 2Ψ(N-1)/N elements for stages 0-2, 3Ψ(N-1)/N for stage 3. Ledger
  adds up the collectives; lo is the loopback interface, which counts every byte, TCP/IP headers and all.
* state MB: parameters, gradients and optimizer states alive on the fullest rank between backward and step. Tensors are
  all storages that Python can reach, allocator is what malloc gave out since before the model was built.

Rows that end in -bf16 compute and send in bf16 and keep fp32 masters. They are held against the same fp32 process.
Rows that end in -acc4 take twice the batch, in four micro-batches, and clip to a global norm, whose logarithm counts as
a loss. They are held against one process that takes the batch whole.
Rows that end in -offload keep masters and optimizer states in host memory, beside the weights that are gathered.

All must compute the same. minizero must meet theory on the wire and in memory as well; there the others are shown, not
judged: gloo's reduce-scatter is an all-reduce, and what they keep besides is their choice. Exit code 1 if a row fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _launch import RankFailure, enter_empty_network, launch, prepare_deepspeed

# The ZeRO stage each method amounts to.
STAGES = {"ddp": 0, "fsdp2": 3, "deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3}
STAGES |= {f"minizero{stage}": stage for stage in (0, 1, 2, 3)}
SHARDED = [method for method, stage in STAGES.items() if stage > 0]
STAGES |= {f"{method}-{kind}": STAGES[method] for kind in ("bf16", "acc4") for method in SHARDED}
STAGES |= {"deepspeed3-offload": 3, "minizero3-offload": 3}
STAGES["minizero3-resume"] = 3  # after a first step in stage 1, from its checkpoint
METHODS = list(STAGES)

# How far from one process a method may end up.
LIMITS = {"loss32": 1e-5, "parameters32": 1e-5, "loss64": 1e-12, "parameters64": 1e-12}
# The same for bf16, whose 8 bits round weights, activations and gradients in every method alike. Measured with the
# default sizes: losses off by 1.3e-3 to 2.4e-3, parameters by 5.4e-3 to 5.5e-3 (one process by hand, FSDP2, DeepSpeed,
# minizero); without fp32 masters, all in bf16, 8.8e-3. The limit on parameters lies between: it notices their loss.
LIMITS_BF16 = {"loss32": 5e-3, "parameters32": 7e-3}
# With clipping the logarithm of each norm counts as a loss. Norms are less exact: in 20 fp32 steps on 2 ranks they were
# off by 2.4e-5 to 2.6e-5, FSDP2's, DeepSpeed's and minizero's alike; in float64 they meet the limit above.
LIMITS_ACC4 = LIMITS | {"loss32": 1e-4}
# Room for TCP/IP headers and barriers on the loopback interface, and for Adam's step counters, one for each parameter.
LOOPBACK_EXTRA, STATE_EXTRA = 0.02, 0.01


@dataclass
class Job:
    """What a run trains, and where rank 0 leaves the result. Methods "one…" write `reference`, the others read it."""

    method: str
    width: int
    layers: int
    context: int
    batch: int
    steps: int
    timeout: float
    count_loopback: bool
    reference: str
    result: str


def steps_in_fp32(method: str, row: dict[str, Any]) -> bool:
    """Whether a float64 training was one in name only.

    DeepSpeed 0.19.8 takes a float64 model, but reduces its gradients and steps its parameters in fp32: its settings
    for both know fp16, bf16 and fp32 alone. The error of that is about 1e-7 of a step's change, and grows from there.
    """
    return method.startswith("deepspeed") and row["parameters64"] > LIMITS["parameters64"]


def faults(method: str, row: dict[str, Any]) -> list[str]:
    """Why a row fails: nothing, if it passes."""
    limits = {"bf16": LIMITS_BF16, "acc4": LIMITS_ACC4}.get(method.partition("-")[2], LIMITS)
    limits = {key: limit for key, limit in limits.items() if key.endswith("32") or not steps_in_fp32(method, row)}
    found = [f"{key} {row[key]:.1e} > {limit:.0e}" for key, limit in limits.items() if not row[key] <= limit]
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

NAMES = "method|ranks|loss|AdamW fp32|SGD float64|wire MB: theory|ledger|lo|state MB: theory|tensors|allocator|"
HEADER = NAMES.split("|")


def line(cells: list[str]) -> str:
    """One line of the table: the first column starts at the left, the others end at the right."""
    return f"{cells[0]:<17}" + "".join(
        f"{cell:>{max(9, len(name) + 2)}}" for name, cell in zip(HEADER[1:], cells[1:], strict=True)
    )


def cells(method: str, world: int, row: dict[str, Any]) -> list[str]:
    """What the table says about a run."""

    def mega(key: str) -> str:
        return f"{row[key] / 1e6:.3f}" if (row.get(key) or -1) >= 0 else "n/a"

    def small(key: str) -> str:
        return f"{row[key]:.1e}" if key in row and not (key == "parameters64" and steps_in_fp32(method, row)) else "n/a"

    verdict = "FAILED" if row["faults"] else "passed"
    exact = [small("loss32"), small("parameters32"), small("parameters64")]
    bytes_ = [mega(key) for key in ("wire_theory", "ledger", "loopback", "state_theory", "state", "allocated")]
    return [method, str(world), *exact, *bytes_, verdict]


# ---- the runs ----------------------------------------------------------------------------------------------------


def run(job: Job, world: int) -> dict[str, Any]:
    """Start the ranks of one job and judge what they measured. A run that breaks is a row that fails."""
    script = Path(__file__).with_name("_parity_rank.py")
    try:
        launch(script, [json.dumps(asdict(job))], world, job.timeout + 5)
    except RankFailure as failure:
        print(f"\n{job.method} on {world} ranks did not finish:\n{failure}\n", file=sys.stderr, flush=True)
        return {"faults": [f"rank {failure.ranks[0]} failed first, see above"]}
    row: dict[str, Any] = json.loads(Path(job.result).read_text())
    return row | {"faults": [] if job.method.startswith("one") else faults(job.method, row)}


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
    sizes |= {"count_loopback": count_loopback, "result": f"{folder}/result.json"}
    kinds = {kind: {**sizes, "batch": arguments.batch, "reference": f"{folder}/one{kind}.pt"} for kind in ("", "-acc4")}
    kinds["-acc4"]["batch"] *= 2

    def kind_of(method: str) -> str:
        return "-acc4" if method.endswith("-acc4") else ""

    rows = []
    for kind in sorted({kind_of(method) for method in arguments.methods}):
        one = run(Job(method=f"one{kind}", **kinds[kind]), 1)
        if one["faults"]:
            why = ["nothing to compare with: the one process failed"]
            return [{"method": m, "ranks": n, "faults": why} for n in arguments.ranks for m in arguments.methods]
    print(f"{one['parameters']:,} parameters, {arguments.steps} steps\n\n{line(HEADER)}")
    no_deepspeed = why_no_deepspeed(arguments.methods)
    for world in arguments.ranks:
        for method in arguments.methods:
            if method.startswith("deepspeed") and no_deepspeed:
                row: dict[str, Any] = {"faults": [no_deepspeed]}
            else:
                row = run(Job(method=method, **kinds[kind_of(method)]), world)
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
    return arguments


if __name__ == "__main__":
    sys.exit(main())
