"""Outputs as a page shows them: expected errors in a few lines, files named as everybody has them.

A traceback of an expected error (a cell with the tag `raises-exception`) keeps the frames of the reader's cells, the
last frame and the message. No output names a folder of the machine that executed the notebooks.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

from pages.execute import ANSI

FRAME = re.compile(r"(Cell|File) ")
CHAIN = re.compile("(was the direct cause of the following exception|another exception occurred):")
ARROW = re.compile(r"-+> *\d+ ")


def trimmed(traceback: list[str]) -> list[str]:
    """A traceback as IPython makes it, one item a frame, without the frames between the reader's line and the last.

    Nor with the exceptions that led to this one.
    """
    chained = [index for index, item in enumerate(traceback) if CHAIN.search(item)]
    traceback = traceback[chained[-1] + 1 :] if chained else traceback
    kept = []
    for kind, group in groupby(traceback, key=kind_of):
        items = list(group)
        if kind == "File":  # what comes next, if not the message, is a cell again
            following = traceback[traceback.index(items[-1]) + 1 :]
            last = items.pop() if not following or kind_of(following[0]) != "Cell" else None
            if items:
                kept.append(f"   (... {len(items)} more frame{'s' * (len(items) > 1)} ...)\n")
            if last:
                kept.append(up_to_arrow(last, 0))
        elif kind == "Cell":
            kept += [up_to_arrow(item, 2) for item in items]
        elif kind != "head":  # the class, which the message repeats, and a rule above it
            kept += items
    return kept


def kind_of(item: str) -> str:
    """What an item of a traceback is: a frame in a "Cell" or a "File", the "head", or else a message: ""."""
    text = ANSI.sub("", item)
    if re.fullmatch(r"-+|\S+ +Traceback \(most recent call last\)", text):
        return "head"
    found = FRAME.match(text)
    return found[1] if found else ""


def up_to_arrow(frame: str, lines: int) -> str:
    """The frame with as many lines of code before the one that was running, and none after it."""
    head, *code = frame.rstrip("\n").split("\n")
    arrow = next((i for i, line in enumerate(code) if ARROW.match(ANSI.sub("", line))), 0)
    return "\n".join([head, *code[max(0, arrow - lines) : arrow + 1], ""])


def folders_of_this_machine(root: Path, executed: Path) -> dict[str, str]:
    """Names for the folders of this machine, longest path first. The book in `root` was executed in `executed`."""
    home = str(Path.home())
    paths = sysconfig.get_paths()
    ours: list[str | Path] = [executed, root / "src", root, *(paths[name] for name in ("purelib", "platlib", "stdlib"))]
    if sys.prefix != sys.base_prefix:  # a virtual environment; /usr is the same everywhere
        ours.append(sys.prefix)
    names = {str(folder): "" for folder in ours} | {str(Path(folder).resolve()): "" for folder in ours}
    # IPython writes ~ for the home folder
    names |= {f"~{folder.removeprefix(home)}": "" for folder in names if folder.startswith(f"{home}/")}
    names |= {home: "~"}
    return {folder: names[folder] for folder in sorted(names, key=len, reverse=True) if folder != "/"}


def without_folders(text: str, names: dict[str, str]) -> str:
    """The text with `names` of `folders_of_this_machine`, and without those of temporary files."""
    for folder, name in names.items():
        text = text.replace(f"{folder}/", f"{name}/" if name else "")
        text = re.sub(rf"{re.escape(folder)}(?![\w/-])", name or ".", text)
    temporary = re.escape(tempfile.gettempdir())
    text = re.sub(rf"{temporary}/ipykernel_\d+/\d+\.py", "cell", text)
    return re.sub(rf"{temporary}/tmp[a-z0-9_]{{8}}(?!\w)", "/tmp/…", text)


def tidy(notebook: Any, names: dict[str, str]) -> None:
    """Change the outputs of an executed notebook as the module says."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                expected = "raises-exception" in cell.metadata.get("tags", [])
                lines = trimmed(output.traceback) if expected else output.traceback
                output.traceback = [without_folders(line, names) for line in lines]
                output.evalue = without_folders(output.evalue, names)
            elif output.output_type == "stream":
                output.text = without_folders(output.text, names)
            else:
                for mime, data in output.data.items():
                    if mime.startswith(("text/", "image/svg")):  # not in the letters of a PNG
                        output.data[mime] = without_folders(data, names)
