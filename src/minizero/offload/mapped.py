"""Chapter 24, offload: tensors that live in a file.

A mapped file is memory whose pages come from the file when they are touched, and go back to it when the kernel or
`release()` says so. To PyTorch it is memory like any other.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

HEADER = b"minizero offload, made anew by every run\n"  # at the beginning of each file, on a page of its own
ALIGNMENT = 64  # bytes: where a tensor may begin


def room_for(numel: int, dtype: torch.dtype) -> int:
    """Bytes that a tensor takes in a MappedFile."""
    return -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class MappedFile:
    """A file of this process alone, mapped into memory, from which tensors are cut.

    All of it is allocated on the disk at once, so that a full disk is an error now, not a SIGBUS in the middle of a
    step. A file at `path` that a killed run left behind is replaced. The file is removed by `close()`, or when nobody
    holds this object any more, or at the end of the process.

    Args:
        path: the file; folders above it are made.
        nbytes: the sum of `room_for` of the tensors to come.

    Raises OSError naming the file if there is no room, if another process has it open, or if it is somebody else's.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes, self._next = path, mmap.PAGESIZE + nbytes, mmap.PAGESIZE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _claim(self._fd, path)
        except OSError:
            os.close(self._fd)
            raise
        self._remove = weakref.finalize(self, _remove, self._fd, path, os.getpid())
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            self.close()
            free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
            reason = f"cannot allocate {self.nbytes:,} bytes, {free:,} are free: {error.strerror}"
            raise OSError(error.errno, reason, str(path)) from None
        self._map = mmap.mmap(self._fd, self.nbytes)

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next `numel` elements of the file, zeros at first, 1-D. Like any tensor it keeps its memory alive."""
        start, self._next = self._next, self._next + room_for(numel, dtype)
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=start)

    def release(self) -> None:
        """Let go of the pages in memory. The kernel brings the written pages to the disk; nothing is lost."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def check(self) -> None:
        """Raise OSError naming the file if it was removed, replaced or cut: to touch it could kill the process."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.path} was removed while the training needed it") from None
        if not os.path.samestat(status, os.fstat(self._fd)):
            raise FileExistsError(f"{self.path} was replaced by another file while the training needed it")
        if status.st_size < self.nbytes:
            raise OSError(f"{self.path} was cut to {status.st_size:,} of its {self.nbytes:,} bytes")

    def close(self) -> None:
        """Remove the file. Tensors cut from it stay valid; the disk has its room back when the last one is gone."""
        self._remove()


def _claim(fd: int, path: Path) -> None:
    """Lock the file and empty it, if it is ours to empty."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it when the process ends
    except BlockingIOError as error:
        reason = "another run offloads here, or an optimizer that was not closed; give each its own directory"
        raise OSError(error.errno, reason, str(path)) from None
    if os.fstat(fd).st_size > 0 and os.pread(fd, len(HEADER), 0) != HEADER:
        raise FileExistsError(f"{path} is not an offload file of minizero; it was left as it is")
    os.ftruncate(fd, 0)
    os.pwrite(fd, HEADER, 0)


def _remove(fd: int, path: Path, owner: int) -> None:
    with suppress(OSError):
        if os.getpid() == owner and os.path.samestat(os.stat(path), os.fstat(fd)):
            path.unlink()
    os.close(fd)
