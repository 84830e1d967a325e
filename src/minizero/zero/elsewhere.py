"""Chapter 15, zero: whole parameters whose gradient is somewhere else, and who say so when they are asked for it.

After a backward `p.grad` is None on every parameter of a sharded model: its gradient waits in a bucket, or is in pieces
on the ranks. To code that clips, logs or steps it would look as if there were none. So the class of each parameter gets
a `grad` of its own. Nothing else about it changes.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch._guards import TracingContext

from minizero.gather import in_backward
from minizero.reduce import Bucket, Reducer
from minizero.sharding.placeholder import ANEW, refuse_gradient

GRAD: Any = Tensor.grad  # as C++ has it


@dataclass(frozen=True)
class Whereabouts:
    """Where the gradient of a parameter is, if it has one: parameter `index` of a bucket, or that one's slice."""

    name: str
    bucket: ref[Bucket]
    index: int

    def has_gradient(self) -> bool:
        """Whether a backward came after the last zero_grad(); the same answer on all ranks."""
        bucket = self.bucket()
        if bucket is None:
            return False
        return self.index not in bucket.forgotten or bucket.flat.slices[self.index].grad is not None


class Asked:
    """Comes before the class of a parameter: a gradient that is elsewhere is refused, by name, not None."""

    __slots__ = ()
    whereabouts: Whereabouts

    @property
    def grad(self) -> Tensor | None:
        """The gradient that is here, as inside a hook of autograd, or None if there is none anywhere."""
        own: Tensor | None = GRAD.__get__(self)
        if own is None and not _is_excused() and self.whereabouts.has_gradient():
            refuse_gradient(self.whereabouts.name)
        return own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if not in_backward() and (
            value is not None or (GRAD.__get__(self) is None and self.whereabouts.has_gradient())
        ):
            refuse_gradient(self.whereabouts.name)
        GRAD.__set__(self, value)

    def detach(self) -> Tensor:
        """As of any tensor. `nn.Parameter(p)` calls it too, and would fail with words about classes."""
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            raise RuntimeError(
                f"parameter {self.whereabouts.name!r} is sharded, and an nn.Parameter made of it would not be: "
                f"parametrize or replace it before sharding, or {ANEW}"
            )
        return Tensor.detach(self)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _is_excused() -> bool:
    """`nn.Module._apply`, behind `model.to()`, would take a gradient along; a compiler looks at all there is."""
    caller = sys._getframe(2).f_code
    return caller in (nn.Module._apply.__code__, Bucket.collect.__code__) or TracingContext.try_get() is not None


def _plain(parameter: Any) -> nn.Parameter:
    """A parameter as it was before, on the same memory."""
    plain: nn.Parameter = Tensor._make_subclass(type(parameter).__mro__[2], parameter.data, parameter.requires_grad)
    plain.__dict__.update({name: value for name, value in vars(parameter).items() if name != "whereabouts"})
    return plain


@cache
def _asked(kind: type) -> type:
    return type(kind)(kind.__name__, (Asked, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def mark(reducer: Reducer) -> None:
    """Have the parameters whose gradients `reducer` collects say so, from the first backward on."""
    for bucket in reducer.buckets():
        bucket.forget(set(bucket.flat.slices))
        for index, (name, leaf) in enumerate(zip(bucket.flat.names, bucket.flat.leaves, strict=True)):
            leaf.__class__ = _asked(type(leaf))
            leaf.whereabouts = Whereabouts(name, ref(bucket), index)  # type: ignore[attr-defined]


def unmark(reducer: Reducer) -> None:
    """Give the parameters their own class again."""
    for leaf in (leaf for bucket in reducer.buckets() for leaf in bucket.flat.leaves):
        leaf.__class__ = type(leaf).__mro__[2]
        del leaf.whereabouts  # type: ignore[attr-defined]
