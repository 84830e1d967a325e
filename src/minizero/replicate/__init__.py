"""Chapter 02, data parallel: every rank holds everything, and the ranks average their gradients.

`average` is the chapter; `sending` is how one rank's values reach all others.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.replicate.average import AllReduceBucket as AllReduceBucket
    from minizero.replicate.average import Replicated as Replicated
    from minizero.replicate.average import average_gradients as average_gradients
    from minizero.replicate.average import check_agreement as check_agreement
    from minizero.replicate.average import check_model as check_model
    from minizero.replicate.average import make_buckets as make_buckets
    from minizero.replicate.average import take_from_rank_0 as take_from_rank_0
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "average": (
                "AllReduceBucket Replicated average_gradients check_agreement check_model make_buckets take_from_rank_0"
            ),
        },
    )
