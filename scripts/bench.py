"""How long does a training step take, next to the others? All methods in the same processes, turn by turn.

    python scripts/bench.py                                 # or `make bench`: 2 ranks, then 4
    torchrun --nproc_per_node 2 scripts/bench.py            # one number of ranks, under your own launcher

On a shared machine a step takes half as long again a minute later. So every round times one step of each method, in an
order that rotates, and what counts is the median over rounds of the ratio of two steps of the same round. A step is
forward, backward, communication and AdamW; its time is that of the slowest rank, from one barrier on.

`floor` is the same step with no communication at all: each rank trains alone on its part of the batch. No method can be
faster without doing less arithmetic; stages 1 to 3 do less, since each rank updates only 1/N of the parameters.

The losses of all methods are compared while they are timed: exit code 1 if one differs. Beside the table there is one
line for each pair that matters, `RATIO minizero3/fsdp2 2 0.755`: methods, number of ranks, median ratio.

Rows that end in -bf16 compute and send in bf16; those in -acc4 have four micro-batches a step, and clip.

Then checkpoints are saved and loaded, by the methods that shard parameters and states. `stall` is what a save in the
background keeps training waiting.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from compare.launch import RankFailure, launch, prepare_deepspeed
from compare.methods import Method, builders
from compare.rank import build_model, run_rank
from compare.saving import SAVED, time_saving
from minizero import GPTConfig
from minizero.collectives import over_ranks
from minizero.data import Batches, load_corpus

FLOOR, BASE = "floor", "fsdp2"
METHODS = [FLOOR, "ddp", BASE, "deepspeed1", "deepspeed2", "deepspeed3", *(f"minizero{stage}" for stage in range(4))]
RATIOS = [("minizero3", BASE), ("minizero3", "deepspeed3"), ("minizero3", FLOOR)]
for kind in ("-bf16", "-acc4"):
    METHODS += [BASE + kind, "deepspeed3" + kind, "minizero3" + kind]
    RATIOS += [("minizero3" + kind, BASE + kind), ("minizero3" + kind, "deepspeed3" + kind)]

SAVES = 5  # checkpoints of each method that has sharded ones
WARM_UP = 3  # rounds not timed: lazy initialisation, and DeepSpeed's tracing of the model
LEARNING_RATE = 1e-4  # times do not depend on it; a larger one makes losses of equal methods part sooner
# Rounding grows with the steps; a wrong gradient or a missed update shows in the second digit. In bf16, DeepSpeed and
# FSDP2 were 1.2e-2 apart after 23 steps.
SAME_LOSS = {"": 1e-4, "acc4": 1e-4, "bf16": 3e-2}


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    """What each rank does: build every method, time the rounds; rank 0 prints."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = GPTConfig(context=arguments.context, layers=arguments.layers, width=arguments.width)
    text = load_corpus(context=config.context).training
    linear = torch.nn.functional.linear
    methods: dict[str, Method] = {}
    data: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name in arguments.methods:
        sequences = arguments.batch // world * (4 if kind_of(name) == "acc4" else 1)
        build = builders(sequences)["one" if name == FLOOR else name]
        methods[name] = build(build_model(config, torch.float32, device), torch.optim.AdamW, LEARNING_RATE)
        batches = Batches(text, config.context, sequences, rank=rank, world=world)
        steps = range(WARM_UP + arguments.rounds)
        data[name] = [(x.to(device), y.to(device)) for x, y in (batches.at(step) for step in steps)]
    if torch.nn.functional.linear is not linear:
        raise RuntimeError("a library replaced torch.nn.functional.linear for all methods in this process")
    seconds, losses = time_rounds(methods, data, device)
    check_losses(losses)
    shards = {name: methods[name] for name in SAVED if name in methods}
    saving = time_saving(shards, SAVES, device) if shards else {}
    if rank == 0:
        print_table(seconds, world, sum(p.numel() for p in build_model(config, torch.float32, device).parameters()))
        print_saving(saving, world)


def kind_of(name: str) -> str:
    """What a method's steps have besides: "bf16", "acc4" (four micro-batches, clipping) or nothing."""
    return name.partition("-")[2]


def time_rounds(
    methods: dict[str, Method], data: dict[str, list[tuple[Tensor, Tensor]]], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """For each method: seconds of the slowest rank, (timed rounds,), and loss on the whole batch, (all rounds,)."""
    names = list(methods)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for index in range(len(data[names[0]])):
        for turn in range(len(names)):
            name = names[(index + turn) % len(names)]
            x, y = data[name][index]
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(methods[name].step(x, y))
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    slowest = {name: torch.tensor(over_ranks("max", took, device))[WARM_UP:] for name, took in seconds.items()}
    return slowest, {name: torch.tensor(over_ranks("mean", loss, device)) for name, loss in losses.items()}


def check_losses(losses: dict[str, Tensor]) -> None:
    """Raise unless all of a kind computed the same; the floor only until its first update, from its own samples."""
    for name, loss in losses.items():
        kind = kind_of(name)
        reference = next((other for other in losses if other != FLOOR and kind_of(other) == kind), FLOOR)
        steps = 1 if name == FLOOR else len(loss)
        worst = float((loss - losses[reference])[:steps].abs().max())
        if not worst <= SAME_LOSS[kind]:
            raise RuntimeError(f"losses of {name} and {reference} differ by {worst:.1e}: these are not the same steps")


# ---- the table ---------------------------------------------------------------------------------------------------


def print_table(seconds: dict[str, Tensor], world: int, parameters: int) -> None:
    """Medians and quartiles over rounds of each method's step and of its ratio to FSDP2's step in the same round."""
    print(f"\n{world} ranks, {torch.get_num_threads()} threads each, {parameters:,} parameters")
    print(f"{'method':<16}{'ms':>8}{'quartiles':>18}{f'x {BASE}':>10}{'quartiles':>16}")
    for name, took in seconds.items():
        low, middle, high = quartiles(1e3 * took)
        text = f"{name:<16}{middle:8.1f}{f'{low:.1f} - {high:.1f}':>18}"
        if BASE in seconds:
            low, middle, high = quartiles(took / seconds[BASE])
            text += f"{middle:10.3f}{f'{low:.3f} - {high:.3f}':>16}"
        print(text)
    for name, other in RATIOS:
        if name in seconds and other in seconds:
            print(f"RATIO {name}/{other} {world} {quartiles(seconds[name] / seconds[other])[1]:.3f}")


def print_saving(seconds: dict[str, Tensor], world: int) -> None:
    """The same of checkpoints: medians, and ratios within a round. A stall is held against whole saves."""
    for name, took in seconds.items():
        low, middle, high = quartiles(1e3 * took)
        print(f"{name:<16}{middle:8.1f}{f'{low:.1f} - {high:.1f}':>18}")
    for what, against in (("save", "save"), ("load", "load"), ("stall", "save")):
        for other in SAVED:
            mine, theirs = seconds.get(f"{what} minizero3"), seconds.get(f"{against} {other}")
            if mine is not None and theirs is not None and mine is not theirs:
                print(f"RATIO {what}-minizero3/{against}-{other} {world} {quartiles(mine / theirs)[1]:.3f}")


def quartiles(values: Tensor) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return low, middle, high


# ---- starting it -------------------------------------------------------------------------------------------------


def main() -> int:
    """Be a rank where a launcher said so, else be the launcher: for each number of ranks, one group of processes."""
    arguments = parse()
    if "RANK" in os.environ:
        run_rank(lambda device: measure(arguments, device), arguments.timeout)
    try:
        if any(method.startswith("deepspeed") for method in arguments.methods):
            prepare_deepspeed()
        for world in arguments.ranks:
            launch(Path(__file__), sys.argv[1:], world, arguments.timeout + 5)
    except RankFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="not used under torchrun")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each method")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, all ranks together")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one number of ranks (default: 900)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {arguments.rounds}")
    for world in [int(os.environ["WORLD_SIZE"])] if "RANK" in os.environ else arguments.ranks:
        if world < 1 or arguments.batch % world:
            parser.error(f"{world} ranks do not divide --batch {arguments.batch}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
