"""What the command line and the file of --config come to: an Options, or one line that names what is wrong."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from minizero import GPTConfig
from minizero.collectives import LaunchError, Place, find_place
from minizero.config import load_config, load_for_engine
from minizero.config.read import read_json
from minizero.data import Batches, Corpus, load_corpus


@dataclass(frozen=True)
class Options:
    """What a run does. The same on every rank, but for its place and its parts of the text."""

    place: Place  # of this rank
    stage: int
    model: GPTConfig
    batch: int  # sequences per step, over all ranks
    steps: int
    lr: float  # the highest
    warmup: int  # steps until the learning rate is there
    clip: float
    seed: int
    timeout: float  # seconds that a collective may wait
    out: Path
    corpus: Corpus
    training: Batches  # this rank's
    held_out: Batches  # this rank's
    engine: dict[str, Any] | None  # DeepSpeed's keys, of --config
    own_schedule: bool  # the learning rate is ours, not the file's
    save: Path | None
    every: int | None  # steps between checkpoints; None: only at the end
    keep: int
    resume: bool


def parse_options(
    arguments: Sequence[str] | None = None, place: Place | None = None, about: str | None = None
) -> Options:
    """Read the command line; a value that cannot work ends every rank with exit code 2, before any work."""
    try:
        place = place or find_place()
    except LaunchError as wrong:
        sys.stderr.write(f"train.py: error: {wrong}\n")
        sys.exit(2)
    parser = command_line(place.rank, about)
    said = parser.parse_args(arguments)
    try:
        return decide(said, place)
    except (ValueError, OSError) as error:
        parser.error(str(error))


# ---- what is said ------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Ends with one line, which names the rank: the usage would bury it."""

    rank = 0

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"train.py, rank {self.rank}: error: {message}\n")


def positive(number: type) -> Callable[[str], Any]:
    """How argparse is to read a number that must be positive and not infinite."""

    def parse(text: str) -> Any:
        value = number(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    parse.__name__ = number.__name__  # argparse names it when the text is no number at all
    return parse


def command_line(rank: int, about: str | None) -> Parser:
    """All options. What is None if nobody says it depends on others, and `decide` knows how."""
    parser = Parser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.rank = rank
    add, size, real = parser.add_argument, positive(int), positive(float)
    add("--stage", type=int, choices=range(4), help="default 3")
    add("--layers", type=size, default=4, help="transformer blocks, default 4")
    add("--width", type=size, default=192, help="channels, default 192")
    add("--heads", type=size, default=6, help="attention heads, default 6")
    add("--context", type=size, default=64, help="bytes per sequence, default 64")
    add("--tied", action="store_true", help="the output layer shares the token embedding's weight")
    add("--batch", type=size, help="sequences per step, over all ranks; default 32, or what FILE says")
    add("--steps", type=size, default=200, help="default 200")
    add("--lr", type=real, help="highest learning rate, default 1.5e-3, or what FILE says")
    add("--warmup", type=int, help="steps until the learning rate is there, default 10, or as FILE says")
    add("--clip", type=real, help="largest norm of the gradient, default 1.0")
    add("--text", type=Path, help="a text file; default: minizero's corpus.txt")
    add("--seed", type=int, default=0, help="of weights and order, default 0")
    add("--out", type=Path, help="output folder, default runs/stageN")
    add("--config", type=Path, metavar="FILE", help="a DeepSpeed configuration: stage, batch, clip, ...")
    add("--save", type=Path, metavar="FOLDER", help="write checkpoints here (stages 1 to 3)")
    add("--every", type=size, metavar="STEPS", help="between checkpoints; default: only at the end")
    add("--keep", type=size, default=2, help="how many checkpoints stay, default 2")
    add("--resume", action="store_true", help="go on from the last checkpoint in --save, if there is one")
    add("--timeout", type=real, default=300.0, help="seconds a collective may wait, default 300")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher; LOCAL_RANK says it too
    return parser


# ---- what that comes to ------------------------------------------------------------------------------------------


def decide(said: argparse.Namespace, place: Place) -> Options:
    """The run that was asked for. Raises ValueError for what cannot work, alone or together."""
    engine = read_config(said, place.world)
    stage, batch, clip = (3 if said.stage is None else said.stage), said.batch or 32, said.clip or 1.0
    if (said.every or said.resume) and not said.save:
        raise ValueError("--every and --resume need --save FOLDER")
    if said.save and stage == 0:
        raise ValueError("--save is for stages 1 to 3: in stage 0 torch.save on one rank does it")
    model = GPTConfig(256, said.context, said.layers, said.width, said.heads, said.tied)  # a token is a byte
    if batch % place.world:
        raise ValueError(f"--batch must be a multiple of the number of ranks, got {batch} for {place.world} ranks")
    warmup = 10 if said.warmup is None else said.warmup
    if warmup < 0:
        raise ValueError(f"--warmup must not be negative, got {warmup}")
    out = said.out or Path("runs", f"stage{stage}")
    with naming("--out"):
        out.mkdir(parents=True, exist_ok=True)
    with naming("--text"):
        corpus = load_corpus(said.text, context=said.context)

    def mine(tokens: Any) -> Batches:
        size = batch // place.world
        return Batches(tokens, said.context, size, rank=place.rank, world=place.world, seed=said.seed)

    return Options(
        place=place,
        stage=stage,
        model=model,
        batch=batch,
        lr=1.5e-3 if said.lr is None else said.lr,
        warmup=warmup,
        clip=clip,
        out=out,
        corpus=corpus,
        training=mine(corpus.training),
        held_out=mine(corpus.held_out),
        engine=engine,
        own_schedule=engine is None or not any(engine.get(block) for block in ("optimizer", "scheduler")),
        **{name: getattr(said, name) for name in ("steps", "seed", "timeout", "save", "every", "keep", "resume")},
    )


def read_config(said: argparse.Namespace, world: int) -> dict[str, Any] | None:
    """The keys of --config, if there is one; its stage and batch become those that were said."""
    if not said.config:
        return None
    if said.stage is not None or said.clip is not None:
        raise ValueError("--stage and --clip are in the file of --config")
    with naming("--config"):
        engine: dict[str, Any] = read_json(said.config)[1]
    if said.batch:  # as when a run goes on with another number of ranks: the micro-batch stays
        name = "train_micro_batch_size_per_gpu"
        micro = engine.get(name) or load_config(engine, world)[0].batch(world).micro
        engine.pop("gradient_accumulation_steps", None)
        engine |= {"train_batch_size": said.batch, name: micro}
    config, _ = load_for_engine(engine, world)
    said.batch, said.stage = config.batch(world).train, config.zero_optimization.stage
    # an option that the file overrides would say one thing, and the run do another
    for option, blocks in (("lr", ["optimizer"]), ("warmup", ["optimizer", "scheduler"])):
        for block in blocks:
            if getattr(said, option) is not None and engine.get(block) is not None:
                raise ValueError(f'--{option} is in the file of --config, which has "{block}": change it there')
    return engine


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Say of a file that the system refuses which option named it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: {error}") from error
