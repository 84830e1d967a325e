"""Grade a reader's own copy: run notebooks and print the verdict of every exercise.

    python scripts/grade.py                       # or `make exercises`: all chapters of book/
    python scripts/grade.py my/13_reduce.ipynb    # one notebook, wherever it is

The notebooks are not changed. What is checked is the stub cell as the reader left it; cells with the published
solutions are left out, and so are cells tagged `long`, which no exercise needs. The last line is `N solved, M open`;
exit code 1 if one is open.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("exercise", "check", "solution")


def role_of(cell: nbformat.NotebookNode) -> tuple[str, str]:
    """Role and name of a cell that belongs to an exercise, by its tag `role:name`; else two empty strings."""
    for tag in cell.metadata.get("tags", []):
        role, colon, name = tag.partition(":")
        if colon and role in ROLES:
            return role, name
    return "", ""


def verdicts(cell: nbformat.NotebookNode) -> list[str]:
    """The lines of the cell's output that are verdicts, without the number of the rank that speaks."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return re.findall(r"^(?:\[[\d,-]+\] +)?([✓✗].*)$", "\n".join(texts), re.MULTILINE)


def grade(notebook: nbformat.NotebookNode, folder: Path) -> Iterator[tuple[str, str]]:
    """Execute a notebook in `folder`; yields the name of each exercise and its verdict."""
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel():
        for place, cell in enumerate(notebook.cells):
            role, name = role_of(cell)
            if cell.cell_type != "code" or role == "solution" or "long" in cell.metadata.get("tags", []):
                continue
            try:
                client.execute_cell(cell, place)
            except CellExecutionError as error:
                if role not in ("exercise", "check"):
                    raise
                if role == "check":
                    yield name, f"✗ {error.ename}: {error.evalue}"
                continue
            if role == "check":
                yield name, (verdicts(cell) or ["✗ the check printed no verdict"])[-1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: book/*.ipynb")
    notebooks = parser.parse_args(arguments).notebooks or sorted((ROOT / "book").glob("*.ipynb"))
    missing = [str(file) for file in notebooks if not file.is_file()]
    if missing:
        parser.error(f"no such notebook: {', '.join(missing)}")
    solved = opened = 0
    for file in notebooks:
        notebook = nbformat.read(file, as_version=4)
        if not any(role_of(cell)[0] for cell in notebook.cells):
            continue
        print(file.stem)
        for name, verdict in grade(notebook, file.parent):
            print(f"  {name}: {verdict}", flush=True)
            solved, opened = solved + verdict.startswith("✓"), opened + (not verdict.startswith("✓"))
    print(f"{solved} solved, {opened} open")
    return int(opened > 0)


if __name__ == "__main__":
    sys.exit(main())
