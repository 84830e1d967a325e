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

import math
import os
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import minizero
from minizero.collectives import over_ranks
from minizero.data import Corpus
from training.checkpoints import Checkpoints, Progress
from training.log import Log, peak_mib, say
from training.options import Options, parse_options
from training.report import draw, held_out_loss, sample
from training.stopping import StopRequest, die_with_torchrun
from training.trainee import Trainee, distribute


def train(
    trainee: Trainee, options: Options, progress: Progress, log: Log, checkpoints: Checkpoints, stop: StopRequest
) -> int:
    """All steps that are left, or fewer if a signal comes to any rank; returns the signal, or 0."""
    for step in range(len(progress.losses), options.steps):
        start = time.perf_counter()
        if options.own_schedule:
            for group in trainee.optimizer.param_groups:
                group["lr"] = learning_rate(step, options, progress.horizon)
        lr = trainee.optimizer.param_groups[0]["lr"]
        x, y = (tokens.to(trainee.device) for tokens in options.training.at(step))  # (batch / world, context) each
        loss, norm = trainee.update(x, y)
        # the signal travels with the loss: it may have come to one rank only, and all must stop at the same step
        mean_loss, stops = over_ranks("mean", [loss, float(stop.signal > 0)], trainee.device)
        progress.losses.append(mean_loss)
        speed = options.batch * options.model.context / (time.perf_counter() - start)
        log.add(step + 1, mean_loss, norm, lr, speed, peak_mib(trainee.device))
        checkpoints.save(progress)
        if stops:
            return stop.signal or signal.SIGTERM
    return 0


def learning_rate(step: int, options: Options, horizon: int) -> float:
    """Rises over the warm-up, then falls along a cosine to a tenth, at the step that the run began with as its last."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    progress = min(1.0, (step - options.warmup) / max(1, horizon - options.warmup))
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


# ---- before and after --------------------------------------------------------------------------------------------


def run(options: Options) -> int:
    """Everything between joining the group and leaving it; the exit code. What a SIGTERM ended has not failed: 0."""
    with StopRequest() as stop:
        device = minizero.init_distributed(options.timeout)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.place.local_world))
        check_same_text(options.corpus)
        trainee = distribute(options, device)
        count, ranks = (
            sum(p.numel() for p in trainee.model.parameters()),
            f"{options.place.world} {device.type} rank(s)",
        )
        say(f"stage {options.stage} on {ranks}, {count:,} parameters, {options.corpus.name}")

        checkpoints = Checkpoints(trainee, options)
        progress = checkpoints.resume()
        progress.held_out = progress.held_out or [held_out_loss(trainee, options.held_out)]
        with Log(options.out / "loss.csv", options.steps, len(progress.losses)) as log:
            stopped_by = train(trainee, options, progress, log, checkpoints, stop)
            checkpoints.save(progress, is_last=True)
        report(trainee, options, progress, stopped_by)
        return 128 + signal.SIGINT if stopped_by == signal.SIGINT else 0


def report(trainee: Trainee, options: Options, progress: Progress, stopped_by: int) -> None:
    """What there is to see: of a run that got to its end also a sample and the held-out loss."""
    if not stopped_by:
        progress.held_out.append(held_out_loss(trainee, options.held_out))
        say(sample(trainee, options.corpus.held_out, options.seed))
        say(f"held-out loss {progress.held_out[0]:.4f} -> {progress.held_out[1]:.4f} nats per byte")
    else:
        say(f"stopped after step {len(progress.losses)} by {signal.Signals(stopped_by).name}")
    if dist.get_rank() == 0:
        draw(progress.losses, progress.held_out, options, options.out / "loss.svg")
    say(f"wrote {options.out / 'loss.csv'} and {options.out / 'loss.svg'}")


def check_same_text(corpus: Corpus) -> None:
    """On several machines the text can differ: then every rank raises ValueError."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, corpus.fingerprint)
    if len(set(everyone)) > 1:
        ranks = [rank for rank, fingerprint in enumerate(everyone) if fingerprint != everyone[0]]
        raise ValueError(f"{corpus.name} is another text on ranks {ranks} than on rank 0: give one file with --text")


def main() -> NoReturn:
    """Ends with a hard exit: gloo's threads can abort an interpreter that shuts down in the usual way."""
    die_with_torchrun()
    options, code = parse_options(about=__doc__), 1
    try:
        code = run(options)
        dist.barrier()
        dist.destroy_process_group()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        # Printed before this rank's connections close: its peers, which fail by that, come later.
        sys.stderr.write(f"\nrank {options.place.rank} failed\n{traceback.format_exc()}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
