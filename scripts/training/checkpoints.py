"""What --save, --every, --keep and --resume do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from minizero import Zero, checkpoint
from minizero.checkpoint import AsyncSaver
from training.log import say
from training.options import Options
from training.trainee import Trainee


@dataclass
class Progress:
    """What a run has come to, besides what the trainee holds; the same on all ranks."""

    horizon: int  # the step at which the learning rate has fallen: --steps of the run that was the first
    losses: list[float] = field(default_factory=list)  # of each step so far
    held_out: list[float] = field(default_factory=list)  # before the first step, and after the last


class Checkpoints:
    """Written in the background and read by all ranks together; nothing without --save."""

    def __init__(self, trainee: Trainee, options: Options) -> None:
        self.trainee, self.options, self.saved = trainee, options, 0
        self.saver = AsyncSaver(options.save, options.keep) if options.save else None
        self.run: dict[str, Any] = {"batch": options.batch, "context": options.model.context, "seed": options.seed}
        self.run |= {"lr": options.lr, "warmup": options.warmup} if options.own_schedule else {}
        self.run |= {"text": options.corpus.fingerprint}

    @property
    def zero(self) -> Zero:
        """What is saved; --save is refused in stage 0."""
        assert self.trainee.zero is not None
        return self.trainee.zero

    def resume(self) -> Progress:
        """How far the run has come, after the trainee is there too. Raises ValueError for another run's checkpoint."""
        progress, folder = Progress(self.options.steps), self.options.save
        if not self.options.resume or folder is None:
            return progress
        if not checkpoint.exists(folder, self.zero):
            say(f"no checkpoint in {folder}: starting from the beginning")
            return progress
        loaded = checkpoint.load(folder, self.zero, self.trainee.optimizer)
        for name, value in self.run.items():
            if loaded.extra["run"].get(name, value) != value:
                raise ValueError(f"{loaded.tag} is of a run with another {name}: this would not be the rest of it")
        progress = Progress(loaded.extra.get("horizon", self.options.steps), **loaded.extra["losses"])
        if self.options.own_schedule and progress.horizon != self.options.steps:
            say(
                f"the learning rate goes on along the schedule that the run began with, which ends at step "
                f"{progress.horizon}, not at --steps {self.options.steps}"
            )
        if self.trainee.engine:
            self.trainee.engine.load_run_state(loaded.extra["engine"])
        self.saved = loaded.step
        say(f"resumed after step {loaded.step}")
        return progress

    def save(self, progress: Progress, is_last: bool = False) -> None:
        """After a step: begin to write a checkpoint if it is time, and wait for the end of it if that was the last."""
        step, every = len(progress.losses), self.options.every or math.inf
        if self.saver and (is_last or step % every == 0) and step > self.saved:
            losses = {"losses": progress.losses, "held_out": progress.held_out}
            extra: dict[str, Any] = {"run": self.run, "losses": losses, "horizon": progress.horizon}
            extra["engine"] = self.trainee.engine.run_state() if self.trainee.engine else None
            self.saver.save(f"step-{step:06}", self.zero, self.trainee.optimizer, step=step, extra=extra)
            self.saved = step
        if self.saver and is_last:
            self.saver.wait()
