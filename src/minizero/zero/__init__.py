"""Chapter 15, zero: put together. Three stages are two switches on the same verbs.

`stages` is `Zero` itself. What it is made of, in the order of time: `plan` decides on units; `build` gives them first
values, with memory from `blank`, and shards them; `backward` is what happens from the begin of a backward to its end;
`whole` makes the model whole again, for a while or for a file; `state` is what a state dict holds besides. `attached`
are the optimizers that know of it, `elsewhere` the whole parameters whose gradient is not where it was.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.zero.blank import UnfilledError as UnfilledError
    from minizero.zero.stages import Zero as Zero
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "stages": "Zero",
            "blank": "UnfilledError",
        },
    )
