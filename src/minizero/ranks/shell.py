"""Chapter 00, the kernel of a rank: ipykernel's, but its output is bounded, its errors are short, and nobody types.

`worker.main` starts it. What a cell shows goes through `RankSession`, which keeps it as an `Output` and sends the
notebook, ten times a second at most, where that stands: a rank that prints without end sends no more than one that
prints a little.
"""

from __future__ import annotations

import codecs
import ctypes
import os
import pdb
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from ipykernel.iostream import OutStream
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from jupyter_client.session import Session
from traitlets import Type

from minizero.ranks.errors import ErrorReport, report
from minizero.ranks.output import Output, Shown

_OUTPUT = {"stream", "display_data", "execute_result", "update_display_data", "clear_output"}
_EVERY = 0.1  # seconds between two messages
_CHUNK, _CHUNKS, _MUCH = 1 << 16, 20, 1 << 20  # bytes read of the log at once, how often; too many to keep or read


class RankSession(Session):
    """Sends what a kernel sends, but a cell's output as a "shown" message, which replaces the one before."""

    def __init__(self, log: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.error: ErrorReport | None = None  # why the running cell fails
        self._lock = threading.RLock()
        self._output, self._sent, self._sent_at = Output(), Shown(), 0.0
        self._cell: dict[str, Any] | None = None  # the header of the request that is running
        self._channel: Any = None
        self._running = threading.Event()
        self._log = _Log(log)
        threading.Thread(target=self._send_now_and_then, daemon=True).start()

    def send(
        self, stream: Any, msg_or_type: Any, content: Any = None, parent: Any = None, *what: Any, **how: Any
    ) -> Any:
        """Send a message, unless it is output, which is kept, or for a widget, which no browser can reach."""
        message = msg_or_type if isinstance(msg_or_type, dict) else None
        kind = message["msg_type"] if message else msg_or_type
        content = message["content"] if message else content
        if kind in _OUTPUT:
            self.take(kind, content, message["parent_header"] if message else parent)
            return message
        if kind.startswith("comm_") or kind == "error":
            return message
        if kind == "status":
            self._follow(stream, content["execution_state"], parent)
        elif kind == "execute_reply" and self.error is not None:  # also one that IPython does not count as an error
            content = {**content, "status": "error", "error": asdict(self.error)}
        return super().send(stream, msg_or_type, content, parent, *what, **how)

    def take(self, kind: str, content: dict[str, Any], parent: dict[str, Any]) -> None:
        """Keep a piece of output, unless it is by a thread of an earlier cell."""
        header = parent.get("header", parent)
        with self._lock:
            if self._cell is not None and header.get("msg_id") == self._cell["msg_id"]:
                self._read_log()
                self._output.take(kind, content)

    def _follow(self, channel: Any, state: str, parent: dict[str, Any]) -> None:
        """Begin with a cell, or come to its end."""
        header = (parent or {}).get("header", {})
        if header.get("msg_type") != "execute_request":
            return
        if state == "busy":
            with self._lock:
                self._log.skip()
                self._cell, self._channel, self.error = header, channel, None
                self._output, self._sent = Output(), Shown()
            self._running.set()
        elif state == "idle":
            ctypes.CDLL(None).fflush(None)  # what C code has printed
            self.send_shown()
            self._running.clear()

    def _send_now_and_then(self) -> None:
        while True:
            self._running.wait()
            time.sleep(_EVERY)
            self.send_shown()

    def send_shown(self, after: float = 0.0) -> None:
        """Tell the notebook what the cell shows now, unless that is old news or was told `after` seconds ago."""
        with self._lock:
            if self._cell is None or time.monotonic() < self._sent_at + after:
                return
            self._read_log()
            shown = self._output.shown
            if shown != self._sent:
                content = {"lines": shown.lines} | ({"rich": shown.rich} if shown.rich != self._sent.rich else {})
                super().send(self._channel, "shown", content, {"header": self._cell})
                self._sent, self._sent_at = shown, time.monotonic()

    def _read_log(self) -> None:
        for _ in range(_CHUNKS):
            if text := self._log.read():
                self._output.take("stream", {"text": text})


class _Log:
    """The file that a rank's file descriptors 1 and 2 lead to: what C code and started programs print."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._read = 0

    def skip(self) -> None:
        """Leave out what is there."""
        self._read = os.fstat(self._file).st_size

    def read(self) -> str:
        """What has been added, in pieces; empty if nothing has. Of much, only the end."""
        size = os.fstat(self._file).st_size
        if size <= self._read:
            return ""
        if size - self._read > _MUCH:
            skipped, self._read = size - self._read - _CHUNK, size - _CHUNK
            return f"\n… {skipped:,} bytes left out …\n"
        data = os.pread(self._file, _CHUNK, self._read)
        self._read += len(data)
        if self._read == size > _MUCH:  # all are read, and all append to it
            os.ftruncate(self._file, 0)
            self._read = 0
        return self._decoder.decode(data)


class RankStream(OutStream):
    """`sys.stdout` and `sys.stderr` of a rank."""

    session: RankSession

    def write(self, string: str) -> int:
        """Keep the text as output of the cell."""
        if not isinstance(string, str):
            raise TypeError(f"write() argument must be str, not {type(string).__name__}")
        if os.getpid() == self._master_pid:
            self.session.take("stream", {"text": string}, self.parent_header)
        else:  # a fork: its parent reads this
            os.write(self.fileno(), string.encode(errors="replace"))
        return len(string)

    def flush(self) -> None:
        """Send it soon: at once, unless the notebook has heard from us a moment ago."""
        if os.getpid() == self._master_pid:
            self.session.send_shown(_EVERY / 2)

    def fileno(self) -> int:
        """What a started program can write to."""
        return 1 if self.name == "stdout" else 2


class RankShell(ZMQInteractiveShell):
    """IPython, which leaves the telling of errors to us."""

    def showtraceback(self, exc_tuple: Any = None, *how: Any, **more: Any) -> None:
        """Keep why the cell fails. An error while a value is shown comes with `exc_tuple`, and is raised again."""
        error = (exc_tuple or sys.exc_info())[1]
        if error is None:
            return
        if exc_tuple is not None and _in_cell():
            raise error
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        tell_error(error, self.kernel.session)

    def showsyntaxerror(self, *how: Any, **more: Any) -> None:
        """The same for a cell that cannot be read."""
        self.showtraceback()

    async def run_cell_async(self, *what: Any, **how: Any) -> Any:
        """Run a cell."""
        result = await super().run_cell_async(*what, **how)
        if result.error_in_exec is not None:
            result.error_in_exec = RuntimeError()  # ipykernel asks it for its message, which may raise
        return result


def tell_error(error: BaseException, session: RankSession) -> None:
    """Make `error` the reason why the cell fails. `worker` does not interrupt this."""
    session.error = report(error, f"Cell on rank {os.environ['RANK']}")


def _in_cell() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "run_code":
        frame = frame.f_back
    return frame.f_back is not None


class RankKernel(IPythonKernel):
    """A kernel with our shell."""

    shell_class = Type(RankShell)


def make_app(file: str) -> IPKernelApp:
    """The application, initialized; `file` is the connection file, beside which the log is."""
    app = IPKernelApp.instance(kernel_class=RankKernel, outstream_class=f"{__name__}.RankStream")
    app.capture_fd_output = False
    app.session = RankSession(file.removesuffix(".json") + ".log", parent=app)
    app.initialize(["-f", file, "--HistoryManager.enabled=False"])
    for name in ("raw_input", "getpass"):
        setattr(app.kernel, name, _no_keyboard)
    sys.breakpointhook = pdb.set_trace = _no_keyboard
    for kind in pdb.Pdb.__mro__:  # IPython's debugger and Python's
        if "interaction" in vars(kind):
            kind.interaction = _no_keyboard  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", "To exit: use")  # IPython's hint at sys.exit: it would end the rank
    sys.meta_path.insert(0, _TextBars())
    return app


def _no_keyboard(*what: object, **how: object) -> NoReturn:
    raise RuntimeError(
        "a rank has no keyboard: input(), breakpoint() and pdb cannot ask anything here. Print what you want to "
        "see; or look at variables in the next cell, since they stay after an error; or `pull` values into the notebook"
    )


class _TextBars(MetaPathFinder, Loader):
    """Makes tqdm.notebook, and so tqdm.auto, show bars of text: a rank's widgets would stay at 0 %."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "tqdm.notebook" else None

    def exec_module(self, module: ModuleType) -> None:
        std = import_module("tqdm.std")
        bars = {"tqdm": std.tqdm, "tqdm_notebook": std.tqdm, "trange": std.trange, "tnrange": std.trange}
        vars(module).update(bars, IProgress=std.tqdm, WARN_NOIPYW="")
