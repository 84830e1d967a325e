"""Chapter 26, config: DeepSpeed's `initialize` and its engine, on the verbs of the chapters before.

    engine, optimizer, _, _ = minizero.initialize(model=model, optimizer=optimizer, config="ds_config.json")
    loss = loss_of(engine(x), y)
    engine.backward(loss)       # divides by the accumulation steps, multiplies by the loss scale
    engine.step()               # a step of the optimizer once the window is full, else nothing

One backward, one step: `step()` itself knows whether the window is full. Who prefers `loss.backward()` and
`optimizer.step()` can have them instead, in fp32 and bf16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from minizero.accumulation import no_sync
from minizero.checkpoint import exists, load, save
from minizero.collectives import on_all_ranks
from minizero.config import Config
from minizero.facts import Facts
from minizero.optimizer import NonFiniteGradientError
from minizero.precision import LossScaler
from minizero.zero import Zero

COUNTS = ("global_steps", "global_samples", "skipped_steps")


class Engine(Facts):
    """A model, its optimizer and its schedule, run by a configuration; `initialize` makes it.

    What the engine has no attribute of its own for is the model's (`engine.train()`, `engine.eval()`, ...).

    Attributes:
        module, zero, optimizer, lr_scheduler, training_dataloader, config, device: what it runs.
        global_steps: windows that are done, those whose step was skipped included.
        skipped_steps: windows whose gradients were not finite, so that no step was taken.
        micro_steps: calls of `step()`.
        global_samples: samples in all windows that are done.
    """

    def __init__(
        self, zero: Zero, optimizer: Optimizer, scaler: LossScaler | None, config: Config, device: torch.device
    ) -> None:
        self.zero, self.optimizer, self.config, self.device = zero, optimizer, config, device
        self.module = zero.model
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.world_size = self.dp_world_size = dist.get_world_size(zero.group)
        self.global_rank, self.local_rank = dist.get_rank(), int(os.environ.get("LOCAL_RANK", 0))
        self.batch = config.batch(self.world_size)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._scaler, self._norm, self._step_applied = scaler, None, False
        self._losses: list[Tensor] = []  # of the window that runs, not divided by anything
        self._window: list[Tensor] = []  # of the last one that is done
        self._backwards = 0  # since the last step()
        self._stepping = self._holding = False
        optimizer.register_step_pre_hook(self._before_step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.module(*args, **kwargs)

    # ---- backward and step

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of `loss`, a mean over this rank's micro-batch; returns it divided by the accumulation steps.

        The gradients of a window add up to those of the mean over all micro-batches and ranks. Raises RuntimeError for
        a second call before `step()`, unless `managed_gradient_accumulation` is false.
        """
        if self._backwards and self.config.managed_gradient_accumulation:
            raise RuntimeError(
                "engine.backward() twice without engine.step(): call step() after each backward, it acts when "
                f'{self.batch.steps} are there; or set "managed_gradient_accumulation": false and step when you like'
            )
        self._losses.append(loss.detach())
        loss = loss / self.batch.steps if scale_wrt_gas else loss
        (self._scaler.scale_loss(loss) if self._scaler else loss).backward(retain_graph=retain_graph)
        self._backwards += 1
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the end of a window clip, step the optimizer and the schedule, and forget the gradients; else only count.

        Gradients that are not finite: in fp16, and in bf16 with `check_grad_overflow`, all ranks skip the step, and the
        schedule stays where it is. Otherwise all ranks raise NonFiniteGradientError; `zero_grad()` begins a new window.
        """
        if self._holding:
            raise RuntimeError("engine.step() inside no_sync(): leave the context first")
        if not self._backwards:
            raise RuntimeError("engine.step() without engine.backward(): with loss.backward(), call optimizer.step()")
        self._step_applied = False
        if self.is_gradient_accumulation_boundary() or not self.config.managed_gradient_accumulation:
            self._stepping = True
            try:
                self._take_step(lr_kwargs or {})
            finally:
                self._stepping = False
        self.micro_steps += 1
        self._backwards = 0

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        finite = self._scaler is None or self._scaler.unscale(self.zero)
        try:
            self._norm = self.zero.clip_grad_norm(self.config.gradient_clipping or float("inf")) if finite else None
        except NonFiniteGradientError:
            if not (self.config.bf16.enabled and self.config.bf16.check_grad_overflow):
                raise
            finite = False
        if finite:
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        if self._scaler is not None:
            self._scaler.update(finite)
        self.optimizer.zero_grad()
        self._step_applied = finite
        self.skipped_steps += not finite
        self.global_steps += 1
        self.global_samples += self.batch.micro * self.world_size * len(self._losses)
        self._window, self._losses = self._losses, []

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping:
            return
        if self._scaler is not None:
            raise RuntimeError("optimizer.step() in fp16: engine.backward() and engine.step() know the loss scale")
        if self._losses:
            raise RuntimeError("optimizer.step() after engine.backward(): call engine.step()")

    def zero_grad(self) -> None:
        """Forget all gradients; the window begins anew."""
        self.optimizer.zero_grad()
        self.micro_steps -= self.micro_steps % self.batch.steps
        self._losses, self._backwards = [], 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of the backwards inside stay on this rank, whole, until the first one outside. Any stage."""
        self._holding = True
        try:
            with no_sync(self.zero):
                yield
        finally:
            self._holding = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` is one of the optimizer."""
        if not self.config.managed_gradient_accumulation:
            return self._stepping  # as in DeepSpeed: who calls step() has drawn the boundary
        return (self.micro_steps + 1) % self.batch.steps == 0

    def mean_loss(self) -> float:
        """The mean of the losses of the last window, over its micro-batches and all ranks; call on all ranks."""
        mean = torch.stack([loss.double() for loss in self._window]).mean().to(self.device)
        with on_all_ranks("average the loss"):
            dist.all_reduce(mean, group=self.zero.group)
        return mean.item() / self.world_size

    # ---- checkpoints

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
            raise RuntimeError(f"save_checkpoint() with {len(self._losses)} micro-batches in the window: step first")
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

        On any number of ranks and in any stage. Call on all ranks. Raises ValueError for `load_module_strict=False` and
        `custom_load_fn`; else as `minizero.checkpoint.load`.
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
        """Counts, loss scale and schedule: what a checkpoint has besides the model and its optimizer."""
        state: dict[str, Any] = {name: getattr(self, name) for name in COUNTS}
        state["scaler"] = self._scaler.state_dict() if self._scaler else None
        state["scheduler"] = self.lr_scheduler.state_dict() if self.lr_scheduler else None
        return state

    def load_run_state(self, state: dict[str, Any], schedule: bool = True) -> None:
        """Go on from what `run_state()` told. A loss scale or schedule that only one of the two runs has stays out."""
        for name in COUNTS:
            setattr(self, name, state[name])
        self.micro_steps = self.global_steps * self.batch.steps
        if self._scaler and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        if schedule and self.lr_scheduler and state["scheduler"]:
            self.lr_scheduler.load_state_dict(state["scheduler"])
