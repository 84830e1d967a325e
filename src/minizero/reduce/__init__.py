"""Chapter 13, reduce: gradients leave as shards, in one order on every rank.

`buckets` collect and send, `spares` are their buffers, used again.

[Note: one order on all ranks] Collectives match by their order alone: the second that one rank starts is taken for the
second of the others, whatever they meant. But the order in which gradients become ready is that of a rank's own graph,
and a batch can skip a branch. So the order is fixed before anything runs, the reverse of the units', and a unit that is
ready early waits for those before it. What backward has not brought by its end goes out then, as zeros, in its turn.
Nothing is decided by what differs from rank to rank; where it must be (which units to gather ahead), a roll call says
on what ground, and compares.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.reduce.buckets import Bucket as Bucket
    from minizero.reduce.buckets import Reducer as Reducer
    from minizero.reduce.spares import Spares as Spares
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "buckets": "Bucket Reducer",
            "spares": "Spares",
        },
    )
