"""Chapter 14, Adam: an optimizer that owns 1/N of the state, and a norm that is everybody's.

An optimizer on one rank sees only the rank's slices: 1-D tensors, one per parameter, possibly empty. For an update
that treats every element by itself this is all it needs, and its state is 1/N of the whole by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from minizero.collectives import launch_all_gather, on_all_ranks
from minizero.sharding import FlatParameters


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, algorithm 1); `weight_decay` is added to the gradient, as `torch.optim.Adam` does.

    State: two tensors like the parameter (running means of the gradient and of its square) and a step count. `fused`
    runs torch's one-kernel update, which agrees to rounding; the plain loop is bitwise equal to torch.optim's.
    """

    decoupled_weight_decay = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool = True,
    ) -> None:
        in_range = {"lr": lr >= 0, "betas": all(0 <= b < 1 for b in betas), "eps": eps >= 0}
        in_range["weight_decay"] = weight_decay >= 0
        for name, good in in_range.items():
            if not good:
                raise ValueError(f"{name} is out of range: {locals()[name]!r}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": fused}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu"),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
                self.state[p]["step"] += 1
            if group["fused"]:
                self._update_fused(params, group)
            else:
                for p in params:
                    self._update(p, p.grad, group, **self.state[p])
        return loss

    def _update(
        self, p: Tensor, gradient: Tensor, group: dict[str, Any], step: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
    ) -> None:
        lr, (beta1, beta2), t = group["lr"], group["betas"], step.item()
        if group["weight_decay"] != 0 and self.decoupled_weight_decay:
            p.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"] != 0:
            gradient = gradient.add(p, alpha=group["weight_decay"])
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # The running means start at zero; dividing by 1 - beta ** t corrects them (section 3 of the paper).
        root = (exp_avg_sq.sqrt() / (1 - beta2**t) ** 0.5).add_(group["eps"])
        p.addcdiv_(exp_avg, root, value=-lr / (1 - beta1**t))

    def _update_fused(self, params: list[Tensor], group: dict[str, Any]) -> None:
        kernel = torch._fused_adamw_ if self.decoupled_weight_decay else torch._fused_adam_
        for dtype in {p.dtype for p in params}:
            some = [p for p in params if p.dtype == dtype]
            states = [self.state[p] for p in some]
            kernel(
                some,
                [p.grad for p in some if p.grad is not None],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                [s["step"] for s in states],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019): p shrinks by lr * weight_decay, as in torch."""

    decoupled_weight_decay = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        fused: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused)


# Optimizers whose update of an element depends on that element's own history alone.
ELEMENTWISE = {Adam, AdamW} | {
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
    )
}


def check_elementwise(cls: type[Optimizer], allowed: bool) -> None:
    """Refuse an optimizer that may mix elements: on a slice it would take a part for the whole."""
    if cls not in ELEMENTWISE and not allowed:
        raise TypeError(
            f"{cls.__name__} is not known to treat every element by itself, and each rank holds only slices of the "
            "parameters: norms, traces or matrix steps would be a slice's. If it is element-wise, pass elementwise=True"
        )


def check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse a state whose tensors do not have the slices' shapes, before torch loads it without comparing them.

    A step would read past the end of such a tensor, or only its beginning. Register this as a hook before
    `load_state_dict`.
    """
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for piece, number in zip(pieces, numbers, strict=False):  # torch compares the lengths
        for name, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != piece.shape:
                raise ValueError(
                    f"{name!r} of parameter {number} has {value.numel()} elements, this rank's slice {piece.numel()}: "
                    "the state was saved with other units or another number of ranks, and fits only those"
                )


def slice_groups(
    flats: Sequence[FlatParameters], groups: Iterable[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Param groups of this rank's slices, for `groups` of model parameters, their names, (name, parameter) or slices.

    None: all that are trained. Every rank gets the same groups with the same number of slices. Raises KeyError for a
    parameter that is not there or not trained.
    """
    slices: dict[str | int, nn.Parameter] = {}
    names: dict[str | int, str] = {}
    for flat in flats:
        members = zip(flat.leaves, flat.placeholders, flat.holders, flat.slices, flat.names, strict=True)
        for leaf, placeholder, holders, piece, name in members:
            keys: list[str | int] = [id(leaf), id(placeholder), id(piece), *(holder.full_name for holder in holders)]
            names |= dict.fromkeys(keys, name)
            slices |= dict.fromkeys(keys, piece) if flat.requires_grad else {}
    if groups is None:
        return [{"params": list(dict.fromkeys(slices.values()))}]

    def find(entry: Any) -> Any:
        if isinstance(entry, tuple):  # torch remembers the name
            return entry[0], find(entry[1])
        key = entry if isinstance(entry, str) else id(entry)
        if key not in slices:
            shown = repr(names.get(key, key)) if key in names or key is entry else f"of shape {tuple(entry.shape)}"
            raise KeyError(f"parameter {shown} is not a trained parameter of the sharded model")
        return slices[key]

    def listed(params: Any) -> list[Any]:
        return [params] if isinstance(params, str | Tensor) else list(params)

    return [{**group, "params": [find(entry) for entry in listed(group["params"])]} for group in groups]


class NonFiniteGradientError(FloatingPointError):
    """The global norm of the gradients is infinite or not a number."""


def clip_grad_norm(
    slices: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, group: ProcessGroup | None = None
) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before, on every rank.

    The norm is over all elements on all ranks of `group`; `norm_type` is 1, 2, any p > 0 or infinity. If it is not
    finite, every rank raises NonFiniteGradientError and no gradient is changed: zero the gradients and skip the step.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm!r}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type!r}")
    gradients = [s.grad for s in slices if s.grad is not None]
    norm = global_norm(gradients, norm_type, group)
    if not norm.isfinite():
        raise NonFiniteGradientError(
            f"the gradient's global {norm_type:g}-norm is {norm.item()}: no gradient was changed, no step was taken"
        )
    scale = max_norm / (norm.item() + 1e-6)
    if scale < 1:
        for gradient in gradients:
            gradient.mul_(scale)
    return norm.item()


def global_norm(gradients: list[Tensor], norm_type: float, group: ProcessGroup | None = None) -> Tensor:
    """The norm over all ranks, in fp64. A norm of norms is the norm of the whole, for every p."""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in gradients if g.numel() > 0]
    local = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    mine = torch.linalg.vector_norm(local, norm_type).reshape(1).to(device)  # gradients may be in host memory
    # Gathered, not reduced with MAX: gloo's MAX loses a NaN that rank 0 does not hold.
    everyone = mine.new_empty(dist.get_world_size(group))
    with on_all_ranks("get the norm of the gradients"):
        launch_all_gather(everyone, mine, group).wait()
    norm: Tensor = torch.linalg.vector_norm(everyone, norm_type)
    return norm
