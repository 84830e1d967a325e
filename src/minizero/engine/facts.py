"""Chapter 26, config: what people ask an engine for, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from minizero.config import Batch, Config
from minizero.precision import LossScaler
from minizero.zero import Zero

ELSEWHERE = {
    "set_gradient_accumulation_boundary": '"managed_gradient_accumulation": false in the configuration',
    "save_16bit_model": "minizero.checkpoint.export(path, engine.zero, torch.bfloat16)",
    "save_fp16_model": "minizero.checkpoint.export(path, engine.zero, torch.float16)",
    "allreduce_gradients": "engine.step(), which reduces what is not reduced yet",
    "coalesce_grad_reduction": "engine.no_sync()",
    "scale": "engine.backward(loss)",
}


class Facts(nn.Module):
    """The part of an engine that only tells. What it has no attribute for is asked of the model."""

    module: nn.Module
    zero: Zero
    optimizer: Any  # an Optimizer; None if the model is only served
    lr_scheduler: Any
    training_dataloader: Any
    config: Config
    batch: Batch
    global_steps: int
    micro_steps: int
    _scaler: LossScaler | None
    _norm: float | None
    _step_applied: bool
    _losses: list[Tensor]

    def __getattr__(self, name: str) -> Any:
        if name in ELSEWHERE:
            raise AttributeError(f"minizero's engine has no {name}(): use {ELSEWHERE[name]}")
        for place in ("_modules", "_parameters", "_buffers"):  # of the engine itself, as any module's
            if name in self.__dict__.get(place, ()):
                return self.__dict__[place][name]
        if name.startswith("__") or "module" not in self.__dict__.get("_modules", ()):
            raise AttributeError(name)
        return getattr(self.module, name)

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """The last window's norm over all ranks, before clipping and without the loss scale; None if it was skipped."""
        return self._norm

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def get_lr(self) -> list[float]:
        """The rate of each group for the next step."""
        return [group["lr"] for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """`betas`, or the momentum, of each group."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def loss_scale(self) -> float:
        """What losses are multiplied by at present; 1 without fp16."""
        return self._scaler.scale if self._scaler else 1.0

    def train_batch_size(self) -> int:
        """Samples in a window, over all ranks."""
        return self.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples that a rank sees in one backward."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Backwards in a window."""
        return self.batch.steps

    def gradient_clipping(self) -> float:
        """The largest norm; 0: any."""
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """1, 2 or 3."""
        return self.zero.stage
