"""Chapter 26, config: DeepSpeed's `initialize` and its engine, on the verbs of the chapters before.

`build` puts an engine together from what a program brings, which `client` checks; `run` is the engine: `facts` is
what it tells, `feed` its data, `resume` its checkpoints.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.engine.build import initialize as initialize
    from minizero.engine.run import Engine as Engine
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "run": "Engine",
            "build": "initialize",
        },
    )
