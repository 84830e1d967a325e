"""Exercises of the book: the untouched stub does not pass its check, and the solution does.

A notebook marks the three cells of an exercise by tags: `exercise:NAME` (the stub), `check:NAME` and `solution:NAME`.
The check prints a verdict that begins with ✓ or ✗ and says in words what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

BOOK = Path(__file__).resolve().parent.parent / "book"
NOTEBOOKS = sorted(BOOK.glob("*.ipynb"))
ROLES = ("exercise", "check", "solution")


def marked(notebook: nbformat.NotebookNode) -> Iterator[tuple[int, str, str]]:
    """Place, role and name of each cell that belongs to an exercise, in the order of the notebook."""
    for place, cell in enumerate(notebook.cells):
        for tag in cell.metadata.get("tags", []):
            role, colon, name = tag.partition(":")
            if colon and role in ROLES:
                yield place, role, name


def verdicts(cell: nbformat.NotebookNode) -> list[str]:
    """The lines of the cell's output that are verdicts, without the number of the rank that speaks."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return re.findall(r"^(?:\[ *\d+\] )?([✓✗].*)$", "\n".join(texts), re.MULTILINE)


def checked(client: NotebookClient, notebook: nbformat.NotebookNode, place: int) -> str:
    client.execute_cell(notebook.cells[place], place)
    (verdict,) = verdicts(notebook.cells[place])
    return verdict


def complaints(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    """Execute the notebook, checking each exercise with its stub and then with its solution; say what is not right."""
    found: list[str] = []
    roles = {place: (role, name) for place, role, name in marked(notebook)}
    checks = {name: place for place, role, name in marked(notebook) if role == "check"}
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel():
        for place, cell in enumerate(notebook.cells):
            role, name = roles.get(place, ("", ""))
            if role == "check":
                verdict = checked(client, notebook, place)
                if not re.match(r"✗ .{20}", verdict):
                    found.append(f"{name}: the stub is told {verdict!r}")
            elif cell.cell_type == "code":
                client.execute_cell(cell, place)
            if role == "solution" and not (verdict := checked(client, notebook, checks[name])).startswith("✓"):
                found.append(f"{name}: the solution is told {verdict!r}")
    return found


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_every_exercise_has_a_stub_a_check_and_a_solution_in_this_order(file: Path) -> None:
    cells = list(marked(nbformat.read(file, as_version=4)))
    names = list(dict.fromkeys(name for _, _, name in cells))
    assert [(role, name) for _, role, name in cells] == [(role, name) for name in names for role in ROLES]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_stubs_do_not_pass_and_solutions_do(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    if not list(marked(notebook)):
        pytest.skip("no exercises")
    assert complaints(notebook, file.parent) == []


@pytest.mark.filterwarnings("default")
def test_an_exercise_that_does_not_work_is_found(tmp_path: Path) -> None:
    """A stub that passes, a solution that does not, and a check that has nothing to say."""

    def cell(tag: str, source: str) -> nbformat.NotebookNode:
        return nbformat.v4.new_code_cell(source, metadata={"tags": [tag]})

    check = "print('✓ good' if answer() == 42 else '✗ ' + {words!r})"
    words = "the answer is not what this checker expects"
    notebook = nbformat.v4.new_notebook(
        cells=[
            cell("exercise:easy", "def answer(): return 42"),
            cell("check:easy", check.format(words=words)),
            cell("solution:easy", "def answer(): return 42"),
            cell("exercise:wrong", "def answer(): return 0"),
            cell("check:wrong", check.format(words=words)),
            cell("solution:wrong", "def answer(): return 41"),
            cell("exercise:mute", "def answer(): return 0"),
            cell("check:mute", check.format(words="no")),
            cell("solution:mute", "def answer(): return 42"),
        ]
    )
    assert complaints(notebook, tmp_path) == [
        "easy: the stub is told '✓ good'",
        f"wrong: the solution is told '✗ {words}'",
        "mute: the stub is told '✗ no'",
    ]
