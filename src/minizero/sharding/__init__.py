"""Chapter 11, sharding: flatten, pad, cut.

`flat` is the arithmetic and the memory of shards, `placeholder` what a model holds while its weights are elsewhere.
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
