"""Chapter 00, many processes, one notebook: `%%ranks` runs a cell on every rank of a group of live processes.

In the notebook: `magics` are `%ranks`, `%%ranks`, `pull` and `push`; `group` has the group of ranks, `stop` how a
cell that fails is ended, `kernel` one rank as seen from here. In each rank's process: `worker` and `shell`. On both
sides: `output` and `errors`, what is shown.
"""

from typing import TYPE_CHECKING

from minizero._face import face

if TYPE_CHECKING:
    from minizero.ranks.group import Ranks as Ranks
    from minizero.ranks.magics import RankMagics as RankMagics
    from minizero.ranks.magics import load_ipython_extension as load_ipython_extension
    from minizero.ranks.magics import pull as pull
    from minizero.ranks.magics import push as push
    from minizero.ranks.magics import unload_ipython_extension as unload_ipython_extension
    from minizero.ranks.stop import RankError as RankError
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "magics": "RankMagics load_ipython_extension pull push unload_ipython_extension",
            "group": "Ranks",
            "stop": "RankError",
        },
    )
