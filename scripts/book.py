"""Execute the notebooks and build the site with Jupyter Book: from a clean start, with every warning an error.

python scripts/book.py build                    # execute what changed since the last time, then build
python scripts/book.py copy DIR                 # a copy of the book in which notebooks can be executed and kept
python scripts/book.py build --executed DIR     # take the outputs from such a copy

A notebook that fails does not take the site with it: its page says which cell failed, all other pages are as they
should be, and the exit code is 1. Outputs that are older than the code or the cells are never shown: they are made
anew, or those of DIR are refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
import yaml

from pages import execute as executing
from pages import outputs
from pages.execute import Failure

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
# What a notebook can depend on besides its own cells.
CODE = ("src", "scripts", "configs", "slurm", "requirements.txt")
STAMP = "made_from.json"
NOTE = ":::{admonition}"


def fingerprint() -> dict[str, str]:
    """A digest of each file that cells import, read or start, and Python's version."""
    digests = {"Python": platform.python_version()}
    for name in CODE:
        for file in [ROOT / name, *sorted((ROOT / name).rglob("*"))]:
            place = file.relative_to(ROOT).as_posix()
            if file.is_file() and "__pycache__" not in place and ".egg-info" not in place:
                digests[place] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def notebooks() -> list[Path]:
    return sorted((ROOT / "book").glob("*.ipynb"))


# ---- executed notebooks


def link_what_the_book_names(target: Path) -> None:
    """Notebooks and pages reach the rest of the repository as ``../scripts`` and the like."""
    for name in CODE:
        (target / name).symlink_to(ROOT / name)


def copy_book(target: Path) -> None:
    """Copy the book to `target`, to be executed there, with a record of the code it is executed with."""
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__", "_*", "*.md")
    shutil.copytree(ROOT / "book", target / "book", ignore=ignored)
    link_what_the_book_names(target)
    (target / STAMP).write_text(json.dumps(fingerprint(), indent=1))


def changes_since(executed: Path) -> list[str]:
    """What is not now as it was when the notebooks in `executed` were copied: files, or Python."""
    then, now = json.loads((executed / STAMP).read_text()), fingerprint()
    return [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]


def has_our_cells(notebook: Any, ours: Any) -> bool:
    """Whether an executed notebook has the code of ours. Prose may differ, it is taken from ours."""
    code = [
        [(cell.source, "raises-exception" in cell.metadata.get("tags", [])) for cell in executing.code_cells(each)]
        for each in (notebook, ours)
    ]
    return code[0] == code[1]


def objection(executed: Path) -> str:
    """Why no site can be made of the notebooks in `executed`, or ""."""
    if not (executed / STAMP).is_file():
        return "it holds no executed book"
    if changed := changes_since(executed):
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        return f"its outputs are older than {', '.join(changed[:5])}{more}"
    for file, ours in readable().items():
        theirs = read(executed / "book" / file.name)
        if theirs is None:
            return f"it lacks {file.name}"
        if not has_our_cells(theirs, ours):
            return f"the cells of {file.name} have changed since"
        if not executing.is_executed(theirs):
            return f"{file.name} has not been executed"
    return ""


def read(file: Path) -> Any | None:
    """The notebook, or None if the file is missing or is none: after a merge, for example."""
    try:
        return nbformat.read(file, as_version=4)
    except Exception:  # nbformat passes on whatever its parsers raise
        return None


def readable() -> dict[Path, Any]:
    """The notebooks of the book that can be read. Of the others, their pages say so."""
    return {file: notebook for file in notebooks() if (notebook := read(file)) is not None}


def is_done(copy: Path, ours: Any) -> bool:
    """Whether `copy` was executed, as our notebook is now, and did not fail."""
    notebook = read(copy)
    if notebook is None or executing.failed_cell(notebook) is not None:
        return False
    return executing.is_executed(notebook) and has_our_cells(notebook, ours)


def execute(executed: Path, timeout: int) -> None:
    """Execute in `executed` each notebook whose cells, or any code, changed since it ran there without an error."""
    if not (executed / STAMP).is_file() or changes_since(executed):
        copy_book(executed)
    ours = readable()
    due = [file for file, notebook in ours.items() if not is_done(executed / "book" / file.name, notebook)]
    if len(due) < len(ours):
        print(f"{len(ours) - len(due)} of {len(ours)} notebooks and all code are as when they were last executed")
    for number, file in enumerate(due, start=1):
        print(f"[{number}/{len(due)}] {file.stem} ...", end="", flush=True)
        began = time.monotonic()
        copy = executed / "book" / file.name
        shutil.copy(file, copy)
        executing.run(copy, timeout)
        failure = executing.failure(nbformat.read(copy, as_version=4), file.name)
        end = f", stopped in cell [{failure.cell}]" if failure else ""
        print(f" {time.monotonic() - began:.0f} s{end}", flush=True)


# ---- the site


def with_note(notebook: Any, failure: Failure) -> None:
    """Say on the page of a notebook that it failed, and where: below the title, and above the cell."""
    label = f"failed-{failure.notebook.removesuffix('.ipynb').replace('_', '-')}"
    head = notebook.cells[0]
    title, _, rest = head.source.partition("\n")
    where = f"stopped in [cell [{failure.cell}]](#{label})" if failure.cell else "could not be read"
    error = f"```text\n{failure.error}\n```"
    note = f"{NOTE} This page is not complete\n:class: error\nWhen it was made, its notebook {where}:\n\n{error}\n:::"
    head.source = f"{title}\n\n{note}\n{rest}"
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.execution_count == failure.cell > 0:
            text = f"({label})=\n{NOTE} This cell failed\n:class: error\nNothing below it was executed.\n:::"
            notebook.cells.insert(index, nbformat.v4.new_markdown_cell(text))
            return


def take_outputs(ours: Any, executed: Any) -> None:
    """Give our cells, which have none, the outputs of the executed ones."""
    for cell, theirs in zip(executing.code_cells(ours), executing.code_cells(executed), strict=True):
        cell.outputs, cell.execution_count = theirs.outputs, theirs.execution_count
    for key in ("widgets", "language_info"):
        if key in executed.metadata:
            ours.metadata[key] = executed.metadata[key]


def assemble(source: Path, executed: Path) -> list[Failure]:
    """Put into `source` what Jupyter Book builds from; returns the notebooks that failed."""
    shutil.rmtree(source, ignore_errors=True)
    ignored = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__", "*.ipynb")
    shutil.copytree(ROOT / "book", source / "book", ignore=ignored)
    link_what_the_book_names(source)
    shutil.copy(ROOT / "_toc.yml", source)
    config = settings()
    config.setdefault("html", {})["extra_footer"] = f"<p>{made_with()}</p>"
    (source / "_config.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    names = outputs.folders_of_this_machine(ROOT, executed)
    failures, ours = [], readable()
    for file in notebooks():
        if file in ours:
            notebook = ours[file]
            take_outputs(notebook, nbformat.read(executed / "book" / file.name, as_version=4))
            outputs.tidy(notebook, names)
            failure = executing.failure(notebook, file.name)
        else:
            notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {file.stem}")])
            failure = Failure(file.name, 0, "", "it is no notebook in JSON")
        if failure:
            with_note(notebook, failure)
            failures.append(failure)
        nbformat.write(notebook, source / "book" / file.name)
    return failures


def settings() -> Any:
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))


def made_with() -> str:
    """The versions behind the pages, for their footer; without git, or outside of a checkout, no commit."""
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    commit = ""
    if git("rev-parse", "--show-toplevel") == str(ROOT):
        changed = " with changes" if git("status", "--porcelain") else ""
        commit = f" (commit {git('rev-parse', '--short=10', 'HEAD')}{changed})"
    return f"Made with minizero {package}{commit}, Python {platform.python_version()}, torch {version('torch')}."


def git(*command: str) -> str:
    """What git says, or "" where it is missing or refuses."""
    try:
        done = subprocess.run(["git", "-C", ROOT, *command], check=False, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def run_jupyter_book(source: Path) -> int:
    """Build `source` into _build/html. Of what Jupyter Book says, show the warnings, and only those."""
    for name in ("html", ".doctrees"):
        shutil.rmtree(BUILD / name, ignore_errors=True)
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    # -W makes warnings errors, --keep-going lists them all, -n wants a target behind every reference, -q: only warnings
    command = [str(jupyter_book), "build", str(source), "--path-output", str(ROOT), "-W", "--keep-going", "-n", "-q"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        print(*faults(done.stdout, source), sep="\n")
    return done.returncode


def faults(said: str, source: Path) -> list[str]:
    """Jupyter Book's output without its head, its foot and colours; places as they are in the book."""
    lines = [executing.ANSI.sub("", line).replace(f"{source}/", "") for line in said.splitlines() if line.strip()]
    frame = re.compile(r"Running Jupyter-Book|(Source Folder|Config Path|Output Path):|=+$|Building your book, returns")
    # MyST-NB counts lines of the n-th cell from n times 10000
    place = re.compile(r"^(\S+\.ipynb):(\d+)(\d{4}):")
    return [place.sub(r"\1, cell \2 of all, line \3:", line) for line in lines if not frame.match(line)]


def build(executed: Path | None) -> int:
    """Build into _build/html. Returns 0, 1 if a notebook or Jupyter Book failed, 2 if `executed` cannot be used."""
    if executed is None:
        executed = BUILD / "executed"
        execute(executed, settings()["execute"]["timeout"])
    if reason := objection(executed):
        print(f"error: no site can be made from {executed}: {reason}; execute it again", file=sys.stderr)
        return 2
    failures = assemble(BUILD / "source", executed)
    print("building the pages ...", flush=True)
    code = run_jupyter_book(BUILD / "source")
    if (BUILD / "html" / "index.html").is_file():
        print(f"the book is in {BUILD / 'html' / 'index.html'}")
    if failures:
        print(f"{len(failures)} of {len(notebooks())} notebooks failed; their pages say so:")
        print(*failures, sep="\n")
    elif code:
        print("Jupyter Book found the faults above")
    return 1 if failures or code else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the book's site.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build").add_argument("--executed", type=Path, metavar="DIR")
    commands.add_parser("copy").add_argument("target", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.command == "copy":
        copy_book(options.target)
        return 0
    try:
        return build(options.executed and options.executed.resolve())
    except KeyboardInterrupt:
        print(" interrupted; what was executed is kept")
        return 130


if __name__ == "__main__":
    sys.exit(main())
