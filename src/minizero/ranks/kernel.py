"""Chapter 00, one rank as the notebook sees it: a kernel process, the sockets to it, and what it has said.

`group` makes a group of these; `worker` is what runs inside the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from IPython.display import DisplayHandle, display
from jupyter_client.connect import write_connection_file
from jupyter_client.session import Session

from minizero.ranks.output import Screen, Shown

# how torch.distributed says that a peer has gone
_PEER_GONE = re.compile(r"Connection (was likely )?(closed|reset|refused)|Broken pipe|NCCL communicator was aborted")
_WAIT_FOR_CAUSE = 3.0  # seconds
_LAST_WORDS = 20  # lines of what a process wrote before it died
_BROWSER = 50_000  # characters a second that a running cell may send to the browser


@dataclass
class Failure:
    """Why a cell did not end well on one rank."""

    rank: int
    name: str  # of the exception's class, or "Died"
    message: str
    when: float  # seconds since the epoch, by the rank's own clock
    place: str = ""  # the innermost line of the reader's own code
    traceback: list[str] = field(default_factory=list)  # lines to show, without the message

    @property
    def follows(self) -> bool:
        """Whether this came of another rank's failure (or of an interrupt), and is not the cause."""
        return self.name == "KeyboardInterrupt" or bool(_PEER_GONE.search(self.message))

    @property
    def urgent(self) -> bool:
        """Whether to stop the other ranks now. What seems to follow from something waits a moment for its cause."""
        return not self.follows or time.time() > self.when + _WAIT_FOR_CAUSE

    def like(self, other: Failure) -> bool:
        """Whether both are the same error."""
        return self.words == other.words

    @property
    def words(self) -> str:
        """Name and message, without the rank's own number, with which many a message begins."""
        message = self.message.removeprefix(f"rank {self.rank} ")
        return f"{self.name}: {message}" if message else self.name

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.words}"


class LiveText:
    """Text below a cell that changes while the cell runs. What it shows last is what stays."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._shown, self._next_update = "", 0.0

    def show(self, text: str, final: bool = False) -> None:
        """Show `text` instead, unless the last update was a moment ago and this one is not final."""
        if text == self._shown or (time.monotonic() < self._next_update and not final):
            return
        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)
        self._shown, self._next_update = text, time.monotonic() + 0.2 + len(text) / _BROWSER


class Rank:
    """One rank: its process, and the state of the last request to it. One thread at a time may use it."""

    def __init__(self, rank: int, world: int, folder: str, context: zmq.Context[Any]) -> None:
        self.rank = rank
        self.output = Shown()
        self.failure: Failure | None = None
        self._request = ""
        self._missing: set[str] = set()  # what the request still lacks: "reply", "idle"
        address, key = f"{folder}/{rank}", secrets.token_hex().encode()
        file, info = write_connection_file(f"{address}.json", transport="ipc", ip=address, key=key)
        self._session = Session(key=key)
        self._shell, self._iopub = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        self._iopub.subscribe(b"")
        self._shell.connect(f"ipc://{address}-{info['shell_port']}")
        self._iopub.connect(f"ipc://{address}-{info['iopub_port']}")
        self.sockets = (self._iopub, self._shell)
        self._log = Path(f"{address}.log")
        self._heard = 0  # bytes of the log that are older than the request
        with self._log.open("ab") as log:  # to append, as the rank cuts it off when it is long
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from minizero.ranks.worker import main; main()", file],
                env=os.environ | torchrun_environment(rank, world) | {"IPYTHONDIR": f"{folder}/ipython"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                bufsize=0,
                start_new_session=True,  # the notebook's interrupts are for the notebook to pass on
            )

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self.process.poll() is None

    @property
    def busy(self) -> bool:
        """Whether the last request is not answered yet."""
        return bool(self._missing)

    def answers(self) -> bool:
        """Ask for a sign of life, wait for it briefly, and tell whether it came."""
        self._session.send(self._shell, "kernel_info_request", {})
        return bool(self._iopub.poll(200))

    def start(self, code: str, silent: bool = False) -> None:
        """Send code to the kernel; `receive` brings what comes of it."""
        content = {"code": code, "silent": silent, "store_history": False, "user_expressions": {}}
        content |= {"allow_stdin": False, "stop_on_error": False}
        message = self._session.msg("execute_request", content)
        self._heard = self._log.stat().st_size
        self._session.send(self._shell, message)
        self._request = message["header"]["msg_id"]
        self._missing, self.failure, self.output = {"reply", "idle"}, None, Shown()

    def receive(self) -> None:
        """Take in the messages that are there, and notice a process that has ended."""
        ended = not self.alive
        for channel in self.sockets:  # not endless: a rank sends ten messages a second at most
            while (message := self._session.recv(channel, zmq.NOBLOCK)[1]) is not None:
                if message["parent_header"].get("msg_id") == self._request:  # not one of an earlier cell's threads
                    self._take(message["header"], message["content"])
        if ended and self.busy:
            self._missing.clear()
            self.failure = Failure(self.rank, "Died", self.last_words, time.time())

    def _take(self, header: dict[str, Any], content: dict[str, Any]) -> None:
        kind = header["msg_type"]
        if kind == "execute_reply":
            self._missing.discard("reply")
            if content["status"] != "ok":
                told = content.get("error") or {"name": content["ename"], "message": content["evalue"]}
                self.failure = Failure(self.rank, when=header["date"].timestamp(), **told)
        elif kind == "status" and content["execution_state"] == "idle":
            self._missing.discard("idle")
        elif kind == "shown":
            self.output = Shown(content["lines"], content.get("rich", self.output.rich))

    @property
    def last_words(self) -> str:
        """How the process ended, and the end of what it wrote and did not show."""
        code = self.process.returncode
        if code is None:
            how = "does not answer"
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        with self._log.open("rb") as file:
            file.seek(self._heard if self._heard <= file.seek(0, os.SEEK_END) else 0)
            log = Screen(file.read(1 << 20).decode(errors="replace")).lines[-_LAST_WORDS:]
        return "\n".join([f"the process {how}", *(line for line in log if line not in self.output.lines)])

    def command(self, word: str) -> None:
        """Tell the thread beside the cell to "disconnect" or to "interrupt" (see worker)."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n".encode())

    def kill(self) -> None:
        """End the process and what it has started."""
        assert self.process.stdin is not None
        if self.alive:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()


def torchrun_environment(rank: int, world: int) -> dict[str, str]:
    """The variables that torchrun sets for one of `world` ranks on one machine, and what keeps them on it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # no C++ stacks for a broken connection
        "JPY_PARENT_PID": str(os.getpid()),
    }
