"""Files on disk can be in the way, full, lost or left: every rank says which, before anything is damaged."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from reference import mean_square
from torch import nn

import minizero
from minizero.offload import offload_optimizer
from minizero.offload.mapped import HEADER, MappedFile

pytestmark = pytest.mark.ch24
preload("minizero.offload.step")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def build(stage: int, width: int = 8) -> minizero.Zero:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
    return minizero.Zero(model, list(model), stage=stage)


def step(zero: minizero.Zero, optimizer: torch.optim.Optimizer) -> None:
    mean_square(zero.model, torch.ones(2, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()


def own_file(folder: str) -> Path:
    return Path(folder) / f"rank{dist.get_rank()}.offload"


# ---- before the training


def _no_room(stage: int, folder: str) -> None:
    zero = build(stage)
    before = [piece.detach().clone() for _, piece in zero.named_slices()]
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4200, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=r"rank1\.offload") as caught:
        offload_optimizer(zero, torch.optim.AdamW, directory=folder)
    assert "cannot allocate" in str(caught.value)
    assert "bytes, " in str(caught.value)
    assert "are free" in str(caught.value)
    dist.barrier()
    assert os.listdir(folder) == ["checkpoint.safetensors"]  # what was there, and nothing of ours
    for piece, (_, now) in zip(before, zero.named_slices(), strict=True):
        assert torch.equal(piece, now)
    optimizer = offload_optimizer(zero, torch.optim.AdamW)  # host memory has room; training goes on from there
    step(zero, optimizer)


@STAGES
def test_a_full_disk_is_an_error_on_every_rank_before_training(stage: int, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.safetensors").write_text("the last one")
    run_ranks(2, _no_room, stage, str(tmp_path))
    assert (tmp_path / "checkpoint.safetensors").read_text() == "the last one"


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True)
    if mount.returncode:
        pytest.skip("needs leave to mount a file system of one megabyte")
    try:
        with pytest.raises(OSError, match="1,048,576 are free: No space left on device") as caught:
            MappedFile(tmp_path / "x", 2**21)
        assert str(tmp_path / "x") in str(caught.value)
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def _two_runs(folder: str) -> None:
    zero, other = build(3), build(3)
    optimizer = offload_optimizer(zero, torch.optim.AdamW, directory=folder)
    with pytest.raises(OSError, match=r"another run offloads here.*rank0\.offload"):
        offload_optimizer(other, torch.optim.AdamW, directory=folder)
    step(zero, optimizer)  # it did no harm to the first


def test_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _two_runs, str(tmp_path))


def _foreign(folder: str) -> None:
    zero = build(3)
    if dist.get_rank() == 1:
        own_file(folder).write_text("my thesis")
    with pytest.raises(OSError, match=r"rank1\.offload is not an offload file of minizero"):
        offload_optimizer(zero, torch.optim.AdamW, directory=folder)
    assert dist.get_rank() == 0 or own_file(folder).read_text() == "my thesis"


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    run_ranks(2, _foreign, str(tmp_path))


def test_a_path_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        MappedFile(tmp_path / "file" / "x", 100)


# ---- during the training


def _lost(stage: int, folder: str, how: str) -> None:
    zero = build(stage)
    optimizer = offload_optimizer(zero, torch.optim.AdamW, lr=0.1, directory=folder)
    step(zero, optimizer)
    before = zero.full_state()
    if dist.get_rank() == 1:
        path = own_file(folder)
        if how == "cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            path.rename(path.with_suffix(".elsewhere"))
        if how == "replaced":
            path.write_bytes(HEADER.ljust(2**16))
    dist.barrier()
    with pytest.raises(OSError, match=rf"rank1\.offload was {how}"):
        step(zero, optimizer)
    after = zero.full_state()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    if how == "removed" and dist.get_rank() == 1:  # put back, it goes on
        own_file(folder).with_suffix(".elsewhere").rename(own_file(folder))
    dist.barrier()
    if how == "removed":
        optimizer.zero_grad()
        step(zero, optimizer)


@pytest.mark.parametrize(("stage", "how"), [(1, "cut"), (2, "cut"), (3, "cut"), (3, "removed"), (2, "replaced")])
def test_a_file_that_is_lost_or_cut_is_an_error_on_every_rank_and_no_step(stage: int, how: str, tmp_path: Path) -> None:
    run_ranks(2, _lost, stage, str(tmp_path), how)


# ---- afterwards


def _gone(folder: str) -> None:
    zero = build(3)
    optimizer = offload_optimizer(zero, torch.optim.AdamW, directory=folder)
    step(zero, optimizer)
    assert own_file(folder).exists()
    del zero, optimizer
    gc.collect()
    assert not own_file(folder).exists()
    zero = build(3)
    optimizer = offload_optimizer(zero, torch.optim.AdamW, directory=folder)
    optimizer.offload.close()
    assert not own_file(folder).exists()
    with pytest.raises(OSError, match=r"rank0\.offload was removed"):
        step(zero, optimizer)


def test_the_file_goes_with_the_optimizer(tmp_path: Path) -> None:
    run_ranks(2, _gone, str(tmp_path))
    assert os.listdir(tmp_path) == []


CHILD = """
import sys, time
from pathlib import Path
from minizero.offload.mapped import MappedFile
file = MappedFile(Path(sys.argv[1]), 2**20)
print("ready", flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
"""


def _child(path: Path, then: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), then], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "ready\n"
    return child


def test_a_process_that_ends_takes_its_file_along(tmp_path: Path) -> None:
    assert _child(tmp_path / "x", "end").wait(30) == 0
    assert not (tmp_path / "x").exists()


def test_what_a_killed_run_left_is_replaced_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "x"
    child = _child(path, "wait")
    with pytest.raises(OSError, match="another run offloads here"):
        MappedFile(path, 100)
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    assert path.stat().st_size > 2**20
    file = MappedFile(path, 100)
    assert path.stat().st_size == file.nbytes
    assert not file.tensor(25, torch.float32).any()
    file.close()


def _child_collects(file: MappedFile) -> None:
    file.close()
    os._exit(0)


@pytest.mark.filterwarnings("ignore:This process")  # forked on purpose, as a DataLoader does
def test_a_forked_child_does_not_remove_its_parents_file(tmp_path: Path) -> None:
    file = MappedFile(tmp_path / "x", 100)
    child = multiprocessing.get_context("fork").Process(target=_child_collects, args=(file,))
    child.start()
    child.join(30)
    file.check()
    file.close()
    assert not (tmp_path / "x").exists()


def _leaks(folder: str) -> None:
    """F29: mappings, open files and bytes on disk are the same after step 2 and after step 20."""
    zero = build(3)
    optimizer = offload_optimizer(zero, torch.optim.AdamW, directory=folder)
    seen = []
    for number in range(20):
        step(zero, optimizer)
        zero.full_state()
        if number in (1, 19):
            lines = Path("/proc/self/maps").read_text().count("rank")
            seen.append((len(os.listdir("/proc/self/fd")), lines, own_file(folder).stat().st_blocks))
    assert seen[0] == seen[1]
    optimizer.offload.close()


def test_f29_nothing_grows_over_steps(tmp_path: Path) -> None:
    run_ranks(1, _leaks, str(tmp_path))
