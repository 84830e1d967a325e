"""One rank of one run of parity.py: train by one method, count its bytes, and compare with what one process computed.

A run trains the same model twice: in fp32 with AdamW, where bytes are counted too, and in float64 with SGD. AdamW does
not notice a gradient that is a sum where it should be a mean; SGD does, and float64 leaves rounding no room to hide in.
A run in bf16 has the first training only.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _launch import loopback_bytes
from _methods import Method, builders
from _rank import MemoryMark, build_model, over_ranks, run_rank
from parity import STAGES, Job
from torch import Tensor

from minizero import GPT, GPTConfig, Ledger
from minizero.accumulation import step_traffic
from minizero.courier import offloaded_states
from minizero.data import Batches, load_corpus
from minizero.ledger import ring_bytes
from minizero.memory import model_states, padding

EXACT_STEPS = 5  # in float64 a wrong gradient is ten orders of magnitude above rounding at the first


@dataclass
class Trained:
    """Losses on the whole batch, then, if the run clips, the logs of the norms; and on rank 0 the last parameters."""

    losses: list[float]
    parameters: dict[str, Tensor]


def main() -> None:
    """Read the job, given as JSON on the command line, and do it."""
    job = Job(**json.loads(sys.argv[1]))
    run_rank(lambda device: work(job, device), job.timeout)


def work(job: Job, device: torch.device) -> None:
    """Both trainings of one method; rank 0 writes what came of them to `job.result`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = GPTConfig(context=job.context, layers=job.layers, width=job.width)
    text = load_corpus(context=job.context).training
    batches = Batches(text, job.context, job.batch // world, rank=rank, world=world)
    data = [(x.to(device), y.to(device)) for x, y in (batches.at(step) for step in range(job.steps))]
    build = builders(job.batch // world)[job.method]

    memory, loopback = MemoryMark(device), job.count_loopback and device.type == "cpu"
    model = build_model(config, torch.float32, device)
    predicted = theory(job, model, world)
    method = build(model, torch.optim.AdamW, 1e-3)
    del model  # the method may have another one soon
    fp32, measured = train_and_count(method, data, memory, loopback)
    del method
    fp64 = None
    if not job.method.endswith("-bf16"):
        exact = build(build_model(config, torch.float64, device), torch.optim.SGD, 1e-2)
        fp64 = train(exact, data[:EXACT_STEPS], device)
    if rank == 0:
        finish(job, fp32, fp64, predicted | measured)


def train(method: Method, data: list[tuple[Tensor, Tensor]], device: torch.device) -> Trained:
    """One step for each batch."""
    losses = [method.step(x, y) for x, y in data]
    return Trained(
        over_ranks("mean", losses + [math.log(norm) for norm in method.norms], device), method.full_parameters()
    )


def train_and_count(
    method: Method, data: list[tuple[Tensor, Tensor]], memory: MemoryMark, loopback: bool
) -> tuple[Trained, dict[str, Any]]:
    """The same, counting: bytes on the wire in the second half of the steps, bytes in memory in the last one.

    The first half lets lazy initialisation and DeepSpeed's tracing of the model pass. Memory is looked at between
    backward and the optimizer, when parameters, gradients and optimizer states are all there. Bytes are a rank's and a
    step's; on the wire the mean over ranks, in memory the fullest rank's.
    """
    device, world = memory.device, dist.get_world_size()
    warm, counted = data[: len(data) // 2], data[len(data) // 2 : -1]
    losses = [method.step(x, y) for x, y in warm]
    before = settled_counter() if loopback else 0
    with Ledger() as ledger:
        losses += [method.step(x, y) for x, y in counted]
    passed = settled_counter() - before if loopback else None
    losses.append(method.backward(*data[-1]))
    state, allocated = over_ranks("max", [memory.tensors(), memory.allocated()], device)
    method.update()
    count = {
        "ledger": over_ranks("mean", [ledger.total / len(counted)], device)[0],
        "ledger_kinds": {kind: nbytes / len(counted) for kind, nbytes in ledger.sent.items()},
        "loopback": passed and passed / len(counted) / world,
        "state": state,
        "allocated": allocated,
    }
    return Trained(
        over_ranks("mean", losses + [math.log(norm) for norm in method.norms], device), method.full_parameters()
    ), count


def settled_counter() -> int:
    """The loopback counter while every rank stands still: the second barrier waits for the rank that reads."""
    dist.barrier()
    counter = loopback_bytes()
    dist.barrier()
    return counter


def finish(job: Job, fp32: Trained, fp64: Trained | None, result: dict[str, Any]) -> None:
    """Rank 0: keep the one process's training for the others to compare with, or compare with it; write the result."""
    if job.method.startswith("one"):
        torch.save([asdict(fp32), asdict(fp64)], job.reference)
    else:
        one32, one64 = (Trained(**saved) for saved in torch.load(job.reference))
        result["loss32"] = loss_difference(fp32, one32)
        result["parameters32"] = float(difference(fp32, one32).norm() / flat(one32).norm())
        if fp64 is not None:
            result["loss64"] = loss_difference(fp64, one64)
            result["parameters64"] = float(difference(fp64, one64).abs().max())
    Path(job.result).write_text(json.dumps(result))


def loss_difference(run: Trained, one: Trained) -> float:
    """Largest over all steps; NaN if one is."""
    ours, theirs = (torch.tensor(trained.losses, dtype=torch.float64) for trained in (run, one))
    return float((ours - theirs).abs().max())


def flat(run: Trained) -> Tensor:
    """All parameters as one float64 vector, in the order of their names."""
    return torch.cat([run.parameters[name].double().cpu().flatten() for name in sorted(run.parameters)])


def difference(run: Trained, one: Trained) -> Tensor:
    """Element by element. Raises ValueError when the two runs do not have the same parameters."""
    if run.parameters.keys() != one.parameters.keys():
        raise ValueError(f"parameters differ in name: {sorted(run.parameters.keys() ^ one.parameters.keys())}")
    return flat(run) - flat(one)


def theory(job: Job, model: GPT, world: int) -> dict[str, float]:
    """Ψ, and in bytes what a method's stage sends and keeps: by the formulas of chapter 3, and as minizero must do it.

    minizero pads each unit to a multiple of the number of ranks. In stage 3 a rank also tells the others, in eight
    bytes, which unit it gathers, each time it gathers one. Stage 0 has neither. In bf16 minizero's stage 3 keeps fp32
    masters and no 16-bit shard: the 16 bytes per parameter of fp32. Gradient shards of stages 2 and 3 are fp32.
    To clip, a rank tells its norm, in eight bytes too.
    """
    stage, params = STAGES.get(job.method, 0), sum(p.numel() for p in model.parameters())
    itemsize, precision = 4, "fp32"
    if job.method.endswith("-bf16"):
        itemsize, precision = 2, {1: "mixed", 2: "mixed-fp32-gradients", 3: "fp32"}[stage]
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    units = [*blocks, params - sum(blocks)]
    padded, parts = params + (padding(units, world) if stage > 0 else 0), 4 if job.method.endswith("-acc4") else 1
    roll_calls = 2 * len(units) * 8 * (world - 1) * parts if stage == 3 else 0
    norms = 8 * (world - 1) if parts > 1 else 0
    passes = step_traffic(world, world, stage, parts, 1) // max(1, world - 1)  # one element on each rank: a byte a pass

    def state(elements: int) -> int:
        if job.method.endswith("-offload"):
            held = offloaded_states(elements, world, stage, weight=4)
            return held.device + held.host
        return model_states(elements, world, stage, precision).total

    return {
        "parameters": params,
        "wire_theory": passes * ring_bytes("all_gather", itemsize * params, world),
        "wire_expected": passes * ring_bytes("all_gather", itemsize * padded, world) + roll_calls + norms,
        "state_theory": state(params),
        "state_expected": state(padded),
    }


if __name__ == "__main__":
    main()
