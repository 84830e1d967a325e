"""scripts/parity.py and bench.py, and what they are made of: the launcher, the counters, the verdicts."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import bench
import pytest
import torch
import torch.distributed as dist
from bench import check_losses
from harness import run_ranks
from parity import EXACT, KINDS, faults, limits
from repository import ROOT

from compare.job import METHODS, Job
from compare.launch import RankFailure, launch
from compare.methods import MiniZero, builders, in_parts
from compare.parity_rank import (
    Trained,
    at_start,
    compare,
    difference,
    loss_difference,
    rounding,
    train_sgd,
    train_twice,
)
from minizero.data import Batches, load_corpus
from minizero.precision import Precision

pytestmark = pytest.mark.ch31
SCRIPTS = ROOT / "scripts"
TINY = "--ranks 2 --batch 4 --layers 1 --context 8".split()


def run_script(name: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / name), *options]
    # a first call of DeepSpeed compiles for minutes
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=1900)


def write(folder: Path, source: str) -> Path:
    script = folder / "rank.py"
    script.write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(SCRIPTS)!r})\nrank = os.environ['RANK']\n{source}"
    )
    return script


# ---- the launcher ------------------------------------------------------------------------------------------------


def test_ranks_find_each_other_and_end_cleanly(tmp_path: Path) -> None:
    source = """
import torch, torch.distributed as dist
from compare.rank import run_rank
from minizero.collectives import over_ranks
def work(device):
    ours = over_ranks("max", [float(rank), 5.0], device)
    open(sys.argv[1] + rank, "w").write(repr(ours))
run_rank(work, 60.0)
"""
    launch(write(tmp_path, source), [f"{tmp_path}/result"], 2, 90.0)
    assert [(tmp_path / f"result{rank}").read_text() for rank in (0, 1)] == ["[1.0, 5.0]"] * 2


def test_the_rank_that_failed_first_is_shown_first(tmp_path: Path) -> None:
    source = """
import torch, torch.distributed as dist
from compare.rank import run_rank
def work(device):
    if rank == "1":
        raise ValueError("broken on purpose")
    dist.all_reduce(torch.ones(1))
run_rank(work, 60.0)
"""
    with pytest.raises(RankFailure, match="broken on purpose") as caught:
        launch(write(tmp_path, source), [], 3, 90.0)
    assert caught.value.ranks[0] == 1
    assert str(caught.value).startswith("--- rank 1: exit code 1 ---")
    assert "Traceback" in str(caught.value).split("---")[2]


def test_the_peers_of_a_failed_rank_are_killed(tmp_path: Path) -> None:
    source = """
open(sys.argv[1] + rank, "w").write(str(os.getpid()))
time.sleep(1)
rank == "0" or sys.exit(3)
time.sleep(600)
"""
    started = time.monotonic()
    with pytest.raises(RankFailure, match="exit code 3") as caught:
        launch(write(tmp_path, source), [f"{tmp_path}/pid"], 2, 60.0)
    assert time.monotonic() - started < 30  # and not when the time is up
    assert caught.value.ranks == [1]
    assert not Path("/proc", (tmp_path / "pid0").read_text()).exists()


def test_a_run_without_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="no end after 2 s") as caught:
        launch(write(tmp_path, "rank == '0' or time.sleep(600)"), [], 3, 2.0)
    assert caught.value.ranks == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    script = write(tmp_path, "open(sys.argv[1] + rank, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    call = f"from compare.launch import *\nlaunch(Path({str(script)!r}), ['{tmp_path}/pid'], 2, 600.0)"
    launcher = subprocess.Popen([sys.executable, "-c", call], cwd=SCRIPTS)
    pids = [tmp_path / "pid0", tmp_path / "pid1"]
    wait_for(lambda: all(file.exists() and file.read_text() for file in pids))
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: not any(Path("/proc", file.read_text()).exists() for file in pids))


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_loopback_counter_counts_each_byte_once() -> None:
    source = """
import socket
from compare.launch import enter_empty_network, loopback_bytes
reason = enter_empty_network()
if reason:
    sys.exit(reason)
assert loopback_bytes() == 0
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
left = 10_000_000
while left:
    client.sendall(b"x" * 20_000)
    got = 20_000
    while got:
        got -= len(peer.recv(got))
    left -= 20_000
print(loopback_bytes())
"""
    call = [sys.executable, "-c", "import sys\n" + source]
    answer = subprocess.run(call, cwd=SCRIPTS, capture_output=True, text=True, timeout=60)
    if answer.returncode and "no network namespace" in answer.stderr:
        pytest.skip(answer.stderr)
    assert answer.returncode == 0, answer.stderr
    assert 10_000_000 < int(answer.stdout) < 10_200_000


# ---- counting and judging ----------------------------------------------------------------------------------------


ROUNDING = {"loss32": 2e-6, "parameters32": 1e-5, "sgd32": 1e-6, "loss": 5.5, "reach": 10.0}
GOOD = {
    "limits": limits(ROUNDING, 20),
    "loss32": 2e-6,
    "parameters32": 1e-5,
    "sgd32": 1e-6,
    "scale32": 1e-9,
    "loss64": 1e-15,
    "parameters64": 1e-15,
    "loopback": 2010.0,
    "wire_expected": 2000.0,
    "ledger": 2000.0,
    "state_expected": 5000.0,
    "state": 5010,
}


def test_limits_are_multiples_of_what_was_measured_and_not_below_what_fp32_can_tell_apart() -> None:
    measured = limits(ROUNDING, 20)
    assert measured == pytest.approx({"loss32": 6e-6, "parameters32": 3e-5, "sgd32": 3e-6, "scale32": 3e-7})
    nothing = limits({**ROUNDING, "loss32": 0.0, "parameters32": 0.0, "sgd32": 0.0}, 20)  # equal to the last bit
    next_to_the_loss = float(torch.nextafter(torch.tensor(5.5), torch.tensor(6.0))) - 5.5
    assert next_to_the_loss < nothing["loss32"] < 10 * next_to_the_loss
    assert nothing["parameters32"] == 20 * torch.finfo(torch.float32).eps
    assert nothing["sgd32"] == 10 * nothing["scale32"] == 10 * torch.finfo(torch.float32).eps
    assert not limits({**ROUNDING, "sgd32": math.nan}, 20)["sgd32"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_good_row_passes(method: str) -> None:
    assert faults(method, GOOD) == []
    assert faults(method, GOOD | {"loopback": None}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("loss32", 7e-6), ("parameters32", 4e-5), ("parameters32", float("nan"))],
        *[("sgd32", 4e-6), ("scale32", 4e-7), ("scale32", float("nan"))],
        *[("loss64", 2e-12), ("parameters64", 2e-12), ("parameters64", float("nan"))],
        *[("ledger", 2008.0), ("ledger", 1992.0), ("loopback", 2050.0), ("loopback", 1990.0)],
        *[("state", 5060), ("state", 4990)],
    ],
)
def test_a_row_off_in_one_figure_fails(key: str, value: float) -> None:
    found = faults("minizero3", GOOD | {key: value})
    assert len(found) == 1
    assert found[0].startswith(key)


def test_others_are_not_judged_on_bytes_and_deepspeed_not_on_float64() -> None:
    bytes_off = {"ledger": 3000.0, "loopback": 3000.0, "state": 9000}
    assert faults("fsdp2", GOOD | bytes_off) == []
    assert faults("fsdp2", GOOD | {"parameters64": 1e-7}) != []
    assert faults("deepspeed3", GOOD | {"parameters64": 1e-7, "loss64": 1e-7}) == []
    assert faults("deepspeed3", GOOD | {"parameters64": 1e-7, "sgd32": 1e-4}) != []  # but in fp32 it is
    refused = {key: value for key, value in GOOD.items() if not key.endswith("64")} | {"refused64": "no float64"}
    assert faults("deepspeed3-acc4", refused) == []
    assert faults("deepspeed3", refused | {"scale32": 1e-2}) != []
    assert faults("minizero3", refused | {"parameters64": 1e-15, "loss64": 1e-15}) == ["float64 refused: no float64"]


# What goes wrong in practice, done to minizero's stage 3. `two` is the number of ranks.


class Fine(MiniZero):
    """Nothing is wrong."""

    def __init__(self, model, optimizer_class, lr, dtypes=None):
        super().__init__(model, optimizer_class, lr, 3, dtypes)
        self.steps = 0

    def slices(self):
        return [piece for _, piece in self.zero.named_slices()]

    def spoil(self):
        """Before the step."""

    def update(self):
        self.steps += 1
        self.spoil()
        super().update()


class OnePerCent(Fine):
    factor = 1.01

    def spoil(self):
        for piece in self.slices():
            piece.grad *= self.factor


class SumNotMean(OnePerCent):
    factor = 2.0


class ShareMissing(Fine):
    def backward_part(self, x, y):
        loss = self.network(x, y)
        (loss / self.parts * (dist.get_rank() == 0)).backward()
        return float(loss.item())


class StaleShard(Fine):
    """In the second step rank 1 keeps one of its slices as it was."""

    def update(self):
        kept = [(piece, piece.detach().clone()) for piece in self.slices()[-1:]]
        super().update()
        for piece, value in kept if (self.steps, dist.get_rank()) == (2, 1) else []:
            piece.data.copy_(value)


class NoMasters(Fine):
    def update(self):
        super().update()
        for piece in self.slices():
            piece.data.copy_(piece.bfloat16())


PLANTED = [OnePerCent, SumNotMean, ShareMissing, StaleShard]


def planted_rows() -> dict[str, dict[str, float]]:
    """For each kind and fault the figures of a row, as multiples of the limits."""
    rank, world, cpu, found = dist.get_rank(), dist.get_world_size(), torch.device("cpu"), {}
    sizes = {"width": 48, "layers": 1, "context": 8, "steps": 4, "ranks": [world]}
    tokens = load_corpus(context=8).training
    for kind, batch in (("", 4), ("-acc4", 8), ("-bf16", 4)):
        job = Job(f"one{kind}", batch=batch, timeout=60.0, count_loopback=False, reference="", result="", **sizes)
        whole, mine = Batches(tokens, 8, batch), Batches(tokens, 8, batch // world, rank=rank, world=world)
        data, share = ([batches.at(step) for step in range(job.steps)] for batches in (whole, mine))
        one, dtypes = builders(batch)[job.method], Precision(torch.bfloat16) if kind == "-bf16" else None

        def train(build, data, job=job):
            done = train_twice(job, build, data, cpu)
            done.exact = None if job.method.endswith("-bf16") else train_sgd(job, build, data, cpu, torch.float64)
            return done

        right = train(one, data)
        allowed = limits(rounding(job, right, one, data, cpu), job.steps) | ({} if dtypes else EXACT)
        for fault in [Fine, *PLANTED, *([NoMasters] if dtypes else [])]:
            build = partial(in_parts, fault, 4) if kind == "-acc4" else partial(fault, dtypes=dtypes)
            row = train(build, share)
            if rank == 0:
                figures = compare(row, right, at_start(job, cpu))
                found[fault.__name__ + kind] = {key: figures[key] / limit for key, limit in allowed.items()}
    return found


def test_planted_faults_exceed_the_limits_by_far_and_a_right_row_is_within() -> None:
    for name, off in run_ranks(2, planted_rows)[0].items():
        in_fp32 = max(value for key, value in off.items() if key.endswith("32"))  # all that DeepSpeed is judged by
        if name.startswith("Fine"):
            assert max(off.values()) < 0.8, (name, off)
        else:
            assert in_fp32 > 4, (name, off)
            assert "parameters64" not in off or max(off["loss64"], off["parameters64"]) > 1e3, (name, off)


def test_differences_are_taken_by_name() -> None:
    one = Trained([2.0, 1.0], {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])})
    run = Trained([2.0, 1.5], {"b": torch.tensor([[3.5]]), "a": torch.tensor([1.0, 2.0])})
    assert difference(run, one).tolist() == [0.0, 0.0, 0.5]
    assert loss_difference(run, one) == 0.5
    assert math.isnan(loss_difference(Trained([2.0, math.nan], {}), one))
    with pytest.raises(ValueError, match="differ in name: \\['b'\\]"):
        difference(Trained([], {"a": torch.ones(2)}), one)


def test_every_method_has_an_adapter() -> None:
    assert set(METHODS) == set(builders(1)) - {f"one{kind}" for kind in KINDS}
    assert set(bench.METHODS) <= {"floor", *METHODS}
    assert {method for method in METHODS if "-" not in method} <= set(bench.METHODS)


def test_bench_refuses_losses_that_differ() -> None:
    same = {"floor": torch.tensor([3.0, 1.0]), "fsdp2": torch.tensor([3.0, 2.0]), "ddp": torch.tensor([3.0, 2.00001])}
    check_losses(same)  # the floor trains on its own samples, so its second loss is another
    with pytest.raises(RuntimeError, match=r"losses of ddp and fsdp2 differ by 1\.0e-03"):
        check_losses({**same, "ddp": torch.tensor([3.0, 2.001])})
    with pytest.raises(RuntimeError, match="losses of floor"):
        check_losses({**same, "floor": torch.tensor([3.1, 2.0])})
    # each kind is held against the first of its own
    check_losses({**same, "fsdp2-bf16": torch.tensor([3.0, 2.1]), "minizero3-bf16": torch.tensor([3.0, 2.12])})
    with pytest.raises(RuntimeError, match="losses of minizero3-acc4 and fsdp2-acc4"):
        check_losses({**same, "fsdp2-acc4": torch.tensor([3.0, 2.1]), "minizero3-acc4": torch.tensor([3.0, 2.104])})


# ---- the scripts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ["", "AVX2"])  # with AVX2 DeepSpeed takes no CPU to support fp16
def test_parity_table_and_json(tmp_path: Path, isa: str) -> None:
    methods = ["fsdp2", "deepspeed3", "minizero0", "minizero3", "minizero3-bf16"] if not isa else ["deepspeed3"]
    options = [*TINY, "--width", "384", "--steps", "4", "--json", f"{tmp_path}/figures.json", "--methods", *methods]
    other = {"ONEDNN_MAX_CPU_ISA": isa} if isa else {}
    answer = run_script("parity.py", *options, **other)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[-1] == f"{len(methods)} passed, 0 failed"
    question = "import torch; print(torch.ops.mkldnn._is_mkldnn_fp16_supported())"  # another process may hear otherwise
    heard = subprocess.run([sys.executable, "-c", question], env=os.environ | other, capture_output=True, check=True)
    if heard.stdout.split()[-1] == b"False":
        assert "SGD float64 n/a: DeepSpeed took the float64 model but stepped it in fp32" in answer.stdout
    else:
        assert "SGD float64 refused: DeepSpeed does so" in answer.stdout
        assert re.search(r"^deepspeed3 .* refused .* passed$", answer.stdout, re.MULTILINE)
    assert re.search(r"^limit( +\d\.\de-\d\d){5}$", answer.stdout, re.MULTILINE)
    rows = {row["method"]: row for row in json.loads((tmp_path / "figures.json").read_text())}
    assert list(rows) == methods
    if isa:
        return
    # Ψ: two embeddings and a head, one block of 12C² + 13C, the last norm
    params = 384 * (256 + 8 + 256) + 12 * 384**2 + 13 * 384 + 2 * 384
    assert {row["parameters"] for row in rows.values()} == {params}
    assert rows["minizero0"]["ledger"] == 2 * 4 * params / 2
    assert rows["minizero3"]["ledger"] == 3 * 4 * params / 2 + 2 * 2 * 8  # two units gathered twice, and called out
    assert 16 * params / 2 <= rows["minizero3"]["state"] < 16 * params / 2 * 1.01
    assert rows["minizero3-bf16"]["ledger"] == 3 * 2 * params / 2 + 2 * 2 * 8
    assert 16 * params / 2 <= rows["minizero3-bf16"]["state"] < 16 * params / 2 * 1.01
    assert rows["fsdp2"]["ledger"] > rows["minizero3"]["ledger"]  # gloo's reduce-scatter


def test_parity_without_deepspeed_fails(tmp_path: Path) -> None:
    package = tmp_path / "hidden" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('No module named deepspeed')")
    path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    options = [*TINY, "--width", "48", "--steps", "4", "--json", f"{tmp_path}/figures.json"]
    answer = run_script("parity.py", *options, "--methods", "deepspeed2", PYTHONPATH=path)
    assert answer.returncode == 1
    assert answer.stdout.splitlines()[-1] == "0 passed, 1 failed"
    assert "deepspeed2 on 2 ranks: DeepSpeed cannot be used here" in answer.stdout
    assert "No module named deepspeed" in answer.stderr


def test_scripts_has_commands_and_folders_of_what_they_are_made_of() -> None:
    parts = [name for name in os.listdir(SCRIPTS) if name not in ("__pycache__", "compare", "pages", "training")]
    assert [name for name in parts if name.startswith("_") or not (SCRIPTS / name).is_file()] == []
    commands = {name: (SCRIPTS / name).read_text() for name in parts if name.endswith(".py")}
    assert [name for name, text in commands.items() if '\nif __name__ == "__main__":\n' not in text] == []


def test_options_that_cannot_work_are_named() -> None:
    for script, option, value in (
        ("parity.py", "--steps", "3"),
        ("parity.py", "--batch", "4"),
        ("parity.py", "--ranks", "3"),
        ("bench.py", "--rounds", "0"),
    ):
        answer = run_script(script, option, value)
        assert answer.returncode == 2
        assert option in answer.stderr.splitlines()[-1]


def test_bench_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = [*TINY, "--width", "48", "--rounds", "2", "--methods", "floor", "fsdp2", "minizero3", "ddp"]
    command = [*torchrun, str(SCRIPTS / "bench.py"), *options]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    ratios = re.findall(r"^RATIO (\S+) (\d) (\d+\.\d{3})$", answer.stdout, re.MULTILINE)
    saving = ["save-minizero3/save-fsdp2", "load-minizero3/load-fsdp2"]
    saving += ["stall-minizero3/save-fsdp2", "stall-minizero3/save-minizero3"]
    pairs = ["minizero3/fsdp2", "minizero3/floor", *saving]
    assert [(pair, world) for pair, world, _ in ratios] == [(pair, "2") for pair in pairs]
    assert all(float(ratio) > 0 for _, _, ratio in ratios)
    assert re.search(r"^fsdp2 .* 1\.000 +1\.000 - 1\.000$", answer.stdout, re.MULTILINE)
