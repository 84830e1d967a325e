"""What a run shows at its end: the loss on text it has not trained on, a sample, and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from minizero.collectives import over_ranks
from minizero.data import Batches, decode
from training.options import Options
from training.trainee import Trainee

HELD_OUT_BATCHES = 8  # the held-out loss is over at most so many global batches, the same ones before and after
SAMPLE_BYTES, PROMPT_BYTES = 300, 48


@torch.no_grad()
def held_out_loss(trainee: Trainee, batches: Batches) -> float:
    """Nats per byte. All ranks run equally many forwards: in stage 3 each gathers."""
    steps, device = min(len(batches), HELD_OUT_BATCHES), trainee.device
    losses = [trainee.model(*(t.to(device) for t in batches.at(step))).item() for step in range(steps)]
    return over_ranks("mean", [sum(losses) / steps], device)[0]


def sample(trainee: Trainee, text: Tensor, seed: int) -> str:
    """The first bytes of the text, and what rank 0 goes on with; the others wait where `whole()` ends."""
    prompt, written, device = text[:PROMPT_BYTES], "", trainee.device
    generator = torch.Generator(device).manual_seed(seed)
    with trainee.whole():
        if dist.get_rank() == 0:
            tokens = trainee.model.generate(prompt[None].long().to(device), SAMPLE_BYTES, 0.8, generator)
            written = decode(tokens[0, len(prompt) :])
    return f"sample\n------\n{decode(prompt)}|{written}\n------"


def draw(losses: Sequence[float], held_out: Sequence[float], options: Options, file: Path) -> None:
    """The loss of each step, and the held-out loss before the first and after the last."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, color="#0072B2", label="training, mean over ranks")
    ends = [0, len(losses)][: len(held_out)]
    axes.plot(ends, held_out, "o", color="#D55E00", markersize=8, label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    world = options.place.world
    axes.set_title(f"stage {options.stage}, {world} rank{'s' * (world > 1)}, {options.batch} sequences per step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text: it can be searched and read aloud
        figure.savefig(file)
