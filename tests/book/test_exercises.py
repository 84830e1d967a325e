"""Exercises of the book: the untouched stub does not pass its check, and the solution does. Cells can be run twice.

A notebook marks the three cells of an exercise by tags: `exercise:NAME` (the stub), `check:NAME` and `solution:NAME`.
The check prints a verdict that begins with ✓ or ✗ and says in words what is wrong. Cells tagged `long` are left out:
nbmake executes them, and the exercises do not need them.
"""

from __future__ import annotations

import re
from pathlib import Path

import grade
import nbformat
import psutil
import pytest
from grade import ROLES, role_of, verdicts
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from repository import ROOT

BOOK = ROOT / "book"
EVERY_CHAPTER = pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=getattr(pytest.mark, f"ch{file.stem[:2]}"))
        for file in sorted(BOOK.glob("*.ipynb"))
    ],
)


def checked(client: NotebookClient, notebook: nbformat.NotebookNode, place: int) -> str:
    client.execute_cell(notebook.cells[place], place)
    (verdict,) = verdicts(notebook.cells[place])
    return verdict


def complaints(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    """Execute each cell twice, checking each exercise with its stub, then with its solution; say what is not right.

    Then execute all of the notebook once more in the same kernel, and see that no process outlives that.
    """
    found: list[str] = []
    checks = {role_of(cell)[1]: place for place, cell in enumerate(notebook.cells) if role_of(cell)[0] == "check"}
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel():
        for place, cell in enumerate(notebook.cells):
            role, name = role_of(cell)
            if cell.cell_type != "code" or "long" in cell.metadata.get("tags", []):
                continue
            if role == "check":
                verdict = checked(client, notebook, place)
                if not re.match(r"✗ .{20}", verdict):
                    found.append(f"{name}: the stub is told {verdict!r}")
                continue
            for _ in range(2):  # a reader runs cells again
                client.execute_cell(cell, place)
            if role == "solution" and not (verdict := checked(client, notebook, checks[name])).startswith("✓"):
                found.append(f"{name}: the solution is told {verdict!r}")
        for place, cell in enumerate(notebook.cells):
            if cell.cell_type == "code" and not role_of(cell)[0] and "long" not in cell.metadata.get("tags", []):
                client.execute_cell(cell, place)
        started = psutil.Process(client.km.provisioner.pid).children(recursive=True)
    _, alive = psutil.wait_procs(started, timeout=10)
    return found + [f"a process is left behind: {' '.join(process.cmdline())}" for process in alive]


@EVERY_CHAPTER
def test_every_exercise_has_a_stub_a_check_and_a_solution_in_this_order(file: Path) -> None:
    cells = [role_of(cell) for cell in nbformat.read(file, as_version=4).cells if role_of(cell)[0]]
    names = list(dict.fromkeys(name for _, name in cells))
    assert cells == [(role, name) for name in names for role in ROLES]


@pytest.mark.filterwarnings("default")
@EVERY_CHAPTER
def test_F58_stubs_do_not_pass_solutions_do_and_cells_can_be_run_twice(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    assert complaints(notebook, file.parent) == []


def notebook_of(*cells: tuple[str, str]) -> nbformat.NotebookNode:
    """A notebook of code cells, each given by its tag and its source."""
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source, metadata={"tags": [tag]}) for tag, source in cells]
    )


@pytest.mark.filterwarnings("default")
def test_an_exercise_that_does_not_work_is_found(tmp_path: Path) -> None:
    """A stub that passes, a solution that does not, and a check that has nothing to say."""

    check = "print('✓ good' if answer() == 42 else '✗ ' + {words!r})"
    words = "the answer is not what this checker expects"
    notebook = notebook_of(
        ("exercise:easy", "def answer(): return 42"),
        ("check:easy", check.format(words=words)),
        ("solution:easy", "def answer(): return 42"),
        ("exercise:wrong", "def answer(): return 0"),
        ("check:wrong", check.format(words=words)),
        ("solution:wrong", "def answer(): return 41"),
        ("exercise:mute", "def answer(): return 0"),
        ("check:mute", check.format(words="no")),
        ("solution:mute", "def answer(): return 42"),
    )
    assert complaints(notebook, tmp_path) == [
        "easy: the stub is told '✓ good'",
        f"wrong: the solution is told '✗ {words}'",
        "mute: the stub is told '✗ no'",
    ]


@pytest.mark.filterwarnings("default")
def test_a_cell_that_cannot_be_run_twice_is_found(tmp_path: Path) -> None:
    notebook = notebook_of(("setup", "x = 1"), ("moves", "assert x == 1\nx += 1"))
    with pytest.raises(CellExecutionError, match="assert x == 1"):
        complaints(notebook, tmp_path)


@pytest.mark.filterwarnings("default")
def test_a_process_that_stays_is_found(tmp_path: Path) -> None:
    notebook = notebook_of(
        ("starts", "import subprocess\nstays = subprocess.Popen(['sleep', '20'], start_new_session=True)")
    )
    assert complaints(notebook, tmp_path) == ["a process is left behind: sleep 20"] * 3


# ---- scripts/grade.py


@pytest.mark.filterwarnings("default")
def test_a_reader_s_copy_is_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One solved, one not, one whose cell raises, one whose check raises; solutions and long cells are left out."""
    check = "print('✓ good' if answer() == 42 else '✗ the answer is another one')"
    notebook = notebook_of(
        ("other", "def answer(): return 42"),
        ("long", "raise RuntimeError('left out')"),
        ("exercise:done", "def answer(): return 42"),
        ("check:done", check),
        ("exercise:open", "def answer(): return 0"),
        ("check:open", check),
        ("solution:open", "def answer(): return 42"),
        ("exercise:raises", "def answer(: return"),
        ("check:raises", "answer = lambda: 1 / 0\n" + check),
    )
    nbformat.write(notebook, tmp_path / "mine.ipynb")
    before = (tmp_path / "mine.ipynb").read_bytes()
    assert grade.main([str(tmp_path / "mine.ipynb")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "mine",
        "  done: ✓ good",
        "  open: ✗ the answer is another one",
        "  raises: ✗ ZeroDivisionError: division by zero",
        "1 solved, 2 open",
    ]
    assert (tmp_path / "mine.ipynb").read_bytes() == before


def test_a_notebook_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grade.main([str(tmp_path / "none.ipynb")])
    assert f"no such notebook: {tmp_path / 'none.ipynb'}" in capsys.readouterr().err
