"""Chapter 11, sharding: flatten, pad, cut.

`flat` is the arithmetic and the memory of shards, `placeholder` what a model holds while its weights are elsewhere.

[Note: storage that goes and comes back] Autograd keeps what backward will need: parameters, and views of them that we
know nothing about, such as a transposed weight. In backward it must find the values where forward left them. So the
full buffer of a unit is never replaced. Its storage shrinks to no bytes when the unit is freed, and grows again before
the next gather; every view of it, in a graph or not, is then valid again, though its memory may lie elsewhere.
A parameter becomes a view by `parameter.data = ...`, which leaves it a version counter of its own. So autograd does not
take a refill for a change in place, and `mark_changed` tells it of the real ones, after a step or a load. The price: a
view that somebody keeps while the storage is empty reads memory that is not there. Hence the placeholders, which raise
when they are read, and `leaving`, in the next chapter, for what goes out of a unit.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.sharding.flat import FlatParameters as FlatParameters
    from minizero.sharding.flat import Holder as Holder
    from minizero.sharding.flat import Layout as Layout
    from minizero.sharding.flat import holders_of as holders_of
    from minizero.sharding.placeholder import NotCopied as NotCopied
    from minizero.sharding.placeholder import ShardedAccessError as ShardedAccessError
    from minizero.sharding.placeholder import ShardedParameter as ShardedParameter
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "flat": "FlatParameters Holder Layout holders_of",
            "placeholder": "NotCopied ShardedAccessError ShardedParameter",
        },
    )
