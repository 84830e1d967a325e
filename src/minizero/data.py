"""Chapter 31, run and check: real text for every reader, and batches that ranks can share.

One idea: the order of the samples belongs to the run, not to the ranks. All ranks shuffle alike, from the seed and the
epoch, and each takes its slice of every global batch. So no sample is seen twice in an epoch, no rank has a batch more
than another, and runs on 1, 2 and 4 ranks with one global batch size see the same samples in the same steps.

Nothing here communicates. The ranks agree because they compute the same order, so on several machines they must also
hold the same text. `corpus.txt`, which comes with the package, is the same everywhere: 23 modules of Python 3.11's
standard library, 562 kB. Of a text of your own, `Corpus.fingerprint` tells whether two machines hold the same.
"""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CORPUS = Path(__file__).with_name("corpus.txt")  # it comes with the package, its licence beside it


def encode(text: str) -> Tensor:
    """(T,) int64: the bytes of `text` in UTF-8, one token each."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: Tensor) -> str:
    """Text of (T,) byte tokens. Bytes that are not UTF-8 (a model may write them) become U+FFFD."""
    return bytes(tokens.tolist()).decode(errors="replace")


@dataclass(frozen=True)
class Corpus:
    """A text as byte tokens, cut in two.

    Attributes:
        name: where the text came from.
        training: (n,) uint8, the beginning of the text.
        held_out: (m,) uint8, its end: no training window reaches into it.
    """

    name: str
    training: Tensor
    held_out: Tensor

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the text and of where it is cut, in hexadecimal: equal on two machines if both are."""
        digest = hashlib.sha256(str(len(self.training)).encode())
        for part in (self.training, self.held_out):
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()


def load_corpus(path: str | Path | None = None, *, context: int, held_out: float = 0.1) -> Corpus:
    """Read a text and hold out its last part.

    Args:
        path: a text file in any encoding, since tokens are bytes. None: the text that comes with the package.
        context: length T of the sequences to come; each part must give at least one, T + 1 bytes.
        held_out: fraction of the bytes to hold out, between 0 and 1.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError: if `path` cannot be read as a file.
        ValueError: if the file is empty, or a part is too short; the message gives the path and the sizes. Also if
            `held_out` or `context` is out of range.
    """
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out must lie between 0 and 1, got {held_out!r}")
    _check_positive(context=context)
    name, text = (CORPUS.name, CORPUS.read_bytes()) if path is None else (str(path), Path(path).read_bytes())
    if not text:
        raise ValueError(f"{name} is empty: there is nothing to train on")
    tail = int(len(text) * held_out)
    head = len(text) - tail
    if min(head, tail) <= context:
        raise ValueError(
            f"{name} is too short: of its {len(text)} bytes, {head} are for training and {tail} held out, "
            f"and each part needs at least {context + 1} for one sequence of context {context} and its next token"
        )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(name, training=tokens[:head], held_out=tokens[head:])


class Batches:
    """This rank's share of every global batch.

    The stream of n tokens is cut into (n − 1) // T windows: T inputs and, one token further on, T targets. An epoch
    visits the windows in an order drawn from `seed` and the epoch. Step k of it takes the next `world * batch`
    windows, of which rank r gets the r-th run of `batch`. The last, incomplete global batch is dropped: padding it
    would show some windows twice, and a short one would let its windows count more than others. It is a different
    remainder, of fewer than `world * batch` windows, in each epoch.

    Args:
        tokens: (n,) integers of any dtype.
        context: T, tokens per sequence.
        batch: B, sequences per rank and step.
        rank, world: this rank and how many there are.
        seed: the same on every rank.

    Raises:
        ValueError: naming the argument, if one is out of range, or if the tokens do not fill one global batch.
    """

    def __init__(
        self, tokens: Tensor, context: int, batch: int, *, rank: int = 0, world: int = 1, seed: int = 0
    ) -> None:
        _check_positive(context=context, batch=batch, world=world)
        if type(rank) is not int or not 0 <= rank < world:
            raise ValueError(f"rank must be an integer from 0 to world - 1 = {world - 1}, got {rank!r}")
        if tokens.dim() != 1 or tokens.is_floating_point():
            raise ValueError(f"tokens must be one sequence of integers, got {tokens.dtype} {tuple(tokens.shape)}")
        self.windows = max(0, len(tokens) - 1) // context
        if self.windows < world * batch:
            raise ValueError(
                f"{len(tokens)} tokens give {self.windows} sequences of context {context}, "
                f"but one global batch needs {world * batch}: {world} ranks with batch {batch}"
            )
        self.tokens, self.context, self.batch = tokens, context, batch
        self.rank, self.world, self.seed = rank, world, seed
        self._order: tuple[int, Tensor] | None = None  # the latest epoch and its order

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return self.windows // (self.world * self.batch)

    def order(self, epoch: int) -> Tensor:
        """(windows,) int64: the order in which all ranks together visit the windows in this epoch."""
        if self._order is None or self._order[0] != epoch:
            # torch's CPU generator reads 32 bits of its seed only, so mix seed and epoch into those.
            mixed = random.Random(f"{self.seed}, epoch {epoch}").getrandbits(32)
            generator = torch.Generator().manual_seed(mixed)
            self._order = epoch, torch.randperm(self.windows, generator=generator)
        return self._order[1]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (B, T) int64, of a step counted from the start of the run.

        Epochs follow one another: step `len(self)` opens the second. A run that stops and goes on needs to remember
        the step alone.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        epoch, step = divmod(step, len(self))
        first = (step * self.world + self.rank) * self.batch
        chosen = self.order(epoch)[first : first + self.batch]  # (B,)
        positions = chosen[:, None] * self.context + torch.arange(self.context + 1)  # (B, T + 1)
        windows = self.tokens[positions].long()  # (B, T + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
