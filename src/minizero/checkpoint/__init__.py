"""Chapter 25, checkpoint: each rank writes its shard; any number of ranks, in any stage, goes on from there.

`save_load` has what is called. Under it: `files` that are whole or not there, the `manifest` that says what they
hold, a `snapshot` of what a rank has to save, `reading`, and `one_file` of it all, for plain PyTorch:

    python -m minizero.checkpoint FOLDER OUT.safetensors [--tag TAG]
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.checkpoint.manifest import CheckpointError as CheckpointError
    from minizero.checkpoint.save_load import AsyncSaver as AsyncSaver
    from minizero.checkpoint.save_load import Loaded as Loaded
    from minizero.checkpoint.save_load import exists as exists
    from minizero.checkpoint.save_load import export as export
    from minizero.checkpoint.save_load import gather_to_first as gather_to_first
    from minizero.checkpoint.save_load import load as load
    from minizero.checkpoint.save_load import publish as publish
    from minizero.checkpoint.save_load import save as save
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "save_load": "AsyncSaver Loaded export exists gather_to_first load publish save",
            "manifest": "CheckpointError",
        },
    )
