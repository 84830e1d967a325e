"""How a run ends early: after a signal all ranks stop after the same step, and none outlives the torchrun it is of."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

# after a signal: time to end the step and write the files, half of what torchrun gives before it kills
GRACE_SECONDS = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) / 2


class StopRequest:
    """Inside the context a SIGTERM or Ctrl-C is remembered, so that all ranks can end after the same step.

    Python calls a handler between two of its own instructions only, and a rank may be deep in a collective whose peer
    is gone. So the signal's number goes into a pipe, which a thread reads: the process ends even if its step does not.
    """

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer)
        threading.Thread(target=self._watch, args=[reader], daemon=True).start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.signal:
            return  # it may come again, from Slurm and from torchrun: this process ends by itself
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self._writer)

    def _watch(self, reader: int) -> None:
        number = os.read(reader, 1)
        if number:
            self.signal = number[0]
            time.sleep(GRACE_SECONDS)
            os._exit(128 + self.signal)
        os.close(reader)


def die_with_torchrun() -> None:
    """On Linux, let this rank be killed when the torchrun that started it is: that has no time to end its ranks then.

    They would train on, hold their GPUs, and write where the next run writes. A parent of another kind may well end
    first: who starts one rank from a shell, and leaves, wants it to go on.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
