"""Chapter 24, offload: master weights and optimizer state wait in host memory, or on disk, for the step.

`step` goes through the units, `courier` carries what it needs to the device and back, `mapped` are tensors that live in
a file; `cost` is what it takes, on paper.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.offload.cost import Held as Held
    from minizero.offload.cost import bus_bytes as bus_bytes
    from minizero.offload.cost import disk_bytes as disk_bytes
    from minizero.offload.cost import offloaded_states as offloaded_states
    from minizero.offload.courier import Courier as Courier
    from minizero.offload.courier import pinned_like as pinned_like
    from minizero.offload.mapped import MappedFile as MappedFile
    from minizero.offload.mapped import room_for as room_for
    from minizero.offload.step import Offload as Offload
    from minizero.offload.step import States as States
    from minizero.offload.step import attach_offloaded as attach_offloaded
    from minizero.offload.step import offload_optimizer as offload_optimizer
    from minizero.offload.step import probe_states as probe_states
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "step": "Offload States attach_offloaded offload_optimizer probe_states",
            "courier": "Courier pinned_like",
            "mapped": "MappedFile room_for",
            "cost": "Held bus_bytes disk_bytes offloaded_states",
        },
    )
