"""The training of scripts/train.py in one process, without minizero's parallel parts; and how exact it can be."""

from __future__ import annotations

import math
from pathlib import Path

import torch

import minizero
from minizero.data import Batches, load_corpus

Curves = tuple[list[float], list[float]]


def plain_training(
    text: Path, steps: int, *, batch: int, seed: int = 0, clip: float = 1.0, parts: int = 1, turned: bool = False
) -> Curves:
    """Losses and gradient norms with torch's own AdamW.

    Layers, width and heads are 2, 16 and 2, the context is 16, the warm-up of 2 steps leads to a rate of 0.01. The
    batch comes in `parts` micro-batches, if `turned` from the last sequence to the first: the same up to rounding.
    """
    torch.manual_seed(seed)
    model = minizero.GPT(minizero.GPTConfig(256, context=16, layers=2, width=16, heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = Batches(load_corpus(text, context=16).training, 16, batch, seed=seed)
    losses, norms = [], []
    for step in range(steps):
        # warm-up of 2 steps, then a cosine from 0.01 down to 0.001 at `steps`
        falling = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / (steps - 2))) / 2
        optimizer.param_groups[0]["lr"] = [0.005, 0.01][step] if step < 2 else 0.01 * falling
        x, y = (tokens.flip(0) if turned else tokens for tokens in batches.at(step))
        losses.append(0.0)
        for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = model(inputs, targets) / parts
            loss.backward()
            losses[-1] += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def with_limits(text: Path, steps: int, *, batch: int, seed: int = 0, clip: float = 1.0) -> tuple[Curves, Curves]:
    """The training, and for each loss and norm how far a right run may be from it.

    That is five times the most that the one process was off, up to this step, when it split its batch in other ways,
    and at least four steps from one fp32 number to the next. A model this small has few roundings to average over,
    hence five. What is wrong, and not rounded otherwise, is off by 1e-2 and more: so a limit of 1e-3 is refused.
    """
    options = {"batch": batch, "seed": seed, "clip": clip}
    plain = plain_training(text, steps, **options)
    splits = [(2, False), (2, True), (batch, False), (batch, True)]
    others = [plain_training(text, steps, parts=parts, turned=turned, **options) for parts, turned in splits]
    allowed = []
    for which, curve in enumerate(plain):
        off = torch.tensor([other[which] for other in others], dtype=torch.float64) - torch.tensor(curve).double()
        floor = 4 * torch.finfo(torch.float32).eps * max(curve)
        limit = (5 * off.abs().amax(0)).cummax(0).values.clamp(min=floor)
        assert limit.max() < 1e-3, "this training is too chaotic to be compared"
        allowed.append(limit.tolist())
    return plain, (allowed[0], allowed[1])


def assert_within(found: list[float], wanted: list[float], limits: list[float], what: str) -> None:
    """Each as near as its limit says."""
    off = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    worst = max(range(len(off)), key=lambda i: off[i] / limits[i])
    assert off[worst] <= limits[worst], (
        f"{what}: off by {off[worst]:.1e} in step {worst + 1}, {limits[worst]:.1e} allowed"
    )
