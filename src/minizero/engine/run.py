"""Chapter 26, config: DeepSpeed's `initialize` and its engine, on the verbs of the chapters before.

    engine, optimizer, _, _ = minizero.initialize(model=model, optimizer=optimizer, config="ds_config.json")
    loss = loss_of(engine(x), y)
    engine.backward(loss)       # divides by the accumulation steps, multiplies by the loss scale
    engine.step()               # a step of the optimizer once the window is full, else nothing

One backward, one step: `step()` itself knows whether the window is full. A program that prefers `loss.backward()` and
`optimizer.step()` can have them instead, in fp32 and bf16.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from minizero.accumulation import no_sync
from minizero.collectives import find_place, on_all_ranks
from minizero.config import Config
from minizero.config.schedules import Ahead
from minizero.engine.resume import Resumable
from minizero.optimizer import NonFiniteGradientError
from minizero.precision import LossScaler
from minizero.sharding import NotCopied
from minizero.zero import Zero


class Engine(NotCopied, Resumable):
    """A model, its optimizer and its schedule, run by a configuration; `initialize` makes it.

    A module with one child, the model, as DeepSpeed's is: `train()`, `eval()`, `parameters()`, hooks and `modules()`
    are those of any module, and names begin with "module.". What the engine has no attribute of its own for is the
    model's. Values of a sharded model are in `engine.zero.full_state()`.

    Attributes:
        module, zero, optimizer, lr_scheduler, training_dataloader, config, device: what it runs.
        global_steps: windows that are done, those whose step was skipped included.
        skipped_steps: windows whose gradients were not finite, so that no step was taken.
        micro_steps: calls of `step()`.
        global_samples: samples in all windows that are done.
    """

    def __init__(
        self, zero: Zero, optimizer: Optimizer | None, scaler: LossScaler | None, config: Config, device: torch.device
    ) -> None:
        super().__init__()
        self.zero, self.optimizer, self.config, self.device = zero, optimizer, config, device
        self.module = zero.model
        self.training = self.module.training
        self.lr_scheduler = self.training_dataloader = None
        self.world_size = self.dp_world_size = zero.world.size
        local_rank = os.environ.get("LOCAL_RANK")
        self.global_rank = dist.get_rank()
        self.local_rank = find_place().local_rank if local_rank is None else int(local_rank)
        self.batch = config.batch(self.world_size)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._scaler, self._norm, self._step_applied = scaler, None, False
        self._losses = []  # of the window that runs, not divided by anything
        self._divided: list[bool] = []  # whether each was divided by the accumulation steps before its backward
        self._window: list[Tensor] = []  # the losses of the last window that is done
        self._backwards = 0  # since the last step()
        self._filled = 0  # calls of step() in the window that runs
        self._stepping = self._holding = False
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_step)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.module(*args, **kwargs)

    # ---- backward and step

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of `loss`, a mean over this rank's micro-batch; returns it divided by the accumulation steps.

        The gradients of a window add up to those of the mean over all micro-batches and ranks. Raises RuntimeError for
        a second call before `step()`, unless `managed_gradient_accumulation` is false.
        """
        if self.optimizer is None:
            raise RuntimeError("engine.backward(): the engine was made without an optimizer, to serve a frozen model")
        if self._backwards and self.config.managed_gradient_accumulation:
            raise RuntimeError(
                "engine.backward() twice without engine.step(): call step() after each backward, it acts when "
                f'{self.batch.steps} are there; or set "managed_gradient_accumulation": false and step when you like'
            )
        self._losses.append(loss.detach())
        self._divided.append(scale_wrt_gas)
        loss = loss / self.batch.steps if scale_wrt_gas else loss
        (self._scaler.scale_loss(loss) if self._scaler else loss).backward(retain_graph=retain_graph)
        self._backwards += 1
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the end of a window clip, step the optimizer and the schedule, and forget the gradients; else only count.

        `lr_kwargs` go to the schedule's step, such as `{"metrics": engine.mean_loss()}`, alike on all ranks. Gradients
        that are not finite: in fp16, and in bf16 with `check_grad_overflow`, all ranks skip the step, and the schedule
        stays where it is. Otherwise all ranks raise NonFiniteGradientError; `zero_grad()` begins a new window. Whatever
        is raised, no weight, rate or count has changed.
        """
        if self._holding:
            raise RuntimeError("engine.step() inside no_sync(): leave the context first")
        if not self._backwards:
            raise RuntimeError("engine.step() without engine.backward(): with loss.backward(), call optimizer.step()")
        if self.is_gradient_accumulation_boundary() or not self.config.managed_gradient_accumulation:
            self._take_step(lr_kwargs or {})
        else:
            self._step_applied = False
            self._filled += 1
        self.micro_steps += 1
        self._backwards = 0

    def end_window(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Where the data ends: step with the micro-batches there are; nothing if there is none. Call on all ranks.

        The gradient is that of the mean over these micro-batches, however many a full window has. Losses that went to
        `backward(scale_wrt_gas=False)` are left as they were divided by you. Raises RuntimeError on all ranks, with
        nothing changed, if one has more micro-batches than another; then `zero_grad()` drops them.
        """
        if self._holding:
            raise RuntimeError("engine.end_window() inside no_sync(): leave the context first")
        everyone: list[Any] = [None] * self.world_size
        with on_all_ranks("count the micro-batches"):
            dist.all_gather_object(everyone, self._divided, group=self.zero.world.shard)
        if any(each != everyone[0] for each in everyone) or len(set(self._divided)) > 1:
            counts = [len(each) for each in everyone]
            raise RuntimeError(f"each rank must have as many micro-batches, all divided alike, not {counts}")
        if self._losses:
            self._take_step(lr_kwargs or {}, self.batch.steps / len(self._losses) if self._divided[0] else 1.0)
            self.micro_steps += self._backwards > 0
            self._backwards = 0

    def warn_of_open_window(self) -> None:
        """Say, on rank 0, that data ended inside a window; the loader of `training_data=` calls it after each epoch."""
        if self._losses and dist.get_rank() == 0:
            warnings.warn(
                f"the data ended {len(self._losses)} micro-batches into a window of {self.batch.steps}: "
                "engine.end_window() steps with what there is; without it they wait for more",
                stacklevel=3,
            )

    def _take_step(self, lr_kwargs: dict[str, Any], factor: float = 1.0) -> None:
        ahead = Ahead(self.lr_scheduler, self.optimizer, lr_kwargs, self.zero.world.shard)
        self._step_applied, finite = False, self._scaler is None or self._scaler.unscale(self.zero)
        if finite and factor != 1.0:
            self.zero.reduce()
            for _, piece in self.zero.named_slices():
                piece.grad = None if piece.grad is None else piece.grad.mul_(factor)
        try:
            norm = self.zero.clip_grad_norm(self.config.gradient_clipping or float("inf")) if finite else None
        except NonFiniteGradientError:
            if not (self.config.bf16.enabled and self.config.bf16.check_grad_overflow):
                raise
            finite, norm = False, None
        if finite:
            self._stepping = True
            try:
                self.optimizer.step()
            finally:
                self._stepping = False
            ahead.take()
        if self._scaler is not None:
            self._scaler.update(finite)
        self.zero.zero_grad()
        self._step_applied, self._norm = finite, norm
        self.skipped_steps += not finite
        self.global_steps += 1
        self.global_samples += self.batch.micro * self.world_size * len(self._losses)
        self._window, self._losses, self._divided, self._filled = self._losses, [], [], 0

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping:
            return
        if self._scaler is not None:
            raise RuntimeError("optimizer.step() in fp16: engine.backward() and engine.step() know the loss scale")
        if self._losses:
            raise RuntimeError("optimizer.step() after engine.backward(): call engine.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; the window begins anew."""
        self.zero.zero_grad(set_to_none)
        self.micro_steps -= self._filled
        self._losses, self._divided, self._backwards, self._filled = [], [], 0, 0

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
        return self._filled + 1 == self.batch.steps

    def mean_loss(self) -> float:
        """The mean of the losses of the last window, over its micro-batches and all ranks; call on all ranks.

        Raises RuntimeError before the first window is done.
        """
        if not self._window:
            raise RuntimeError("mean_loss() before the first window is done: there is no loss yet")
        mean = torch.stack([loss.double() for loss in self._window]).mean().to(self.device)
        with on_all_ranks("average the loss"):
            dist.all_reduce(mean, group=self.zero.world.shard)
        return mean.item() / self.world_size
