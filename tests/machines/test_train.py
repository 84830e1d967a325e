"""scripts/train.py as its users start it: under torchrun and alone, with bad options, a failing rank, a signal."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import torch
import torch.distributed as dist
import train
from harness import RankFailure, run_ranks
from plain import assert_within, with_limits
from safetensors.torch import load_file

from minizero.collectives import Place
from minizero.data import Batches, load_corpus
from training import stopping
from training.report import draw

pytestmark = pytest.mark.ch31
SCRIPT = Path(train.__file__)
SIZES = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--batch", "4", "--lr", "0.01"]
SIZES += ["--warmup", "2", "--clip", "0.5", "--seed", "3"]

# Runs the script's own functions once for each stage, in one process group: starting ranks is what takes time here.
ALL_STAGES = """
import sys
import torch.distributed as dist
import train

for stage in range(4):
    options = train.parse_options([*sys.argv[2:], "--stage", str(stage), "--out", f"{sys.argv[1]}/{stage}"])
    assert train.run(options) == 0
dist.barrier()
dist.destroy_process_group()
"""

# The script itself, but reading the batch of step 11 fails on rank 1.
BROKEN = """
import runpy
import sys
from minizero.data import Batches

def at(self, step, original=Batches.at):
    if step == 10 and self.rank == 1:  # the held-out text has fewer batches
        raise OSError("the disk of rank 1 is gone")
    return original(self, step)

Batches.at = at
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
# The same, but there rank 1 is killed.
KILLED = BROKEN.replace("step == 10", "step == 15").replace(
    'raise OSError("the disk of rank 1 is gone")', "import os; os.kill(os.getpid(), 9)"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 kB with structure: two-digit numbers in words, over and over in another order."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(
        "\n".join(f"{(i * 37) % 90 + 10} is written {str((i * 37) % 90 + 10)[::-1]} backwards" for i in range(1500))
    )
    return path


@contextmanager
def started(*command: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, of which nothing survives this context."""
    here = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parent.parent / "src")])
    environment = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        list(map(str, command)),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(world: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "loss.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def column(folder: Path, name: str) -> torch.Tensor:
    return torch.tensor([row[name] for row in rows(folder)], dtype=torch.float64)


# ---- what it computes ----------------------------------------------------------------------------------------------


def test_all_stages_on_two_ranks_and_one_rank_alone_give_the_losses_of_plain_torch(text: Path, tmp_path: Path) -> None:
    (tmp_path / "all_stages.py").write_text(ALL_STAGES)
    options = [*SIZES, "--steps", "8", "--text", text]
    with started(*torchrun(2), tmp_path / "all_stages.py", tmp_path, *options) as pair:
        with started(sys.executable, SCRIPT, "--stage", "3", "--out", tmp_path / "alone", *options) as single:
            assert single.wait(300) == 0, single.stdout.read()
            output = single.stdout.read()
        assert pair.wait(300) == 0, pair.stdout.read()

    (losses, norms), (loss_limits, norm_limits) = with_limits(text, 8, batch=4, seed=3, clip=0.5)
    assert losses[-1] < losses[0] - 0.3
    for run in ("0", "1", "2", "3", "alone"):
        assert column(tmp_path / run, "step").tolist() == list(range(1, 9))
        assert_within(column(tmp_path / run, "loss").tolist(), losses, loss_limits, f"losses of stage {run}")
        assert_within(column(tmp_path / run, "gradient_norm").tolist(), norms, norm_limits, f"norms of stage {run}")
        assert column(tmp_path / run, "learning_rate")[:3].tolist() == pytest.approx([0.005, 0.01, 0.01])
        assert (column(tmp_path / run, "tokens_per_second") > 0).all()
        assert (column(tmp_path / run, "peak_memory_mib") > 50).all()
    check_output(output, tmp_path / "alone", losses)


def check_output(output: str, folder: Path, losses: list[float]) -> None:
    """What one run printed, and its figure."""
    before, after = map(float, re.search(r"held-out loss ([\d.]+) -> ([\d.]+) nats per byte", output).groups())
    assert before == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.1)  # knows nothing yet
    assert losses[-1] - 0.5 < after < before - 0.3
    assert "stage 3 on 1 cpu rank(s), 15,040 parameters" in output
    sample = re.search(r"sample\n-+\n(.*)\n-+\n", output, re.DOTALL)[1]
    prompt, _, continuation = sample.partition("|")
    assert re.search(r"\d\d is written \d\d backwards", prompt)
    assert len(continuation) > 100
    assert f"loss {losses[-1]:.3f}, " in output  # the progress bar
    assert "tokens/s, peak " in output
    assert "rror" not in output
    svg = ElementTree.parse(folder / "loss.svg")
    words = {"".join(node.itertext()) for node in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"step", "loss (nats per byte)", "held-out text", "training, mean over ranks"} <= words


def test_the_figure_shows_every_step_and_both_held_out_losses(tmp_path: Path) -> None:
    options = train.parse_options([*SIZES, "--out", str(tmp_path)])
    draw([5.0, 4.0, 3.0], [5.5, 2.5], options, tmp_path / "loss.svg")
    svg = (tmp_path / "loss.svg").read_text()
    line = max(re.findall(r'<path d="([^"]*)"[^>]*stroke: #0072b2', svg), key=len)
    assert len(re.findall(r"[ML] ", line)) == 3
    assert len(re.findall(r"<use [^>]*fill: #d55e00", svg)) == 3  # two points, and the one of the legend


# ---- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stage 4", "argument --stage: invalid choice: 4"),
        ("--steps 0", "argument --steps: must be positive, got 0"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--lr nan", "argument --lr: must be positive, got nan"),
        ("--lr inf", "argument --lr: must be positive, got inf"),
        ("--clip -1", "argument --clip: must be positive, got -1"),
        ("--timeout 0", "argument --timeout: must be positive, got 0"),
        ("--warmup -1", "--warmup must not be negative, got -1"),
        ("--batch 5", "--batch must be a multiple of the number of ranks, got 5 for 2 ranks"),
        ("--width 10 --heads 4", "heads must divide width: 4 heads, width 10"),
        ("--text /nowhere/at/all", "--text: [Errno 2] No such file or directory: '/nowhere/at/all'"),
        ("--text /", "--text: [Errno 21] Is a directory: '/'"),
        ("--text {text} --context 40001", "numbers.txt is too short"),
        ("--text {text} --batch 400 --context 16", "but one global batch needs 400: 2 ranks with batch 200"),
        ("--out {text}", "--out: [Errno 17] File exists"),
        ("--config /nowhere/at/all", "/nowhere/at/all"),
        ("--every 5", "--every and --resume need --save FOLDER"),
        ("--resume", "--every and --resume need --save FOLDER"),
        ("--save {text}.d --stage 0", "--save is for stages 1 to 3"),
        ("--save {text}.d --every 0", "argument --every: must be positive, got 0"),
        ("--step 5", "unrecognized arguments: --step 5"),
    ],
)
def test_bad_options_are_named_on_one_line_of_every_rank(
    arguments: str, message: str, text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        train.parse_options(arguments.format(text=text).split(), Place(1, 2))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py, rank 1: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_each_rank_gets_its_part_of_the_global_batch(text: Path, tmp_path: Path) -> None:
    arguments = [*SIZES, "--text", str(text), "--out", str(tmp_path)]
    whole = train.parse_options(arguments)
    # the launcher of deepspeed adds --local_rank=N
    parts = [train.parse_options([f"--local_rank={rank}", *arguments], Place(rank, 2)) for rank in range(2)]
    for batches in ("training", "held_out"):
        together = [getattr(part, batches).at(5)[0] for part in parts]
        assert torch.equal(torch.cat(together), getattr(whole, batches).at(5)[0])


def other_text(text: Path) -> None:
    corpus = load_corpus(text, context=16)
    train.check_same_text(corpus)
    if dist.get_rank() == 1:
        corpus = replace(corpus, held_out=corpus.held_out.flip(0))
    with pytest.raises(ValueError, match=r"numbers\.txt is another text on ranks \[1\] than on rank 0"):
        train.check_same_text(corpus)


def test_ranks_with_different_texts_all_raise(text: Path) -> None:
    run_ranks(2, other_text, text)


# ---- how it ends -----------------------------------------------------------------------------------------------------


def wait_for_rows(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 250
    while not (folder / "loss.csv").exists() or len(rows(folder)) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.1)


def test_a_failing_rank_is_the_first_to_say_why_and_nobody_waits(text: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    command = [*torchrun(2), tmp_path / "broken.py", SCRIPT, *SIZES, "--text", text, "--out", tmp_path]
    with started(*command) as process:
        assert process.wait(250) != 0  # a collective would wait for 300 s
        output = process.stdout.read()
    assert re.findall(r"rank (\d) failed", output)[0] == "1"
    first = output[output.index("rank 1 failed") :].split("rank 0 failed")[0]
    assert "Traceback" in first
    assert "OSError: the disk of rank 1 is gone" in first
    assert len(rows(tmp_path)) == 10


def test_a_signal_to_one_rank_ends_all_after_the_same_step(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, *SIZES, "--text", text, "--out", tmp_path, "--steps", "100000"]
    port = free_port()
    with (
        started(*command, **rank_environment(0, 2, port)) as first,
        started(*command, **rank_environment(1, 2, port)) as second,
    ):
        wait_for_rows(tmp_path, 3, first)
        second.send_signal(signal.SIGINT)
        assert second.wait(30) == 130
        assert first.wait(30) == 0  # whom the other told: it ended well
        outputs = first.stdout.read(), second.stdout.read()
    assert not any("Traceback" in output for output in outputs)
    step = int(re.search(r"stopped after step (\d+) by SIGTERM", outputs[0])[1])
    assert len(rows(tmp_path)) == step
    assert (tmp_path / "loss.svg").exists()
    assert "held-out loss" not in outputs[0]


def wait_for_a_peer_that_hangs() -> None:
    stopping.GRACE_SECONDS = 0.3
    if dist.get_rank() == 1:
        time.sleep(5)
    else:
        with stopping.StopRequest():
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
            dist.recv(torch.zeros(1), src=1)  # in here no Python handler runs


def test_a_signal_ends_a_rank_that_is_deep_in_a_collective() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, wait_for_a_peer_that_hangs)
    assert failure.value.ranks[0] == 0
    assert "--- rank 0 ---\nthe process died without a word" in str(failure.value)


def signals_before_and_after() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stopping.GRACE_SECONDS = 0.0
    threads = threading.active_count()
    with stopping.StopRequest() as stop:
        pass
    time.sleep(0.2)
    assert stop.signal == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert threading.active_count() == threads


def test_without_a_signal_nothing_is_left_behind() -> None:
    run_ranks(1, signals_before_and_after)


# ---- going on ----------------------------------------------------------------------------------------------------


def run_alone(*options: str | Path) -> str:
    with started(sys.executable, SCRIPT, *SIZES, *options) as process:
        output, _ = process.communicate(timeout=250)
        assert process.returncode == 0, output
    return output


def test_a_killed_run_goes_on_with_other_ranks_in_another_stage_as_if_unbroken(text: Path, tmp_path: Path) -> None:
    options = ["--text", text, "--steps", "40", "--save", tmp_path / "saved", "--every", "4", "--out", tmp_path]
    (tmp_path / "killed.py").write_text(KILLED)
    with started(*torchrun(2), tmp_path / "killed.py", SCRIPT, *SIZES, *options, "--resume") as process:
        assert process.wait(250) != 0
        assert "starting from the beginning" in process.stdout.read()
    assert len(rows(tmp_path)) == 15
    output = run_alone(*options, "--resume", "--stage", "1")
    step = int(re.search(r"resumed after step (\d+)", output)[1])
    assert step in (8, 12)  # the one of step 12 may not have been complete
    (losses, norms), (loss_limits, norm_limits) = with_limits(text, 40, batch=4, seed=3, clip=0.5)
    assert column(tmp_path, "step").tolist() == list(range(1, 41))
    assert_within(column(tmp_path, "loss").tolist(), losses, loss_limits, "losses")
    assert_within(column(tmp_path, "gradient_norm").tolist(), norms, norm_limits, "norms")
    assert (tmp_path / "saved" / "latest").read_text() == "step-000040\nstep-000036\n"
    assert sorted(os.listdir(tmp_path / "saved")) == ["latest", "step-000036", "step-000040"]
    run_ranks(1, resume_again, options)


def resume_again(options: list[str | Path]) -> None:
    """A finished run has nothing left to do; with another order of the data it would not be the same run."""
    options = [*SIZES, *map(str, options), "--resume"]
    assert train.run(train.parse_options(options)) == 0
    assert len(rows(Path(options[-2]))) == 40
    with pytest.raises(ValueError, match="step-000040 is of a run with another seed"):
        train.run(train.parse_options([*options, "--seed", "4"]))


def article(arguments: list[str], killed: bool) -> None:
    """A rank of the run with the article's file; in step 8 rank 1 is killed, when the checkpoint of step 4 is there."""
    plain, latest = Batches.at, Path(arguments[arguments.index("--save") + 1], "latest")

    def at(self: Batches, step: int) -> Any:
        if killed and step == 7 and dist.get_rank() == 1 and len(self) > 8:
            while not latest.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, step)

    Batches.at = at
    assert train.run(train.parse_options(arguments)) == 0


def weights(folder: Path) -> torch.Tensor:
    """All masters of a checkpoint, by name and rank."""
    files = [load_file(file) for file in sorted(folder.glob("rank-*"))]
    return torch.cat([file[name] for name in sorted(files[0]) if name.startswith("master/") for file in files])


def test_the_article_s_run_killed_on_four_ranks_ends_on_two_with_the_same_weights(text: Path, tmp_path: Path) -> None:
    file = SCRIPT.parents[1] / "configs" / "article.json"
    sizes = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--lr", "0.01", "--warmup", "2"]
    options = [*sizes, "--config", file, "--text", text, "--steps", "12", "--every", "4", "--resume"]
    broken, whole = ([str(o) for o in (*options, "--out", tmp_path, "--save", tmp_path / name)] for name in "ab")
    with pytest.raises(RankFailure):
        run_ranks(4, article, broken, True)
    assert (tmp_path / "a" / "latest").read_text() == "step-000004\n"
    run_ranks(2, article, [*broken, "--batch", "32"], False)  # 32 is 2 x 4 x 4: the file's, on four ranks
    run_ranks(4, article, whole, False)
    first, second = (weights(tmp_path / name / "step-000012") for name in "ab")
    start = weights(tmp_path / "b" / "step-000008")
    difference = ((first - second).norm() / (second - start).norm()).item()
    assert difference < 1e-2  # fp16, and sums in another order: 0.002 as measured, of four steps of Adam


# ---- F94: whose learning rate


def config_file(folder: Path, **keys: Any) -> str:
    file = folder / "ds_config.json"
    file.write_text(json.dumps({"train_batch_size": 4, "zero_optimization": {"stage": 2}} | keys))
    return str(file)


@pytest.mark.parametrize(
    ("keys", "option", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "--lr 0.1", '--lr is in the file of --config, which has "optimizer"'),
        ({"optimizer": {"type": "AdamW"}}, "--warmup 3", '--warmup is in the file of --config, which has "optimizer"'),
        ({"scheduler": {"type": "WarmupLR"}}, "--warmup 3", 'in the file of --config, which has "scheduler"'),
        ({"zero_optimization": {}}, "", "zero_optimization.stage 0 is minizero.Replicated"),
    ],
)
def test_F94_an_option_that_the_file_overrides_is_refused_beside_it(
    keys: dict[str, Any], option: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        train.parse_options(["--config", config_file(tmp_path, **keys), "--out", str(tmp_path), *option.split()])
    assert message in capsys.readouterr().err


def rates(text: Path, folder: Path) -> dict[str, list[float]]:
    def run(name: str, *options: str) -> list[float]:
        sizes = [*SIZES[:8], "--text", str(text), "--out", str(folder / name)]
        assert train.run(train.parse_options([*sizes, *options])) == 0
        return [row["learning_rate"] for row in rows(folder / name)]

    optimizer = {"type": "AdamW", "params": {"lr": 1e-9}}
    found = {"file": run("file", "--config", config_file(folder, optimizer=optimizer), "--steps", "3")}
    options = ["--batch", "4", "--warmup", "1", "--lr", "0.01", "--save", str(folder / "saved")]
    run("resumed", *options, "--steps", "3")
    found["resumed"] = run("resumed", *options, "--steps", "5", "--resume")
    with pytest.raises(ValueError, match="of a run with another lr"):
        run("resumed", *options, "--steps", "6", "--resume", "--lr", "0.02")
    return found


def test_F94_the_file_s_rate_is_the_run_s_and_a_resumed_run_keeps_its_schedule(text: Path, tmp_path: Path) -> None:
    found = run_ranks(1, rates, text, tmp_path)[0]
    assert found["file"] == [1e-9] * 3
    assert found["resumed"] == pytest.approx([0.01, 0.01, 0.01 * (0.1 + 0.45), 0.001, 0.001])


def test_a_sigterm_to_the_ranks_of_torchrun_that_ends_well_is_no_failure(text: Path, tmp_path: Path) -> None:
    options = [*SIZES, "--text", text, "--out", tmp_path, "--steps", "100000", "--save", tmp_path / "saved"]
    command = ["bash", "-c", 'trap "" TERM; exec "$@"', "deaf", *torchrun(2)]  # as slurm/train.sbatch starts it
    with started(*command, "--signals-to-handle", "SIGINT", SCRIPT, *options) as process:
        wait_for_rows(tmp_path, 3, process)
        everyone = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        for _ in range(2):  # torchrun and its ranks, which are sessions of their own, as Slurm does; and once more
            for pid in everyone:
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
        assert process.wait(60) == 0
        output = process.stdout.read()
    step = int(re.search(r"stopped after step (\d+) by SIGTERM", output)[1])
    assert (tmp_path / "saved" / "latest").read_text() == f"step-{step:06}\n"
    assert "Traceback" not in output


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_ranks_go_with_a_torchrun_that_is_killed(text: Path, tmp_path: Path) -> None:
    command = [*torchrun(2), SCRIPT, *SIZES, "--text", text, "--out", tmp_path, "--steps", "100000"]
    with started(*command) as process:
        wait_for_rows(tmp_path, 3, process)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
        process.wait()
        gone, alive = psutil.wait_procs(ranks, timeout=10)
        for rank in alive:
            rank.kill()
    assert (len(gone), len(alive)) == (2, 0)


def test_a_rank_that_no_torchrun_started_outlives_its_parent(text: Path, tmp_path: Path) -> None:
    """As after `nohup python scripts/train.py &` and a logout."""
    options = map(str, [*SIZES, "--text", text, "--out", tmp_path, "--steps", "100000"])
    call = f"import subprocess, sys; print(subprocess.Popen([sys.executable, {str(SCRIPT)!r}, *{[*options]}]).pid)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    with (tmp_path / "pid").open("w") as out:
        subprocess.run([sys.executable, "-c", call], env=environment, stdout=out, stderr=subprocess.DEVNULL, check=True)
    orphan = psutil.Process(int((tmp_path / "pid").read_text().split()[0]))
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "loss.csv").exists() or len(rows(tmp_path)) < 3:
            assert orphan.is_running()
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        orphan.kill()
