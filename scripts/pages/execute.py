"""Run a notebook from top to bottom in a kernel of its own, and say afterwards which of its cells failed.

The executed notebook is the record: a failed cell holds its error as an output, also when it was the kernel that died
or the time that was up, and the cells below it hold none.
"""

from __future__ import annotations

import asyncio
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Failure:
    """The cell at which a notebook stopped."""

    notebook: str  # the file's name
    cell: int  # counted as Jupyter does, in [n]; 0: the notebook could not even be read
    line: str  # the cell's first line, and below a %%magic the second
    error: str  # class and message, in one line

    def __str__(self) -> str:
        place = f"cell [{self.cell}] `{self.line}`" if self.cell else "the file"
        return f"{self.notebook}, {place}: {self.error}"


def shortened(text: str, limit: int) -> str:
    """`text` in one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def code_cells(notebook: Any) -> list[Any]:
    """The cells that a kernel runs: code, not empty."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def failed_cell(notebook: Any) -> Any | None:
    """The cell with an error that its tags do not ask for."""
    for cell in code_cells(notebook):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        if errors and "raises-exception" not in cell.metadata.get("tags", []):
            return cell
    return None


def failure(notebook: Any, name: str) -> Failure | None:
    """What went wrong in an executed notebook of this name, if anything."""
    cell = failed_cell(notebook)
    if cell is None:
        return None
    # a cell whose time is up was interrupted, and says where; ours comes after that
    error = [output for output in cell.outputs if output.output_type == "error"][-1]
    message = f"{error.ename}: {error.evalue.strip()}".splitlines()[0].rstrip(": ")
    if arrow := re.findall(r"^-+> *(\d+) +(.*)$", ANSI.sub("", "\n".join(error.traceback)), re.MULTILINE):
        message += f" (line {arrow[0][0]}: {shortened(arrow[0][1], 60)})"
    lines = [line for line in cell.source.splitlines() if line.strip()]
    first = " · ".join(lines[:2]) if lines[0].startswith("%%") else lines[0]
    return Failure(name, cell.execution_count, shortened(first, 70), shortened(message, 250))


def is_executed(notebook: Any) -> bool:
    """Whether every cell was run, or every one up to a failure."""
    return failed_cell(notebook) is not None or all(cell.execution_count for cell in code_cells(notebook))


def run(file: Path, timeout: int) -> None:
    """Execute the notebook `file` in its folder and write it back with its outputs; a cell has `timeout` seconds."""
    notebook = nbformat.read(file, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    current = code_cells(notebook)[:1]

    def starts(cell: Any, cell_index: int) -> None:
        # nbclient answers a signal by ending the kernel, as if it had died: the next notebook would follow
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
        if cell.cell_type == "code" and cell.source.strip():
            current[:] = [cell]

    client = NotebookClient(
        notebook, timeout=timeout, on_cell_start=starts, resources={"metadata": {"path": str(file.parent)}}
    )
    log = file.with_suffix(".log")
    try:
        with log.open("wb") as stream:  # what the kernel says outside of cells: torch's warnings in C++, a crash
            client.execute(stdout=stream, stderr=stream)
    except CellExecutionError:
        pass  # the cell has its error
    except CellTimeoutError:
        _put_error(notebook, current, "TimeoutError", f"the cell had not ended after {timeout} s")
    except DeadKernelError:
        said = log.read_text(errors="replace").split("\n")[-20:]
        _put_error(notebook, current, "DeadKernelError", "the kernel died in this cell", *filter(None, said))
    except Exception as error:  # a kernel that does not start, for example: no reason to stop the other notebooks
        _put_error(notebook, current, type(error).__name__, str(error))
    nbformat.write(notebook, file)


def _put_error(notebook: Any, current: list[Any], name: str, message: str, *details: str) -> None:
    """Give the cell that was running an error as an output; it has none of its own."""
    (cell,) = current
    cell.execution_count = code_cells(notebook).index(cell) + 1
    text = [f"{name}: {message}", *details]
    cell.outputs.append(nbformat.v4.new_output("error", ename=name, evalue=message, traceback=text))
