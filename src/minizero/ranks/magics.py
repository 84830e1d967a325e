"""Chapter 00, many processes, one notebook: `%%ranks` runs a cell on every rank of a group of live processes.

Each rank is a Jupyter kernel of its own, started with the environment variables that `torchrun` sets, so the code in a
cell is the code of a script:

    %load_ext minizero.ranks
    %ranks 4                           start 4 ranks; again: keep them. Also %ranks stop, %ranks restart
    %%ranks                            run the cell on all of them; also %%ranks [0,2] --timeout 30 --local
    losses = pull("losses")            the value of an expression on each rank, brought to the notebook
    push("rate", 0.1)                  a value of the notebook, brought to each rank
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import MagicArgumentParser

from minizero.ranks.errors import report, wrapped
from minizero.ranks.group import TIMEOUT, Ranks


@magics_class
class RankMagics(Magics):
    """`%ranks` and `%%ranks`, and the group of ranks they act on."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._group: Ranks | None = None

    @property
    def group(self) -> Ranks:
        """The ranks that are running."""
        if self._group is None:
            raise UsageError("no ranks are running; `%ranks 4` starts four")
        return self._group

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """`%ranks N`, `%ranks stop`, `%ranks restart`; `%%ranks [0,2] --timeout SECONDS --local` runs a cell."""
        if cell is not None:
            self._run(line, cell)
        elif line.strip() == "stop":
            self.stop()
        elif line.strip() == "restart":
            self._start(self.group.world)
        elif re.fullmatch("[1-9][0-9]*", line.strip()):
            world = int(line)
            if self._group is None or self._group.world != world or not self._group.healthy:
                self._start(world)
            print(f"{world} ranks are ready")
        else:
            raise UsageError(f"%ranks takes a number of ranks, `stop` or `restart`, not {line!r}")

    def _start(self, world: int) -> None:
        self.stop()
        self._group = Ranks(world)

    def stop(self) -> None:
        """End the ranks, if there are any."""
        if self._group is not None:
            self._group.stop()
        self._group = None

    def _run(self, line: str, cell: str) -> None:
        chosen, options = re.fullmatch(r"\s*(\[[^\]]*\])?(.*)", line).groups()  # type: ignore[union-attr]
        parser = MagicArgumentParser(prog="%%ranks", add_help=False)
        parser.add_argument("--timeout", type=float, default=TIMEOUT)
        parser.add_argument("--local", action="store_true")
        arguments = parser.parse_argstring(options)
        numbers = None if chosen is None else re.findall("[0-9]+", chosen)
        if numbers is not None and (not numbers or re.search(r"[^0-9,\s\[\]]", chosen)):
            raise UsageError(f"ranks are listed as in [0,2], not {chosen}")
        group = self.group
        if arguments.local:
            self._run_here(cell)
        group.run(cell, None if numbers is None else [int(number) for number in numbers], arguments.timeout)

    def _run_here(self, cell: str) -> None:
        assert self.shell is not None
        code = self.shell.transform_cell(cell)
        name = self.shell.compile.cache(code, raw_code=cell)  # so that tracebacks show its lines
        try:
            exec(compile(code, name, "exec"), self.shell.user_ns)
        except Exception as error:
            told = report(error, "Cell in the notebook")
            lines = [*told.traceback, *wrapped(f"{told.name}: {told.message}")]
            error._render_traceback_ = lambda: lines  # type: ignore[attr-defined] # what IPython shows
            raise


def pull(expression: str, ranks: Sequence[int] | None = None) -> list[Any]:
    """The value of `expression` on each of `ranks` (a list; default: all), in rank order, copied into the notebook.

    The value may be a tensor (it arrives on the CPU), a number, a string, or lists, tuples and dicts of those; nothing
    else is let through, so that no code travels. The expression must not communicate with other ranks. If it fails on
    a rank, RankError says which; process groups stay as they are.
    """
    values: list[Any] = _running("pull").pull(expression, ranks)
    return values


def push(name: str, value: Any, ranks: Sequence[int] | None = None) -> None:
    """Make `name` a copy of `value` on each of `ranks` (a list; default: all).

    The value may be what `pull` brings; another one raises TypeError before anything is sent.
    """
    _running("push").push(name, value, ranks)


def _running(verb: str) -> Ranks:
    shell = get_ipython()
    magics = shell.magics_manager.registry.get("RankMagics") if shell is not None else None
    if magics is None:
        raise UsageError(f"{verb} needs ranks: `%load_ext minizero.ranks`, then `%ranks 4`")
    group: Ranks = magics.group
    return group


def load_ipython_extension(shell: InteractiveShell) -> None:
    """What `%load_ext minizero.ranks` calls."""
    shell.register_magics(RankMagics)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """What `%reload_ext` and `%unload_ext` call: ends the ranks."""
    shell.magics_manager.registry["RankMagics"].stop()
