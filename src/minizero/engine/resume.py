"""Chapter 26, config: an engine's checkpoints: those of chapter 25, with the engine's counts, schedule and data."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minizero.checkpoint import exists, load, save
from minizero.engine.facts import Facts

COUNTS = ("global_steps", "global_samples", "skipped_steps")


class Resumable(Facts):
    """The part of an engine that saves and loads."""

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `save_dir/tag`, default `global_step{global_steps}`, and name it in `latest`; call on all ranks.

        `client_state` is this rank's own, and comes back from `load_checkpoint`. Raises RuntimeError when a window has
        begun, ValueError for the last two arguments if they are not as above; else as `minizero.checkpoint.save`.
        """
        if not save_latest or exclude_frozen_parameters:
            raise ValueError("save_checkpoint() takes no save_latest=False and no exclude_frozen_parameters=True")
        if self._losses:
            raise RuntimeError(
                f"save_checkpoint() with {len(self._losses)} micro-batches in the window: save after the step that "
                "fills it. If the data has ended, end_window() steps with what there is, and zero_grad() drops it"
            )
        extra = {"run": self.run_state(), "client": client_state or {}}
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        save(Path(save_dir), tag, self.zero, self.optimizer, step=self.global_steps, extra=extra)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """(path, client state) of `load_dir/tag`, by default the latest; (None, None) if there is none yet.

        On any number of ranks and in any stage. The loader of `training_data=` goes on in the epoch where it was. Call
        on all ranks. Raises ValueError for `load_module_strict=False` and `custom_load_fn`; else as
        `minizero.checkpoint.load`.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise ValueError("load_checkpoint() takes no load_module_strict=False and no custom_load_fn")
        with_optimizer = load_optimizer_states and not load_module_only
        if tag is None and not exists(Path(load_dir), self.zero):
            return None, None
        loaded = load(Path(load_dir), self.zero, self.optimizer if with_optimizer else None, tag=tag)
        if not load_module_only:
            self.load_run_state(loaded.extra["run"], load_lr_scheduler_states)
        self.zero_grad()
        return str(Path(load_dir) / loaded.tag), loaded.extra["client"]

    def run_state(self) -> dict[str, Any]:
        """Counts, loss scale, schedule and place in the data: what there is besides the model and its optimizer."""
        state: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        state["scaler"] = self._scaler.state_dict() if self._scaler else None
        state["scheduler"] = self.lr_scheduler.state_dict() if self.lr_scheduler else None
        state["data"] = self.training_dataloader.state_dict() if self.training_dataloader is not None else None
        return state

    def load_run_state(self, state: dict[str, Any], schedule: bool = True) -> None:
        """Go on from what `run_state()` told. What only one of the two runs has, such as a schedule, stays out.

        Warns, naming the key, where the configuration says another value than the one that was saved and now counts.
        """
        for name in COUNTS:
            setattr(self, name, state[name])
        self.micro_steps = self.global_steps * self.batch.steps
        if self._scaler and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        if schedule and self.lr_scheduler and state["scheduler"]:
            self._say_what_stays("scheduler", vars(self.lr_scheduler), state["scheduler"])
            self.lr_scheduler.load_state_dict(state["scheduler"])
        if self.training_dataloader is not None and state.get("data"):
            self.training_dataloader.load_state_dict(state["data"])
        for group in self.optimizer.param_groups if self.optimizer is not None else []:
            self._say_what_stays("optimizer", self.optimizer.defaults, group)

    def _say_what_stays(self, block: str, here: dict[str, Any], saved: dict[str, Any]) -> None:
        named = getattr(self.config, block)
        for name in named.params if named is not None and dist.get_rank() == 0 else ():
            is_scheduled = block == "optimizer" and name == "lr" and self.lr_scheduler is not None
            if name in here and name in saved and not is_scheduled and as_json(here[name]) != as_json(saved[name]):
                warnings.warn(
                    f"{block}.params.{name} is {here[name]} in the configuration and was {saved[name]} in the run that "
                    "was saved, which goes on with its own",
                    stacklevel=4,
                )


def as_json(value: Any) -> Any:
    """The value as it comes back from a checkpoint: lists for tuples."""
    return list(value) if isinstance(value, tuple) else value
