"""Chapter 13, reduce: gradients leave as shards, in one order on every rank.

`buckets` collect and send, `spares` are their buffers, used again.
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
