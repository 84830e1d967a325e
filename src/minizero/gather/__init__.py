"""Chapter 12, gather: a unit's parameters arrive before it is used, leave after, and come again for backward.

`units` are the verbs and the hooks that call them; `ahead` says which units come early, `outputs` finds the tensors
in what a module returns, `leaving` looks after what outlives a unit's forward.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.gather.ahead import Moment as Moment
    from minizero.gather.ahead import Schedule as Schedule
    from minizero.gather.units import Gatherer as Gatherer
    from minizero.gather.units import State as State
    from minizero.gather.units import Unit as Unit
    from minizero.gather.use import in_backward as in_backward
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "units": "Gatherer State Unit",
            "use": "in_backward",
            "ahead": "Moment Schedule",
        },
    )
