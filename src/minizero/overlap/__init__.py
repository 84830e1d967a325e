"""Chapter 23, overlap: communication behind computation, and a timeline that shows it.

`prefetch` gathers ahead in the order of use, `trace` records what a rank did and when, `timeline` puts the records of
all ranks on one clock; `cost` is what it saves, on paper.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.overlap.cost import tokens_to_hide as tokens_to_hide
    from minizero.overlap.cost import waits as waits
    from minizero.overlap.prefetch import ByBytes as ByBytes
    from minizero.overlap.prefetch import ByCount as ByCount
    from minizero.overlap.prefetch import Recorded as Recorded
    from minizero.overlap.prefetch import full_bytes as full_bytes
    from minizero.overlap.timeline import Timeline as Timeline
    from minizero.overlap.timeline import align as align
    from minizero.overlap.timeline import draw as draw
    from minizero.overlap.timeline import merge as merge
    from minizero.overlap.trace import Record as Record
    from minizero.overlap.trace import Span as Span
    from minizero.overlap.trace import Trace as Trace
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "prefetch": "ByBytes ByCount Recorded full_bytes",
            "trace": "Record Span Trace",
            "timeline": "Timeline align draw merge",
            "cost": "tokens_to_hide waits",
        },
    )
