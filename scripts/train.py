"""Train a GPT on real text with stage 0, 1, 2 or 3, on as many ranks as the launcher starts.

    torchrun --nproc_per_node 4 scripts/train.py --stage 3 --steps 60
    deepspeed --num_gpus 8 scripts/train.py --stage 3
    python scripts/train.py --stage 0                                       # one rank

All stages, and all numbers of ranks that divide the batch, see the same sequences in the same steps and give the same
losses up to rounding. Rank 0 shows the progress and writes loss.csv and loss.svg into the output folder.

With --config, the stage, the batch, accumulation, precision, clipping, offloading and, if it names them, the optimizer
and the schedule are those of a DeepSpeed file:

    torchrun --nproc_per_node 4 scripts/train.py --config configs/article.json

With --save, checkpoints are written in the background; the same command with --resume goes on from the last one,
also with another number of ranks or in another stage, and along the schedule that the run began with:

    torchrun --nproc_per_node 4 scripts/train.py --save runs/checkpoints --every 20
    torchrun --nproc_per_node 2 scripts/train.py --save runs/checkpoints --every 20 --resume

After a SIGTERM all ranks end after the same step, save, and exit with 0; after Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import matplotlib
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from tqdm import tqdm

import minizero
from minizero import GPT, GPTConfig, checkpoint
from minizero.checkpoint import AsyncSaver
from minizero.collectives import LaunchError, find_place
from minizero.config import load_config, load_for_engine
from minizero.config.read import read_json
from minizero.data import Batches, Corpus, decode, load_corpus
from minizero.engine import Engine

try:
    RANK, WORLD = find_place()[:2]
except LaunchError as wrong:
    sys.stderr.write(f"train.py: error: {wrong}\n")
    sys.exit(2)
HELD_OUT_BATCHES = 8  # the held-out loss is over at most so many global batches, the same ones before and after
SAMPLE_BYTES, PROMPT_BYTES = 300, 48
# after a signal: time to end the step and write the files, half of what torchrun gives before it kills
GRACE_SECONDS = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)) / 2


# ---- what to do --------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"train.py, rank {RANK}: error: {message}\n")  # one line: the usage would bury it


def positive(number: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = number(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    parse.__name__ = number.__name__  # argparse names it when the text is no number at all
    return parse


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a value that cannot work ends every rank with exit code 2, before any work."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    size, real = positive(int), positive(float)
    parser.add_argument("--stage", type=int, choices=range(4), help="default 3")
    parser.add_argument("--layers", type=size, default=4, help="transformer blocks, default 4")
    parser.add_argument("--width", type=size, default=192, help="channels, default 192")
    parser.add_argument("--heads", type=size, default=6, help="attention heads, default 6")
    parser.add_argument("--context", type=size, default=64, help="bytes per sequence, default 64")
    parser.add_argument("--tied", action="store_true", help="the output layer shares the token embedding's weight")
    parser.add_argument("--batch", type=size, help="sequences per step, over all ranks; default 32, or what FILE says")
    parser.add_argument("--steps", type=size, default=200, help="default 200")
    parser.add_argument("--lr", type=real, help="highest learning rate, default 1.5e-3, or what FILE says")
    parser.add_argument(
        "--warmup", type=int, help="steps until the learning rate is there, default 10, or as FILE says"
    )
    parser.add_argument("--clip", type=real, help="largest norm of the gradient, default 1.0")
    parser.add_argument("--text", type=Path, help="a text file; default: minizero's corpus.txt")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order, default 0")
    parser.add_argument("--out", type=Path, help="output folder, default runs/stageN")
    add_files(parser)
    parser.add_argument("--timeout", type=real, default=300.0, help="seconds a collective may wait, default 300")
    parser.add_argument(
        "--local_rank", type=int, help=argparse.SUPPRESS
    )  # deepspeed's launcher; LOCAL_RANK says it too
    options = parser.parse_args(arguments)
    try:
        read_files(options)
        options.horizon = options.steps  # of the learning rate; a run that is resumed keeps its own
        options.out = options.out or Path("runs", f"stage{options.stage}")
        options.config_of_model = GPTConfig(
            256, options.context, options.layers, options.width, options.heads, options.tied
        )  # a token is a byte
        if options.batch % WORLD:
            raise ValueError(
                f"--batch must be a multiple of the number of ranks, got {options.batch} for {WORLD} ranks"
            )
        options.lr = 1.5e-3 if options.lr is None else options.lr
        options.warmup = 10 if options.warmup is None else options.warmup
        if options.warmup < 0:
            raise ValueError(f"--warmup must not be negative, got {options.warmup}")
        options.out.mkdir(parents=True, exist_ok=True)
        options.corpus = load_corpus(options.text, context=options.context)
        batch, place = options.batch // WORLD, {"rank": RANK, "world": WORLD, "seed": options.seed}
        options.training = Batches(options.corpus.training, options.context, batch, **place)
        options.held_out = Batches(options.corpus.held_out, options.context, batch, **place)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options


def read_files(options: argparse.Namespace) -> None:
    """What --config, --batch and --save come to; raises ValueError for a file or a combination that cannot work."""
    options.engine = None
    if options.config:
        if options.stage is not None or options.clip is not None:
            raise ValueError("--stage and --clip are in the file of --config")
        _, options.engine = read_json(options.config)
        if options.batch:  # as when a run goes on with another number of ranks: the micro-batch stays
            name = "train_micro_batch_size_per_gpu"
            micro = options.engine.get(name) or load_config(options.engine, WORLD)[0].batch(WORLD).micro
            options.engine.pop("gradient_accumulation_steps", None)
            options.engine |= {"train_batch_size": options.batch, name: micro}
        config, _ = load_for_engine(options.engine, WORLD)
        options.batch, options.stage = config.batch(WORLD).train, config.zero_optimization.stage
        refuse_what_the_file_says(options)
    options.own_schedule = options.engine is None or not any(
        options.engine.get(block) for block in ("optimizer", "scheduler")
    )
    options.stage = 3 if options.stage is None else options.stage
    options.batch, options.clip = options.batch or 32, options.clip or 1.0
    if (options.every or options.resume) and not options.save:
        raise ValueError("--every and --resume need --save FOLDER")
    if options.save and options.stage == 0:
        raise ValueError("--save is for stages 1 to 3: in stage 0 torch.save on one rank does it")


def refuse_what_the_file_says(options: argparse.Namespace) -> None:
    """An option that the file overrides would say one thing, and the run do another."""
    for option, blocks in (("lr", ["optimizer"]), ("warmup", ["optimizer", "scheduler"])):
        for block in blocks:
            if getattr(options, option) is not None and options.engine.get(block) is not None:
                raise ValueError(f'--{option} is in the file of --config, which has "{block}": change it there')


def add_files(parser: argparse.ArgumentParser) -> None:
    """The options of configurations and checkpoints."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a DeepSpeed configuration: stage, batch, clip, ..."
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write checkpoints here (stages 1 to 3)")
    parser.add_argument(
        "--every", type=positive(int), metavar="STEPS", help="between checkpoints; default: only at the end"
    )
    parser.add_argument("--keep", type=positive(int), default=2, help="how many checkpoints stay, default 2")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --save, if there is one"
    )


def check_same_text(corpus: Corpus) -> None:
    """On several machines the text can differ: then every rank raises ValueError."""
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, corpus.fingerprint)
    if len(set(everyone)) > 1:
        ranks = [rank for rank, fingerprint in enumerate(everyone) if fingerprint != everyone[0]]
        raise ValueError(f"{corpus.name} is another text on ranks {ranks} than on rank 0: give one file with --text")


# ---- the model over the ranks --------------------------------------------------------------------------------------


@dataclass
class Trainee:
    model: GPT
    optimizer: torch.optim.Optimizer
    update: Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]  # a step on a batch: this rank's loss, the norm
    whole: Callable[[], AbstractContextManager[None]]  # inside, this rank has all parameters
    zero: minizero.Zero | None = None  # None in stage 0
    engine: Engine | None = None  # only with --config


def distribute(options: argparse.Namespace, device: torch.device) -> Trainee:
    """The same weights in every stage: drawn from the seed in one order."""
    torch.manual_seed(options.seed)
    if options.engine is not None:
        return engine_for(options)
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    zero = None
    if options.stage == 0:
        with device:
            model = GPT(options.config_of_model)
        minizero.Replicated(model)
        clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), error_if_nonfinite=True)
        optimizer: torch.optim.Optimizer = minizero.AdamW(model.parameters(), lr=options.lr)
    else:
        with torch.device("meta"):  # shapes without memory: Zero fills one block after the other, and keeps its shard
            model = GPT(options.config_of_model)
        zero = minizero.Zero(model, units=model.blocks, stage=options.stage)
        optimizer = zero.optimizer(minizero.AdamW, lr=options.lr)
        clip, whole = zero.clip_grad_norm, zero.gathered

    def update(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        loss = model(x, y)
        loss.backward()
        norm = float(clip(options.clip))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm

    return Trainee(model, optimizer, update, whole, zero)


def engine_for(options: argparse.Namespace) -> Trainee:
    """The model and optimizer that --config makes of it; a step is as many backwards as the file says."""
    with torch.device("meta"):
        model = GPT(options.config_of_model)
    given = None if options.engine.get("optimizer") else partial(minizero.AdamW, lr=options.lr)
    engine, optimizer, _, _ = minizero.initialize(model=model, optimizer=given, config=options.engine)

    def update(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        losses = []
        for some_x, some_y in zip(x.split(engine.batch.micro), y.split(engine.batch.micro), strict=True):
            loss = engine(some_x, some_y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norm = engine.get_global_grad_norm()
        return sum(losses) / len(losses), math.nan if norm is None else norm

    return Trainee(model, optimizer, update, engine.zero.gathered, engine.zero, engine)


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """The mean of each value over the ranks, on all ranks."""
    means = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(means)
    return (means / WORLD).tolist()


@torch.no_grad()
def held_out_loss(trainee: Trainee, batches: Batches, device: torch.device) -> float:
    """Nats per byte. All ranks run equally many forwards: in stage 3 each gathers."""
    steps = min(len(batches), HELD_OUT_BATCHES)
    losses = [trainee.model(*(t.to(device) for t in batches.at(step))).item() for step in range(steps)]
    return over_ranks([sum(losses) / steps], device)[0]


def sample(trainee: Trainee, prompt: torch.Tensor, seed: int, device: torch.device) -> str:
    """Rank 0 continues the prompt; the others wait where `whole()` ends."""
    generator, text = torch.Generator(device).manual_seed(seed), ""
    with trainee.whole():
        if RANK == 0:
            tokens = trainee.model.generate(prompt[None].long().to(device), SAMPLE_BYTES, 0.8, generator)
            text = decode(tokens[0, len(prompt) :])
    return text


# ---- training ------------------------------------------------------------------------------------------------------


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


class Checkpoints:
    """What --save, --every, --keep and --resume do; nothing without --save."""

    def __init__(self, trainee: Trainee, options: argparse.Namespace) -> None:
        self.trainee, self.options, self.saved = trainee, options, 0
        self.saver = AsyncSaver(options.save, options.keep) if options.save else None
        names = ("batch", "context", "seed", *(("lr", "warmup") if options.own_schedule else ()))
        self.run = {name: getattr(options, name) for name in names} | {"text": options.corpus.fingerprint}

    def resume(self) -> dict[str, list[float]]:
        """The losses so far: of each step, and on the held-out text. Raises ValueError for another run's checkpoint."""
        empty: dict[str, list[float]] = {"losses": [], "held_out": []}
        if not self.options.resume:
            return empty
        if not checkpoint.exists(self.options.save, self.trainee.zero):
            say(f"no checkpoint in {self.options.save}: starting from the beginning")
            return empty
        loaded = checkpoint.load(self.options.save, self.trainee.zero, self.trainee.optimizer)
        for name, value in self.run.items():
            if loaded.extra["run"].get(name, value) != value:
                raise ValueError(f"{loaded.tag} is of a run with another {name}: this would not be the rest of it")
        self.options.horizon = loaded.extra.get("horizon", self.options.steps)
        if self.options.own_schedule and self.options.horizon != self.options.steps:
            say(
                f"the learning rate goes on along the schedule that the run began with, which ends at step "
                f"{self.options.horizon}, not at --steps {self.options.steps}"
            )
        if self.trainee.engine:
            self.trainee.engine.load_run_state(loaded.extra["engine"])
        self.saved = loaded.step
        say(f"resumed after step {loaded.step}")
        return loaded.extra["losses"]

    def save(self, losses: dict[str, list[float]], is_last: bool = False) -> None:
        """After a step: begin to write a checkpoint if it is time, and wait for the end of it if that was the last."""
        step, every = len(losses["losses"]), self.options.every or math.inf
        if self.saver and (is_last or step % every == 0) and step > self.saved:
            extra = {"run": self.run, "losses": losses, "horizon": self.options.horizon}
            extra["engine"] = self.trainee.engine.run_state() if self.trainee.engine else None
            tag = f"step-{step:06}"
            self.saver.save(tag, self.trainee.zero, self.trainee.optimizer, step=step, extra=extra)
            self.saved = step
        if self.saver and is_last:
            self.saver.wait()


class Log:
    """On rank 0: a progress bar, and a row for each step in `file`, written at once; nothing on other ranks."""

    columns = ("step", "loss", "gradient_norm", "learning_rate", "tokens_per_second", "peak_memory_mib")

    def __init__(self, file: Path, steps: int, losses: list[float]) -> None:
        self.losses = losses
        self._bar = tqdm(total=steps, initial=len(losses), unit="step", disable=RANK != 0)
        rows = file.read_text().splitlines()[1 : len(losses) + 1] if RANK == 0 and losses and file.exists() else []
        self._file = file.open("w", newline="") if RANK == 0 else None
        if self._file:
            self._file.write("\r\n".join([",".join(self.columns), *rows, ""]))

    def add(self, loss: float, norm: float, lr: float, speed: float, memory: float) -> None:
        self.losses.append(loss)
        self._bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, peak {memory:,.0f} MiB", refresh=False)
        self._bar.update()
        if self._file:
            csv.writer(self._file).writerow([len(self.losses), loss, norm, lr, round(speed), round(memory, 1)])
            self._file.flush()

    def close(self) -> None:
        self._bar.close()
        if self._file:
            self._file.close()


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rises over the warm-up, then falls along a cosine to a tenth, at the step that the run began with as its last."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    progress = min(1.0, (step - options.warmup) / max(1, options.horizon - options.warmup))
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def peak_mib(device: torch.device) -> float:
    """This rank's highest memory so far: what CUDA's allocator gave out, or all of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def train(
    trainee: Trainee,
    options: argparse.Namespace,
    device: torch.device,
    log: Log,
    after_step: Callable[[], None],
    stop: StopRequest,
) -> int:
    """All steps that are left, or fewer if a signal comes to any rank; returns the signal, or 0."""
    for step in range(len(log.losses), options.steps):
        start = time.perf_counter()
        if options.own_schedule:
            for group in trainee.optimizer.param_groups:
                group["lr"] = learning_rate(step, options)
        lr = trainee.optimizer.param_groups[0]["lr"]
        x, y = (tokens.to(device) for tokens in options.training.at(step))  # (batch / world, context) each
        loss, norm = trainee.update(x, y)
        # the signal travels with the loss: it may have come to one rank only, and all must stop at the same step
        mean_loss, stops = over_ranks([loss, float(stop.signal > 0)], device)
        speed = options.batch * options.context / (time.perf_counter() - start)
        log.add(mean_loss, norm, lr, speed, peak_mib(device))
        after_step()
        if stops:
            return stop.signal or signal.SIGTERM
    return 0


def draw(losses: list[float], held_out: list[float], options: argparse.Namespace, file: Path) -> None:
    """The loss of each step, and the held-out loss before the first and after the last."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, color="#0072B2", label="training, mean over ranks")
    ends = [0, len(losses)][: len(held_out)]
    axes.plot(ends, held_out, "o", color="#D55E00", markersize=8, label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.set_title(f"stage {options.stage}, {WORLD} rank{'s' * (WORLD > 1)}, {options.batch} sequences per step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text: it can be searched and read aloud
        figure.savefig(file)


def run(options: argparse.Namespace) -> int:
    """Everything between joining the group and leaving it; returns the exit code."""
    with StopRequest() as stop:
        return run_until(options, stop)


def run_until(options: argparse.Namespace, stop: StopRequest) -> int:
    """The same, with a signal in mind. A run that a SIGTERM ended, as Slurm sends it, has not failed: 0."""
    device = minizero.init_distributed(options.timeout)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // find_place().local_world))
    check_same_text(options.corpus)
    trainee = distribute(options, device)
    parameters = sum(p.numel() for p in trainee.model.parameters())
    say(f"stage {options.stage} on {WORLD} {device.type} rank(s), {parameters:,} parameters, {options.corpus.name}")

    checkpoints = Checkpoints(trainee, options)
    losses = checkpoints.resume()
    held_out = losses["held_out"] = losses["held_out"] or [held_out_loss(trainee, options.held_out, device)]
    log = Log(options.out / "loss.csv", options.steps, losses["losses"])
    try:
        stopped_by = train(trainee, options, device, log, lambda: checkpoints.save(losses), stop)
        checkpoints.save(losses, is_last=True)
    finally:
        log.close()
    if not stopped_by:
        held_out.append(held_out_loss(trainee, options.held_out, device))
        prompt = options.corpus.held_out[:PROMPT_BYTES]
        text = sample(trainee, prompt, options.seed, device)
        say(f"sample\n------\n{decode(prompt)}|{text}\n------")
        say(f"held-out loss {held_out[0]:.4f} -> {held_out[1]:.4f} nats per byte")
    else:
        say(f"stopped after step {len(log.losses)} by {signal.Signals(stopped_by).name}")
    if RANK == 0:
        draw(log.losses, held_out, options, options.out / "loss.svg")
        print(f"wrote {options.out / 'loss.csv'} and {options.out / 'loss.svg'}")
    return 128 + signal.SIGINT if stopped_by == signal.SIGINT else 0


def main() -> NoReturn:
    """Ends with a hard exit: gloo's threads can abort an interpreter that shuts down in the usual way."""
    options, code = parse_options(), 1
    try:
        code = run(options)
        dist.barrier()
        dist.destroy_process_group()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        # Printed before this rank's connections close: its peers, which fail by that, come later.
        sys.stderr.write(f"\nrank {RANK} failed\n{traceback.format_exc()}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
