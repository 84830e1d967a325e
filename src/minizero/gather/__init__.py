"""Chapter 12, gather: a unit's parameters arrive before it is used, leave after, and come again for backward.

`units` are the verbs and the hooks that call them; `ahead` says which units come early, `outputs` finds the tensors
in what a module returns, `leaving` looks after what outlives a unit's forward, and `use` is what backward still needs.

[Note: how backward is heard of] A module can be asked to report its forward, but not its backward: what runs then is a
graph. So the hook after forward looks for tensors in the output and puts a hook on each. When the first of them gets
its gradient, backward is about to enter the unit, and the parameters are gathered. It has left when each trained
parameter has its gradient: autograd accumulates a gradient after the last use of the parameter, and tells (chapter 13).
A frozen parameter has none, so for a unit with such parameters the gradients of the inputs are waited for as well. The
end of a whole backward is reported by autograd's engine, which calls what was queued; if backward raises it does not,
and whoever comes next finds out: `Backward.recover`, in chapter 15. Checkpointing runs forwards inside of backward, the
reentrant kind also backwards inside of backward; `in_backward` and autograd's number for each tell them apart.
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
