"""Chapter 02, data parallel: every rank holds everything, and the ranks average their gradients.

One idea: backward makes gradients from the last layer to the first, so the last layers' can travel while the first
layers' are still being computed. `average_gradients` waits until all are there and sends one message per parameter;
`Replicated` fills buckets and sends each as soon as it is full (Li et al. 2020, "PyTorch Distributed", section 4.2).

Ψ parameters of b bytes on N ranks: either way a rank sends 2Ψb(N − 1)/N bytes a step, and keeps all parameters,
gradients and optimizer states. That is stage 0, where ZeRO begins. `group=None` is torch's default process group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, Work

from minizero.replicate.sending import check_tensor, send_from_first


@torch.no_grad()
def average_gradients(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Replace each gradient by its mean over the ranks, one all-reduce per parameter: call on all, after backward.

    A parameter counts as zero on a rank that did not use it.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient.to_dense() if gradient.is_sparse else gradient
            parameter.grad /= dist.get_world_size(group)
            dist.all_reduce(parameter.grad, group=group)


class AllReduceBucket:
    """Gradients of one dtype that travel together: `members` are names and parameters, the model's last ones first."""

    def __init__(self) -> None:
        self.members: list[tuple[str, nn.Parameter]] = []
        self.missing: set[str] = set()  # whose gradient is still to come in this backward
        self._flight: tuple[Tensor, Work] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(parameter.nbytes for _, parameter in self.members)

    def launch(self, group: ProcessGroup | None) -> None:
        """Move the gradients into one flat tensor, with zeros where there is none, and start its all-reduce."""
        first = self.members[0][1]
        flat = torch.zeros(self.nbytes // first.itemsize, dtype=first.dtype, device=first.device)
        for parameter, view in self._views(flat):
            if parameter.grad is not None:
                view.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
                parameter.grad = None
        flat /= dist.get_world_size(group)  # before the sum, in which fp16 could overflow
        self._flight = flat, dist.all_reduce(flat, group=group, async_op=True)

    def land(self) -> bool:
        """Wait for the means; the gradients become views of them. Says whether one more gradient came in meanwhile."""
        assert self._flight is not None, "land() follows launch()"
        flat, work = self._flight
        try:
            work.wait()
        except RuntimeError as error:
            names = f"{self.members[0][0]!r} to {self.members[-1][0]!r}"
            raise RuntimeError(f"rank {dist.get_rank()} could not average the gradients of {names}: {error}") from error
        is_late = any(parameter.grad is not None for _, parameter in self.members)
        for parameter, mean in self._views(flat):
            parameter.grad = mean if parameter.grad is None else mean.add_(parameter.grad)
        return is_late

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        parts = flat.split([parameter.numel() for _, parameter in self.members])
        return ((p, part.view(p.shape)) for (_, p), part in zip(self.members, parts, strict=True))

    def reset(self) -> None:
        """Expect all gradients; forget what is on its way."""
        self.missing, self._flight = {name for name, _ in self.members}, None


def make_buckets(parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[AllReduceBucket]:
    """Fill buckets of at most `bucket_bytes` from the last parameter to the first, those of each dtype apart.

    That is about the order in which backward completes them. A parameter larger than that gets a bucket of its own.
    """
    buckets: list[AllReduceBucket] = []
    open_buckets: dict[Any, AllReduceBucket] = {}
    for name, parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        if kind not in open_buckets or open_buckets[kind].nbytes + parameter.nbytes > bucket_bytes:
            open_buckets[kind] = AllReduceBucket()
            buckets.append(open_buckets[kind])
        open_buckets[kind].members.append((name, parameter))
    return buckets


class Replicated:
    """Averages the gradients of `model` over the ranks of `group`, in place; go on calling `model(...)`.

    Parameters and buffers start as rank 0's. After `backward()`, `p.grad` of every trained parameter is the mean over
    the ranks, so every torch optimizer and `clip_grad_norm_` work as on one rank. A parameter counts as zero on a rank
    that did not use it; if no rank did, its gradient is zeros and not None, as in the sharded stages. Buckets go out in
    one order on all ranks, whatever order a rank's graph has; each rank's backward must reach a trained parameter. What
    a backward leaves when it raises is forgotten at the next forward. While `holds` is set nothing is sent: gradients
    add up on their rank until a backward without it.

    Args:
        model: any module, the same on all ranks, with its values (not on the meta device).
        bucket_bytes: largest size of a bucket, unless one parameter alone is larger.
        overlap: send a bucket in backward once it is complete; else all of them at its end.
        group: the ranks that hold a copy of the model; default all.

    Raises, before anything is changed: ValueError naming the argument or parameter, on all ranks also if they bring
    different models. At forward, RuntimeError naming a parameter that was added, replaced, cast or (un)frozen since.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes!r}")
        check_model(model)
        self.model, self.overlap, self.group, self.holds = model, overlap, group, False
        self.has_held = False  # some of the gradients on the parameters: they differ from rank to rank
        self.buckets = make_buckets(((n, p) for n, p in model.named_parameters() if p.requires_grad), bucket_bytes)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        described = [f"{n!r}: {tuple(t.shape)}, {t.dtype}, requires_grad={t.requires_grad}" for n, t in tensors]
        check_agreement([f"bucket_bytes={bucket_bytes}", *described], group)
        take_from_rank_0(model, group)
        self._known = self._identities()
        self._reset()
        for b, bucket in enumerate(self.buckets):
            for name, parameter in bucket.members:
                parameter.is_replicated_by_minizero = True  # type: ignore[attr-defined]
                # Weakly: these hooks live in C++, where Python's garbage collector sees no cycle to break.
                parameter.register_post_accumulate_grad_hook(partial(_hear, weakref.ref(self), b, name))
        model.register_forward_pre_hook(self._before_forward)

    def _reset(self) -> None:
        self._launched = 0  # how many buckets of the order this backward has sent
        self._end: Callable[[], object] | None = None  # weak reference to the callback at the end of this backward
        for bucket in self.buckets:
            bucket.reset()

    def _identities(self) -> dict[str, tuple[int, torch.dtype, bool]]:
        return {name: (id(p), p.dtype, p.requires_grad) for name, p in self.model.named_parameters()}

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if changed := sorted({name for name, _ in self._known.items() ^ self._identities().items()}):
            raise RuntimeError(
                f"parameter {changed[0]!r} was added, removed, replaced, cast, frozen or unfrozen since the model is "
                "replicated, and its gradient would not be averaged: change the model before"
            )
        if self._end is not None and self._end() is None:  # the engine dropped the callback: a backward raised
            if self.has_held and any(p.grad is not None and p.grad.any() for p in self.model.parameters()):
                raise RuntimeError("a backward raised, the gradients held back are incomplete: call zero_grad() first")
            self._reset()
            self.model.zero_grad()

    @torch.no_grad()
    def _on_gradient(self, bucket: AllReduceBucket, name: str) -> None:
        if self._end is None or self._end() is None:
            self._begin_backward()
        if not self.holds:
            bucket.missing.discard(name)
        while self.overlap and self._launched < len(self.buckets) and not self.buckets[self._launched].missing:
            self.buckets[self._launched].launch(self.group)
            self._launched += 1

    def _begin_backward(self) -> None:
        self._reset()
        self.has_held |= self.holds
        end = partial(self._reset if self.holds else self._end_backward)  # the engine's, until backward ends or raises
        Variable._execution_engine.queue_callback(end)
        self._end = weakref.ref(end)

    @torch.no_grad()
    def _end_backward(self) -> None:
        for bucket in self.buckets[self._launched :]:
            bucket.launch(self.group)
        # Reentrant checkpointing hands over one gradient for each use of a parameter. Those that came after their
        # bucket had left go in a second round, on top of the mean, which is equal on all ranks and thus its own mean.
        late = [bucket for bucket in self.buckets if bucket.land()]
        for bucket in late:
            bucket.launch(self.group)
        for bucket in late:
            bucket.land()
        self._reset()
        self.has_held = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicated:
        return self  # the copy of a model is a plain model: its parameters have no hooks

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a replicated model cannot be pickled: save model.state_dict() instead")


def _hear(replicated: weakref.ref[Replicated], b: int, name: str, parameter: Tensor) -> None:
    if (alive := replicated()) is not None:
        alive._on_gradient(alive.buckets[b], name)


def check_model(model: nn.Module) -> None:
    """Raise ValueError or TypeError, naming the tensor, unless the model is whole here and nothing else reduces it."""
    for name, parameter in model.named_parameters():
        for mark in ("is_replicated_by_minizero", "is_sharded_by_minizero", "device_mesh"):  # torch's: DTensor
            if hasattr(parameter, mark):
                raise ValueError(f"parameter {name!r} is replicated or sharded already: that can be done once only")
        if parameter.is_meta or isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no values yet (meta device, or lazy)")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        check_tensor(name, tensor)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient")


def check_agreement(mine: list[str], group: ProcessGroup | None, what: str = "models") -> None:
    """Raise ValueError on all ranks, naming the first difference, unless all describe `what` they bring alike.

    Collectives of different lengths need not raise: gloo gives one of the ranks wrong values instead.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for first, other in zip_longest(everyone[0], theirs):
            if first != other:
                raise ValueError(f"ranks bring different {what}: rank 0 has {first}, rank {rank} has {other}")


def take_from_rank_0(model: nn.Module, group: ProcessGroup | None) -> None:
    """Overwrite every parameter and buffer by that of the group's first rank."""
    for tensor in [*model.parameters(), *model.buffers()]:
        send_from_first(tensor, group)
