"""Keep the notebooks' copies of package source equal to the package.

A code cell tagged ``minizero: memory.padding`` holds exactly the source of ``padding`` from src/minizero/memory.py, and
one tagged ``minizero: sharding.Layout`` that of ``Layout``, from whichever file of the package src/minizero/sharding
defines it (``minizero: sharding.flat.Layout`` names the file). A method is ``minizero: sharding.Layout.slices``. A cell
magic on the first line (``%%ranks --local``) stays in front.

    python scripts/sync.py            # refresh the cells in place
    python scripts/sync.py --check    # list the cells that differ; exit code 1 if there is one
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "minizero:"


class SyncError(Exception):
    """A tag that names nothing; the message names notebook, cell and tag."""


def find(tree: ast.AST, names: list[str]) -> ast.stmt | None:
    """The class, function or assignment that `names` leads to, one level of nesting per name."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt):
            continue
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if names[0] in [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]:
            return find(node, names[1:]) if names[1:] else node
    return None


def files_of(module: str, names: list[str], package: Path) -> tuple[list[Path], list[str]]:
    """The files in which to look, and what to look for in them, when a tag says `module` and then `names`."""
    room = package / module
    if not room.is_dir():
        return [package / f"{module}.py"], names
    if names and (file := room / f"{names[0]}.py").is_file():
        return [file], names[1:]
    return sorted(room.glob("*.py")), names


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def source_of(path: str, package: Path) -> str:
    """Source text of ``module.Object`` or ``module.Object.method``, decorators included, without its indentation."""
    module, *names = path.split(".")
    files, names = files_of(module, names, package)
    if not files[0].is_file():
        raise LookupError(f"there is no module {files[0].name} in {package}")
    if not names:
        raise LookupError(f"{path} is a module, not an object: write module.Object")
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    found = {file: node for file, text in texts.items() if (node := find(parsed(text), names))}
    if not found:
        raise LookupError(f"{files[0].name if len(files) == 1 else module + '/'} defines no {'.'.join(names)}")
    if len(found) > 1:
        either = " or ".join(f"{module}.{file.stem}.{'.'.join(names)}" for file in found)
        raise LookupError(f"{len(found)} files of {module}/ define {names[0]}: write {either}")
    ((file, node),) = found.items()
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return textwrap.dedent("\n".join(texts[file].splitlines()[first - 1 : node.end_lineno]))


def tagged_cells(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every cell that carries a tag of ours, with the path that the tag names."""
    for cell in notebook["cells"]:
        for tag in cell["metadata"].get("tags", []):
            if tag.startswith(PREFIX):
                yield cell, tag.removeprefix(PREFIX).strip()


def wanted_source(cell: dict[str, Any], path: str, package: Path) -> str:
    text = "".join(cell["source"])
    magic = text.splitlines()[0] + "\n" if text.startswith("%%") else ""
    return magic + source_of(path, package)


def sync(file: Path, package: Path, check: bool) -> list[str]:
    """Refresh one notebook (not with `check`); returns a line for every cell that differed."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    differing = []
    for cell, path in tagged_cells(notebook):
        try:
            wanted = wanted_source(cell, path, package)
        except LookupError as error:
            raise SyncError(f"{file.name}, cell {cell['id']}, tag 'minizero: {path}': {error}") from None
        if "".join(cell["source"]) != wanted:
            cell["source"] = wanted.splitlines(keepends=True)
            differing.append(f"{file.name}, cell {cell['id']}: {path}")
    if differing and not check:
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return differing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Copy source from the package into the notebook cells that show it.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: book/*.ipynb")
    parser.add_argument("--package", type=Path, default=ROOT / "src" / "minizero")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a cell differs")
    options = parser.parse_args(arguments)
    try:
        notebooks = options.notebooks or sorted((ROOT / "book").glob("*.ipynb"))
        differing = [line for file in notebooks for line in sync(file, options.package, options.check)]
    except SyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in differing:
        print(("differs from the package: " if options.check else "refreshed: ") + line)
    if options.check and differing:
        print("run `make sync`, or change the package instead", file=sys.stderr)
    return int(options.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
