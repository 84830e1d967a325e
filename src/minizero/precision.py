"""Chapter 21, precision: compute and send in 16 bits, add up and remember in 32.

What is gathered, multiplied and sent is rounded. What is summed over ranks or over steps is not: the master weights,
the moments and the sum of the gradients stay in fp32. fp16 needs a loss scale besides, on which all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from minizero.collectives import on_all_ranks
from minizero.sharding import holders_of
from minizero.zero import Zero
from minizero.zero.plan import Dtypes, is_inside


@dataclass(frozen=True)
class Precision:
    """For `Zero(model, dtypes=Precision(torch.bfloat16))`: what is computed and sent in 16 bits, and what is not.

    Attributes:
        dtype: of gathered parameters, of activations, and of the tensors that go into the model. Integers stay.
        reduce_dtype: of gradients on the wire, by default `dtype`. They are summed in fp32 whatever it is.
        keep_fp32: classes of modules that compute in their parameters' own dtype, with all that is in them. Their
            inputs are cast to fp32, their outputs to `dtype`. Batch norms are always among them: 16 bits would round
            running statistics. Buffers are left as they are; a module that mixes one into its activations belongs here.
    """

    dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None
    keep_fp32: tuple[type[nn.Module], ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("reduce_dtype", self.reduce_dtype or self.dtype)):
            if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f"{name} must be torch.float32, torch.bfloat16 or torch.float16, got {dtype!r}")
        if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in self.keep_fp32):
            raise TypeError(f"keep_fp32 must be a tuple of nn.Module classes, got {self.keep_fp32!r}")

    def kept(self, model: nn.Module) -> dict[str, nn.Module]:
        """The outermost modules of `keep_fp32` classes, by path."""
        found: dict[str, nn.Module] = {}
        kinds: tuple[type[nn.Module], ...] = (_BatchNorm, *self.keep_fp32)
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, kinds) and not any(is_inside(path, p) for p in found):
                found[path] = module
        return found

    def choose(self, model: nn.Module) -> dict[str, Dtypes]:
        """The dtypes of each parameter, by its first full name.

        Raises ValueError for a parameter that is tied between a module of `keep_fp32` and one that is not.
        """
        chosen, kept = {}, self.kept(model)
        for parameter, holders in holders_of(model):
            stays = {any(is_inside(holder.path, path) for path in kept) for holder in holders}
            if len(stays) == 2:
                names = " and ".join(repr(holder.full_name) for holder in holders)
                raise ValueError(f"keep_fp32 holds one of {names}, which are one parameter: keep both or none")
            own = Dtypes(parameter.dtype, parameter.dtype)
            low = Dtypes(self.dtype, self.reduce_dtype or self.dtype)
            is_number = parameter.is_floating_point() and parameter.itemsize > 1  # fp8 means nothing without its scale
            chosen[holders[0].full_name] = low if is_number and stays != {True} else own
        return chosen

    def attach(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Cast what goes into `model`, and what goes into and comes out of the modules that compute in fp32."""
        kept = self.kept(model)
        if "" in kept:
            return
        yield model.register_forward_pre_hook(partial(_cast_inputs, self.dtype), with_kwargs=True)
        for module in dict.fromkeys(kept.values()):
            yield module.register_forward_pre_hook(partial(_cast_inputs, torch.float32), with_kwargs=True)
            yield module.register_forward_hook(partial(_cast_output, self.dtype))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in its tuples, lists and dicts in `dtype`."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


@torch.compiler.disable
def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast((args, kwargs), dtype)


@torch.compiler.disable
def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return cast(output, dtype)


@torch.no_grad()
def gradients_are_finite(zero: Zero) -> bool:
    """Whether no gradient on any rank is infinite or NaN; the same answer on all ranks, which must all ask.

    The rule without a loss scale, in bf16 and fp32: clipping raises NonFiniteGradientError on all ranks; a program that
    does not clip calls this before the step. An optimizer that steps with a NaN keeps it in its moments for ever.
    """
    zero.reduce()
    device = zero.world.device
    objections = torch.zeros((), device=device)
    for _, piece in zero.named_slices():
        if piece.grad is not None and piece.numel() > 0:  # a rank may own nothing, and has a vote all the same
            extremes = torch.stack(torch.aminmax(piece.grad))  # NaN if one element is
            objections += (~extremes.isfinite()).sum().to(device)
    with on_all_ranks("vote on the gradients"):
        # A sum of objections: a NaN itself can get lost in a maximum (gloo's MAX).
        dist.all_reduce(objections, group=zero.world.shard)
    return not objections.item()


class LossScaleError(FloatingPointError):
    """Steps were skipped again and again, although the loss scale could not go lower."""


class LossScaler:
    """The factor that keeps small gradients above fp16's smallest number; a step whose gradients overflow is skipped.

        scaler.scale_loss(loss).backward()
        finite = scaler.unscale(zero)  # all ranks vote
        if finite:
            zero.clip_grad_norm(1.0)
            optimizer.step()
        scaler.update(finite)
        optimizer.zero_grad()

    A skipped step leaves parameters, optimizer state and step counts as they are. Do not step the scheduler then.

    Args:
        initial: the first scale.
        window: steps without an overflow after which the scale is doubled; None for a scale that stays `initial`.
        hysteresis: the overflow, counted from the start or from the last doubling, from which on each one halves the
            scale. Those before it only skip their step, as one bad batch does.
        minimum: the scale is never halved below it.
        max_skips: at `minimum`, or with a scale that stays, this many skipped steps in a row raise LossScaleError.

    Raises ValueError naming the argument that is out of range. All ranks hold the same scale: they see the same votes.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        window: int | None = 1000,
        hysteresis: int = 2,
        minimum: float = 1.0,
        max_skips: int = 8,
    ) -> None:
        good = {"initial": initial >= minimum, "window": window is None or window >= 1, "hysteresis": hysteresis >= 1}
        good |= {"minimum": minimum > 0, "max_skips": max_skips >= 1}
        for name, is_good in good.items():
            if not is_good:
                raise ValueError(f"{name} is out of range: {locals()[name]!r}")
        self.window, self.hysteresis, self.minimum, self.max_skips = window, hysteresis, minimum, max_skips
        self.scale = float(initial)
        self._finite_steps = 0  # in a row
        self._forgiven = hysteresis - 1  # overflows that will not lower the scale
        self._skips_in_vain = 0  # in a row, with nowhere for the scale to go

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in fp32 at least. Call backward on it."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    @torch.no_grad()
    def unscale(self, zero: Zero) -> bool:
        """Reduce, vote and, if all gradients are finite, divide them by the scale. Call it once a step, on all ranks.

        Returns whether they are. If not, nothing was divided: skip clipping and the step, and zero the gradients.
        """
        if not gradients_are_finite(zero):
            return False
        for _, piece in zero.named_slices():
            if piece.grad is not None:
                piece.grad /= self.scale
        return True

    def update(self, finite: bool) -> None:
        """Adapt the scale to what `unscale` returned, once a step. Raises LossScaleError as `max_skips` says."""
        if finite:
            self._finite_steps, self._skips_in_vain = self._finite_steps + 1, 0
            if self.window is not None and self._finite_steps % self.window == 0:
                self.scale, self._forgiven = self.scale * 2, self.hysteresis - 1
            return
        self._finite_steps = 0
        if self.window is None or self.scale <= self.minimum:
            self._skips_in_vain += 1
            if self._skips_in_vain >= self.max_skips:
                raise LossScaleError(
                    f"{self._skips_in_vain} steps in a row had infinite or NaN gradients at a loss scale of "
                    f"{self.scale:g}, which cannot go lower: the training diverges, or the model needs more than fp16"
                )
        elif self._forgiven > 0:
            self._forgiven -= 1
        else:
            self.scale = max(self.scale / 2, self.minimum)

    def state_dict(self) -> dict[str, float]:
        """The scale and the counts behind it, alike on all ranks; the arguments of the constructor are not in it."""
        return {name: vars(self)[name] for name in ("scale", "_finite_steps", "_forgiven", "_skips_in_vain")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from `state`. Raises KeyError naming what is missing or unknown."""
        if wrong := sorted(state.keys() ^ self.state_dict().keys()):
            raise KeyError(f"the state of a LossScaler has other keys: {', '.join(wrong)}")
        vars(self).update(state)
