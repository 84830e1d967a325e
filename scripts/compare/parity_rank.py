"""One rank of one run of parity.py: train by one method, count its bytes, and compare with what one process computed.

A run trains the same model three times: with AdamW, where bytes are counted too; with SGD; and with SGD in float64. The
first two are in fp32, or in bf16 with fp32 masters. AdamW does not notice a gradient that is a sum where it should be a
mean; SGD does, and float64 leaves rounding no room to hide in. A run in bf16 has no third training.

The one process trains more often: with its batch split as the ranks will split it, in another order, and with as many
threads as a rank has. What differs then is rounding, on this machine, for this model, in as many steps.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compare.job import STAGES, Job
from compare.launch import loopback_bytes
from compare.methods import Method, OptimizerClass, RefusedError, builders
from compare.rank import build_model, run_rank
from minizero import GPT, GPTConfig, Ledger
from minizero.accumulation import step_traffic
from minizero.collectives import over_ranks, ring_bytes
from minizero.data import Batches, load_corpus
from minizero.memory import model_states, padding
from minizero.meter import MemoryMark
from minizero.offload import offloaded_states

SGD_STEPS = 5  # a wrong gradient is orders of magnitude above rounding at the first, in float64 ten
LR_ADAMW, LR_SGD = 1e-3, 1e-2

Builder = Callable[[GPT, OptimizerClass, float], Method]


@dataclass
class Trained:
    """Losses on the whole batch, then, if the run clips, the logs of the norms; and on rank 0 the last parameters."""

    losses: list[float]
    parameters: dict[str, Tensor]


@dataclass
class Trainings:
    """AdamW and SGD in the method's own precision; `exact`, SGD in float64, is None for a method without it."""

    adamw: Trained
    sgd: Trained
    exact: Trained | None = None


Data = list[tuple[Tensor, Tensor]]


def main() -> None:
    """Read the job, given as JSON on the command line, and do it."""
    job = Job(**json.loads(sys.argv[1]))
    run_rank(lambda device: work(job, device), job.timeout)


def work(job: Job, device: torch.device) -> None:
    """All trainings of one method; rank 0 writes what came of them to `job.result`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text = load_corpus(context=job.context).training
    batches = Batches(text, job.context, job.batch // world, rank=rank, world=world)
    data = [(x.to(device), y.to(device)) for x, y in (batches.at(step) for step in range(job.steps))]
    build = builders(job.batch // world)[job.method]

    memory, loopback = MemoryMark(device), job.count_loopback and device.type == "cpu"
    model = fresh(job, torch.float32, device)
    result: dict[str, Any] = theory(job, model, world)
    method = build(model, torch.optim.AdamW, LR_ADAMW)
    del model  # the method may have another one soon
    adamw, measured = train_and_count(method, data, memory, loopback)
    del method
    done = Trainings(adamw, train_sgd(job, build, data, device))
    if not job.method.endswith("-bf16"):
        try:
            done.exact = train_sgd(job, build, data, device, torch.float64)
        except RefusedError as refusal:  # on all ranks: they hold the same model
            result["refused64"] = str(refusal)
    if job.method.startswith("one"):
        result["rounding"] = rounding(job, done, build, data, device)
        torch.save(asdict(done), job.reference)
    elif rank == 0:
        saved = torch.load(job.reference)
        one = Trainings(**{name: trained and Trained(**trained) for name, trained in saved.items()})
        result |= compare(done, one, at_start(job, device))
    if rank == 0:
        Path(job.result).write_text(json.dumps(result | measured))


def fresh(job: Job, dtype: torch.dtype, device: torch.device) -> GPT:
    """The model before its first step, the same everywhere.

    Before a training in bf16 its weights are rounded to bf16. DeepSpeed rounds the model before it copies the masters,
    the others after: that is far more than what they move in some steps of SGD.
    """
    model = build_model(GPTConfig(context=job.context, layers=job.layers, width=job.width), dtype, device)
    return model.to(torch.bfloat16).to(dtype) if job.method.endswith("-bf16") else model


def at_start(job: Job, device: torch.device) -> Trained:
    """Its parameters."""
    return Trained([], dict(fresh(job, torch.float32, device).named_parameters()))


def train_twice(job: Job, build: Builder, data: Data, device: torch.device) -> Trainings:
    """With AdamW and with SGD, and nothing is counted."""
    adamw = train(build(fresh(job, torch.float32, device), torch.optim.AdamW, LR_ADAMW), data, device)
    return Trainings(adamw, train_sgd(job, build, data, device))


def train_sgd(
    job: Job, build: Builder, data: Data, device: torch.device, dtype: torch.dtype = torch.float32
) -> Trained:
    """The few steps of SGD."""
    return train(build(fresh(job, dtype, device), torch.optim.SGD, LR_SGD), data[:SGD_STEPS], device)


def train(method: Method, data: Data, device: torch.device) -> Trained:
    """One step for each batch."""
    losses = [method.step(x, y) for x, y in data]
    return Trained(
        over_ranks("mean", losses + [math.log(norm) for norm in method.norms], device), method.full_parameters()
    )


def in_other_order(build: Builder, parts: int, exact_norm: bool, *arguments: Any) -> Method:
    """The method, in `parts` micro-batches."""
    method = build(*arguments)
    method.parts, method.exact_norm = parts, exact_norm
    return method


def rounding(job: Job, one: Trainings, build: Builder, data: Data, device: torch.device) -> dict[str, float]:
    """How far the one process is from itself when only the order of its sums is another: the largest over all splits.

    For each number of ranks that `job` compares, the batch comes in that many parts, first to last and last to first;
    at the end one sequence at a time. From last to first, norms are added up in float64. Also `loss`, the largest loss,
    and `reach`, the norm of the weights over that of what SGD moved: how many times a rounding of the weights counts in
    the difference.
    """
    start = at_start(job, device)
    plain, threads = torch.get_num_threads(), os.cpu_count() or 1
    several = 4 if job.method.endswith("-acc4") else 1
    splits = [(n * several, threads // n, back) for n in job.ranks for back in (False, True)] + [(job.batch, 1, True)]
    found: dict[str, float] = {}
    for parts, per_rank, is_backwards in splits:
        torch.set_num_threads(max(1, per_rank))
        turned = [(x.flip(0), y.flip(0)) if is_backwards else (x, y) for x, y in data]
        split = partial(in_other_order, build, parts, is_backwards)
        off = compare(train_twice(job, split, turned, device), one, start)
        found = {name: max(value, found.get(name, 0.0)) for name, value in off.items()}
    torch.set_num_threads(plain)
    reach = float(flat(start).norm() / difference(one.sgd, start).norm())
    return found | {"loss": max(map(abs, one.adamw.losses)), "reach": reach}


def train_and_count(method: Method, data: Data, memory: MemoryMark, loopback: bool) -> tuple[Trained, dict[str, Any]]:
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


def compare(run: Trainings, one: Trainings, start: Trained) -> dict[str, float]:
    """The figures of a row, each a distance from the one process.

    SGD's are about what it moved from `start`: the relative norm of the difference; and the scale, how much longer the
    way is, in the direction of the one process: 0.01 if all gradients are too large by 1 %.
    """
    moved, wanted = difference(run.sgd, start), difference(one.sgd, start)
    figures = {
        "loss32": loss_difference(run.adamw, one.adamw),
        "parameters32": float(difference(run.adamw, one.adamw).norm() / flat(one.adamw).norm()),
        "sgd32": float((moved - wanted).norm() / wanted.norm()),
        "scale32": abs(float(moved @ wanted / (wanted @ wanted)) - 1.0),
    }
    if run.exact is not None and one.exact is not None:
        figures["loss64"] = loss_difference(run.exact, one.exact)
        figures["parameters64"] = float(difference(run.exact, one.exact).abs().max())
    return figures


def loss_difference(run: Trained, one: Trained) -> float:
    """Largest over all steps; NaN if one is."""
    ours, theirs = (torch.tensor(trained.losses, dtype=torch.float64) for trained in (run, one))
    return float((ours - theirs).abs().max())


def flat(run: Trained) -> Tensor:
    """All parameters as one float64 vector, in the order of their names."""
    return torch.cat([run.parameters[name].detach().double().cpu().flatten() for name in sorted(run.parameters)])


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
    if job.method.endswith("-bf16") and stage > 0:
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
