"""scripts/book.py: a bad notebook does not take the site with it, and no site shows outputs older than the code.

Also what it does to outputs, and the extension that links mentions of chapters.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from docutils.core import publish_doctree
from repository import ROOT
from sphinx import addnodes

from pages import execute, outputs

sys.path.append(str(ROOT / "book" / "_ext"))
chapters = importlib.import_module("chapters")
SCRIPTS = ("book.py", "pages/__init__.py", "pages/execute.py", "pages/outputs.py")
# Each of these notebooks stops in its second cell, [2], in its own way.
BAD = {
    "12_divides": "x = 1\n1 / 0",
    "13_dies": "import os\nos._exit(1)",
    "14_hangs": "import time\ntime.sleep(60)",
    "15_rank": "%%ranks\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError('one rank fails')",
}
ERRORS = {
    "12_divides": "12_divides.ipynb, cell [2] `x = 1`: ZeroDivisionError: division by zero",
    "13_dies": "13_dies.ipynb, cell [2] `import os`: DeadKernelError: the kernel died in this cell",
    "14_hangs": "14_hangs.ipynb, cell [2] `import time`: TimeoutError: the cell had not ended after 20 s",
    "15_rank": "15_rank.ipynb, cell [2] `%%ranks · import os`: RankError: rank 1: ValueError: one rank fails",
}


class Book:
    """A book of a few notebooks with the scripts and the settings of ours."""

    def __init__(self, root: Path, notebooks: dict[str, list[str]]) -> None:
        self.root = root
        for folder in ("_ext", "_static"):
            ignored = shutil.ignore_patterns("__pycache__", "vendor")
            shutil.copytree(ROOT / "book" / folder, root / "book" / folder, ignore=ignored)
        for name in ("scripts", "scripts/pages", "src", "configs", "slurm"):
            (root / name).mkdir()
        for name in (*(f"scripts/{script}" for script in SCRIPTS), "requirements.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, root / name)
        config = (ROOT / "_config.yml").read_text()
        assert config.count("timeout: 300 ") == 1
        (root / "_config.yml").write_text(config.replace("timeout: 300 ", "timeout: 20 "))
        files = "".join(f"  - file: book/{name}\n" for name in notebooks)
        (root / "_toc.yml").write_text(f"format: jb-book\nroot: book/intro\nchapters:\n{files}")
        (root / "book" / "intro.md").write_text("# A book\n\nIt begins with chapter 11.\n")
        (root / "book" / "references.bib").touch()
        for name, cells in notebooks.items():
            self.write(name, *cells)

    def write(self, name: str, *cells: str) -> None:
        made = [nbformat.v4.new_markdown_cell(f"# {name[:2]} · A page\n\nText.")]
        made += [nbformat.v4.new_code_cell(cell) for cell in cells]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=kernel), self.root / "book" / f"{name}.ipynb")

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        """Call scripts/book.py; its exit code and the lines it printed."""
        command = [sys.executable, self.root / "scripts" / "book.py", *arguments]
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
        )
        print(done.stdout)
        return done.returncode, done.stdout.splitlines()

    def page(self, name: str) -> str:
        return (self.root / "_build" / "html" / "book" / f"{name}.html").read_text()


def article(page: str) -> str:
    """What a page says, without tags, in one line."""
    text = re.search(r"<article.*?</article>", page, re.DOTALL)
    assert text
    return " ".join(re.sub(r"<[^>]*>", "", text[0]).split())


def test_F56_bad_notebooks_fail_the_build_and_do_not_take_the_site_with_them(tmp_path: Path) -> None:
    """An error, a dead kernel, a cell without end, an error on a rank and a file that is none; then all are mended."""
    before = dict.fromkeys(BAD, "before = 'was shown'\nbefore")
    before["15_rank"] = "%load_ext minizero.ranks\n%ranks 2"
    notebooks = {name: [before[name], cell, "'never' + ' reached'"] for name, cell in BAD.items()}
    book = Book(tmp_path, {"11_good": ["'all' + ' well'"], **notebooks, "16_torn": []})
    (tmp_path / "book" / "16_torn.ipynb").write_text("<<<<<<< HEAD\n")

    code, lines = book.run("build")
    assert code == 1
    assert [line.split(" ...")[0] for line in lines if line.startswith("[")] == [
        f"[{number}/5] {name}" for number, name in enumerate(["11_good", *BAD], start=1)
    ]
    assert len(lines) < 20
    last = "\n".join(lines[-10:])
    for text in (*ERRORS.values(), "16_torn.ipynb, the file: "):
        assert text in last
    assert re.search("sphinx|jupyter-book|warning", last, re.IGNORECASE) is None
    assert "all well" in article(book.page("11_good"))
    assert "chapter 11</span></a>" in book.page("intro")
    for name, error in ERRORS.items():
        page = article(book.page(name))
        assert f"its notebook stopped in cell [2]: {error.partition('`: ')[2]}" in page
        assert "This cell failed" in page
        assert "never reached" not in page
    assert "was shown" in article(book.page("12_divides"))
    assert "could not be read" in article(book.page("16_torn"))

    for name in (*BAD, "16_torn"):
        book.write(name, "'all' + ' well'")
    code, lines = book.run("build")
    assert code == 0
    assert lines[0] == "1 of 6 notebooks and all code are as when they were last executed"
    assert all("all well" in article(book.page(name)) for name in (*BAD, "16_torn"))


def test_F101_no_site_shows_outputs_older_than_the_code_or_the_cells(tmp_path: Path) -> None:
    book = Book(tmp_path, {"11_old": ["import pathlib\n'made with ' + pathlib.Path('../src/code.py').read_text()"]})
    source = tmp_path / "src" / "code.py"
    source.write_text("version 1")
    copy = tmp_path / "_executed"
    executed = ("build", "--executed", str(copy))
    assert book.run(*executed)[0] == 2
    assert book.run("copy", str(copy))[0] == 0
    code, lines = book.run(*executed)
    assert (code, "11_old.ipynb has not been executed" in lines[-1]) == (2, True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbmake", "--overwrite", copy / "book"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    assert book.run(*executed)[0] == 0
    assert "made with version 1" in article(book.page("11_old"))
    assert "Made with minizero" in book.page("11_old")

    source.write_text("version 2")
    code, lines = book.run(*executed)
    assert (code, "its outputs are older than src/code.py" in lines[-1]) == (2, True)
    shutil.copytree(copy, tmp_path / "_build" / "executed", symlinks=True)  # as if `build` had executed them
    assert book.run("build")[0] == 0
    assert "made with version 2" in article(book.page("11_old"))

    source.write_text("version 1")
    notebook = tmp_path / "book" / "11_old.ipynb"
    notebook.write_text(notebook.read_text().replace("made with", "changed for"))
    code, lines = book.run(*executed)
    assert (code, "the cells of 11_old.ipynb have changed since" in lines[-1]) == (2, True)


def test_F101_the_footer_names_version_and_commit_or_without_git_the_version(tmp_path: Path) -> None:
    book = Book(tmp_path, {})
    said = [sys.executable, "-c", "import book; print(book.made_with())"]

    def footer() -> str:
        return subprocess.run(said, cwd=tmp_path / "scripts", check=True, capture_output=True, text=True).stdout

    version = re.search('^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert footer().startswith(f"Made with minizero {version[1]}, Python 3.")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[:10]
    assert f"minizero {version[1]} (commit {commit})," in footer()
    (book.root / "book" / "intro.md").write_text("# Another\n")
    assert f"(commit {commit} with changes)," in footer()


# ---- outputs


TRACEBACK = [
    "-" * 75,
    "\x1b[31mValueError\x1b[39m                       Traceback (most recent call last)",
    "\x1b[36mCell\x1b[39m In[7], line 4\n      1 a\n      2 b\n      3 c\n\x1b[32m----> \x1b[39m4 f()\n      5 e",
    "File {0}/torch/one.py:5, in one()\n      4 x\n----> 5 two()\n      6 y\n",
    "File {0}/torch/two.py:15, in two()\n     14 x\n---> 15 three()\n     16 y\n",
    "File {1}/src/minizero/zero.py:5, in three()\n      4 x\n----> 5 raise ValueError(\n      6 y\n",
    "\x1b[31mValueError\x1b[39m: no {1}/book/file, {1}x, {2}/notes, {3}/ipykernel_12/34.py and {3}/tmpab_12345/f",
]
SHORT = """
Cell In[7], line 4
      2 b
      3 c
----> 4 f()

   (... 2 more frames ...)

File minizero/zero.py:5, in three()
----> 5 raise ValueError(

ValueError: no book/file, ~/a bookx, ~/notes, cell and /tmp/…/f
"""


def test_an_expected_error_keeps_your_line_the_last_frame_and_the_message_without_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    root = Path("/home/somebody/a book")
    folders = [sysconfig.get_path("purelib"), str(root), "/home/somebody", tempfile.gettempdir()]
    traceback = [line.format(*folders) for line in TRACEBACK]
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=traceback)
    said = nbformat.v4.new_output("stream", text="~/a book/src/minizero/zero.py and /home/somebody/a book")
    picture = nbformat.v4.new_output(
        "display_data", data={"image/png": "/home/somebody/", "text/plain": "/home/somebody/"}
    )
    cell = nbformat.v4.new_code_cell("f()", outputs=[error, said, picture], metadata={"tags": ["raises-exception"]})
    names = outputs.folders_of_this_machine(root, root / "_build" / "executed")
    outputs.tidy(nbformat.v4.new_notebook(cells=[cell]), names)
    shown = execute.ANSI.sub("", "\n".join(cell.outputs[0].traceback))
    assert shown.strip() == SHORT.format(*folders).strip()
    assert cell.outputs[1].text == "minizero/zero.py and ."
    assert cell.outputs[2].data == {"image/png": "/home/somebody/", "text/plain": "~/"}


def test_a_traceback_that_ends_in_a_cell_and_one_without_frames() -> None:
    through = [TRACEBACK[3], "Cell In[2], line 1\n----> 1 x"]
    assert outputs.trimmed(through) == ["   (... 1 more frame ...)\n", "Cell In[2], line 1\n----> 1 x\n"]
    assert outputs.trimmed(["RankError: rank 1"]) == ["RankError: rank 1"]
    chain = "\nThe above exception was the direct cause of the following exception:\n"
    assert outputs.trimmed([*TRACEBACK, chain, "RankError: rank 1"]) == ["RankError: rank 1"]


# ---- book/_ext/chapters.py


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("see chapter 12.", {"chapter 12": 12}),
        ("Chapter 4's ledger", {"Chapter 4": 4}),
        ("is\nchapter\n13", {"chapter\n13": 13}),
        ("Chapters 12 and 13", {"Chapters 12": 12, "13": 13}),
        ("chapters 02 to 15, 100 bytes", {"chapters 02": 2, "15": 15}),
        ("chapters 1, 3, and 4-5", {"chapters 1": 1, "3": 3, "4": 4, "5": 5}),
        ("chapter 12 and 3 ranks", {"chapter 12": 12}),
        ("this chapter, 12 ranks, chapter 1234", {}),
    ],
)
def test_mentions_of_chapters_are_found(text: str, numbers: dict[str, int]) -> None:
    pieces = list(chapters.links(text))
    assert "".join(piece for piece, _ in pieces) == text
    assert {piece: number for piece, number in pieces if number is not None} == numbers


def test_mentions_become_references_outside_of_code_headings_and_links(caplog: pytest.LogCaptureFixture) -> None:
    source = "Chapter 12\n==========\n\nIn chapter 12, ``chapter 12``, `chapter 12 <x>`__.\n\n::\n\n   chapter 12\n\n"
    source += "Chapter 99.\n"
    document = publish_doctree(source, settings_overrides={"report_level": 5})
    document.settings.env = SimpleNamespace(found_docs={"book/12_gather", "book/intro"}, docname="book/intro")
    chapters.LinkChapters(document).apply()
    found = list(document.findall(addnodes.pending_xref))
    assert [(reference.astext(), reference["reftarget"]) for reference in found] == [("chapter 12", "/book/12_gather")]
    assert "there is no chapter 99" in caplog.text
