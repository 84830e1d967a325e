"""Chapter 00, an error as a reader wants it: the own line, the last frame if that is a library's, and the message.

Nothing here depends on Jupyter. File names are those of modules, such as `torch/nn/modules/linear.py`.
"""

from __future__ import annotations

import linecache
import os
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARIES = sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, key=len)
_WIDTH = 100  # columns of a message on a page
_LONGEST = 2_000  # characters of a message
_FRAMES = 6  # of the reader's own code
_LINKS = 3  # of a chain of causes


@dataclass
class ErrorReport:
    """What is told of an exception; everything in it is text."""

    name: str  # of its class
    message: str
    place: str = ""  # the innermost line of the reader's own code, for example "line 3: dist.barrier()"
    traceback: list[str] = field(default_factory=list)  # the frames, without the message


@dataclass
class _Frame:
    file: str
    line: int
    function: str
    text: str = ""  # of the line, if no file has it

    @property
    def in_cell(self) -> bool:
        return f"{os.sep}ipykernel_{os.getpid()}{os.sep}" in self.file

    @property
    def readers(self) -> bool:
        """Whether it is code of the reader: a cell, or a file that is neither a library's nor ours."""
        return self.in_cell or not self.file.startswith((_PACKAGE, *_LIBRARIES, "<"))

    @property
    def code(self) -> str:
        return (self.text or linecache.getline(self.file, self.line)).strip()

    @property
    def place(self) -> str:
        return f"line {self.line}: {self.code}" if self.in_cell else f"{self._name}:{self.line}: {self.code}"

    @property
    def _name(self) -> str:
        for folder in (*reversed(_LIBRARIES), str(Path(_PACKAGE).parent), str(Path.cwd())):
            if self.file.startswith(folder + os.sep):
                return self.file[len(folder) + 1 :]
        return Path(self.file).name

    def show(self, cell: str) -> Iterator[str]:
        """The lines to print; `cell` is what a cell is called."""
        around = 2 if self.in_cell else 0
        function = f", in {self.function}" if self.function != "<module>" else ""
        yield (f"{cell}, line {self.line}" if self.in_cell else f"{self._name}:{self.line}") + function
        for number in range(max(1, self.line - around), self.line + around + 1):
            line = linecache.getline(self.file, number).rstrip() or (self.text if number == self.line else "")
            if number == self.line:
                yield f"{f'> {number}':->7} {line[:_WIDTH]}"
            elif line:
                yield f"{number:>7} {line[:_WIDTH]}"


def report(error: BaseException, cell: str) -> ErrorReport:
    """Tell of an exception and its causes; a cell is called `cell`. It never raises, whatever the exception does."""
    told = ErrorReport(type(error).__name__, message_of(error))
    for link in _causes(error):
        frames = _frames(link)
        own = [frame for frame in frames if frame.readers]
        if link is error:
            told.place = own[-1].place if own else ""
        elif not own and message_of(link) in told.message:
            continue  # the package often says why in the words of its cause
        for lines in _shown(own, frames, cell):
            told.traceback += [*lines, ""]
        if link is not error:
            told.traceback += [*wrapped(f"{type(link).__name__}: {message_of(link)}"), "", "after which:", ""]
    return told


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what led to it, the first cause first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is known for known in chain) and len(chain) < _LINKS:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return reversed(chain)


def _frames(error: BaseException) -> list[_Frame]:
    frames = []
    tb: TracebackType | None = error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        frames.append(_Frame(code.co_filename, tb.tb_lineno, code.co_qualname))
        tb = tb.tb_next
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        frames.append(_Frame(error.filename, error.lineno, "its text", error.text or ""))
    return frames


def _shown(own: list[_Frame], frames: list[_Frame], cell: str) -> Iterator[list[str]]:
    """The reader's frames, of very many the outermost and the innermost, and the last frame of all."""
    half = _FRAMES // 2
    shown = own if len(own) <= _FRAMES else own[:half] + own[-half:]
    for place, frame in enumerate(shown):
        if len(own) > _FRAMES and place == half:
            yield [f"… {len(own) - _FRAMES:,} frames left out …"]
        yield list(frame.show(cell))
    if frames and not frames[-1].readers and not frames[-1].file.startswith("<"):
        yield list(frames[-1].show(cell))


def message_of(error: BaseException) -> str:
    """The message, of a very long one its beginning and its end, also of an exception that cannot tell it."""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)  # its str names a file and a line
        text = "\n".join([text, *getattr(error, "__notes__", [])])
        for part in getattr(error, "exceptions", ())[:_LINKS]:  # of an exception group
            text += f"\n  {type(part).__name__}: {message_of(part)}"
    except BaseException as second:  # an interrupt too: __str__ may hang
        return f"(no message: its __str__ raised {type(second).__name__})"
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 500]}\n… {len(text) - _LONGEST:,} characters left out …\n{text[-500:]}"


def wrapped(text: str) -> list[str]:
    """The lines of `text`, the long ones broken."""
    return [part for line in text.splitlines() for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ") or [""]]
