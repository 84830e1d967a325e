"""Checkpoints under faults of public bug reports: F29 with saves, F34 to F38; kill -9, damage, hostile files."""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import Any

import harness
import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from harness import RankFailure, run_ranks
from test_checkpoint import Everything, assert_same, everything_of, start, train
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import minizero
from minizero import checkpoint
from minizero.checkpoint import CheckpointError, files, manifest, one_file, save_load, snapshot
from minizero.checkpoint.snapshot import Together
from minizero.data import Batches
from minizero.meter import live_storages
from minizero.precision import LossScaler

pytestmark = pytest.mark.ch25
harness.preload("minizero.checkpoint.save_load", "minizero.precision", "test_checkpoint")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


# ---- F34: another number of ranks, another stage, other units


def odd() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)).double()  # 26 values


def odd_training(model: nn.Module, optimizer: Any, steps: range) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in steps:
        batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(batch.view(world, -1, 5)[rank]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def odd_zero(stage: int, whole: bool = False) -> tuple[Any, Any, Any]:
    model = odd()
    zero = minizero.Zero(model, units=[] if whole else [model[0]], stage=stage)
    return model, zero, zero.optimizer(minizero.AdamW, lr=0.1, weight_decay=0.1)


def save_odd(folder: Path, stage: int) -> dict[str, Tensor]:
    model, zero, optimizer = odd_zero(stage)
    odd_training(model, optimizer, range(3))
    checkpoint.save(folder, "three", zero, optimizer, step=3, extra=dist.get_rank())
    odd_training(model, optimizer, range(3, 5))
    return zero.full_state()


def load_odd(folder: Path, stage: int, expected: dict[str, Tensor]) -> None:
    rank = dist.get_rank()
    model, zero, optimizer = odd_zero(stage, whole=True)  # other units, too
    torch.manual_seed(50 + rank)
    before = torch.get_rng_state()
    loaded = checkpoint.load(folder, zero, optimizer)
    assert loaded.extra == (rank if dist.get_world_size() == 4 else 0)
    exact = {
        name: torch.cat([shard[f"master/{name}"] for shard in shards(folder)]) for name, _ in model.named_parameters()
    }
    state = zero.full_state()
    for name, value in state.items():
        assert torch.equal(value.view(-1), exact[name])
    assert torch.equal(torch.get_rng_state(), before) == (rank >= 4)
    odd_training(model, optimizer, range(3, 5))
    for name, value in zero.full_state().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def shards(folder: Path) -> list[dict[str, Tensor]]:
    return [safetensors.torch.load_file(path) for path in sorted((folder / "three").glob("rank-*"))]


@STAGES
def test_f34_any_number_of_ranks_any_stage_and_other_units_go_on_as_if_nothing_had_happened(
    stage: int, tmp_path: Path
) -> None:
    expected = run_ranks(4, save_odd, tmp_path, stage)[0]
    for world in {1: [6], 2: [2], 3: [1, 2, 3, 4]}[stage]:
        run_ranks(world, load_odd, tmp_path, world % 3 + 1, expected)


def moments_of(folder: Path) -> None:
    _, zero, optimizer = odd_zero(3)
    checkpoint.load(folder, zero, optimizer)
    kinds = ("exp_avg", "exp_avg_sq")
    mine = {f"state/{k}/{n}": optimizer.state[p][k] for n, p in zero.named_slices() for k in kinds}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for key in mine:
        assert torch.equal(torch.cat([m[key] for m in everyone]), torch.cat([s[key] for s in shards(folder)]))
    assert {s["step"].item() for s in optimizer.state.values()} == {3.0}


def test_f34_moments_are_cut_anew_too(tmp_path: Path) -> None:
    run_ranks(4, save_odd, tmp_path, 3)
    run_ranks(3, moments_of, tmp_path)


def bytes_read(folder: Path) -> tuple[int, int]:
    model = nn.Linear(1000, 100)
    zero = minizero.Zero(model)
    optimizer = zero.optimizer(minizero.AdamW)
    if not folder.exists():
        model(torch.ones(1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(folder, "x", zero, optimizer, step=1)
    read, plain = [0], files.checksum
    from minizero.checkpoint import reading

    reading.checksum = lambda path: plain(path)
    result = reading.Reading(folder / "x", (folder / "x/manifest.json").read_text(), *(None,) * 3)
    result.manifest = manifest.parse_manifest(result.text, result.folder)
    flats = [flat for unit in zero.units for flat in unit.flats]
    for move in manifest.moves(result.manifest, flats, ("master", "state/")):
        read[0] += (move.part.stop - move.part.start) * move.dtype.itemsize
    return read[0], 3 * 4 * sum(flat.layout.numel for flat in flats)


def test_f34_each_rank_reads_only_what_it_keeps(tmp_path: Path) -> None:
    run_ranks(4, bytes_read, tmp_path / "c")
    reads = run_ranks(3, bytes_read, tmp_path / "c")
    assert sum(read for read, _ in reads) == reads[0][1]
    assert max(read for read, _ in reads) <= reads[0][1] / 3 + 12 * 4


# ---- F35: resuming is exact


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.pow(2).mean()


def run_of(folder: Path, stage: int, micro_steps: range) -> tuple[list[Any], dict[str, Any]]:
    """Accumulation of 2, warm-up, a loss scale that moves, shuffled data, three sources of random numbers."""
    torch.manual_seed(0)
    model, rank = Net(), dist.get_rank()
    zero = minizero.Zero(model, stage=stage)
    optimizer = zero.optimizer(minizero.AdamW, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / 4))
    scaler = LossScaler(initial=8.0, window=2, hysteresis=2)
    batches = Batches(torch.arange(1000), 8, 2, rank=rank, world=2, seed=5)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(rank)
    if micro_steps.start:
        for draw in (torch.rand, numpy.random.rand):
            draw(rank + 3)
        extra = checkpoint.load(folder, zero, optimizer).extra
        scheduler.load_state_dict(extra["scheduler"])
        scaler.load_state_dict(extra["scaler"])
        assert extra["micro_step"] == micro_steps.start
    seen = []
    for micro_step in micro_steps:
        x = batches.at(micro_step)[0].float() / 1000 + random.random() * numpy.random.rand()
        loss = model(x) / 2
        scaler.scale_loss(loss * (float("inf") if micro_step // 2 in (1, 4) else 1)).backward()
        zero.reduce()
        seen.append((loss.item(), optimizer.param_groups[0]["lr"], scaler.state_dict()))
        if micro_step % 2:
            finite = scaler.unscale(zero)
            if finite:
                optimizer.step()
                scheduler.step()
            scaler.update(finite)
            optimizer.zero_grad()
    last = everything_of(zero, optimizer)  # before it is saved: saving changes nothing
    extra = {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "micro_step": micro_steps.stop}
    checkpoint.save(folder, f"at-{micro_steps.stop}", zero, optimizer, step=micro_steps.stop // 2, extra=extra)
    return seen, last


@STAGES
@pytest.mark.parametrize("stop", [6, 7])  # 7: in the middle of an accumulation
def test_f35_new_processes_go_on_bit_by_bit(stage: int, stop: int, tmp_path: Path) -> None:
    whole = run_ranks(2, run_of, tmp_path / "whole", stage, range(12))
    first = run_ranks(2, run_of, tmp_path / "parts", stage, range(stop))
    second = run_ranks(2, run_of, tmp_path / "parts", stage, range(stop, 12))
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        assert len({state["scale"] for _, _, state in whole[rank][0]}) > 1
        assert_same(second[rank][1], whole[rank][1])


# ---- F36: killed at any moment


def fill(zero: Any, value: float) -> None:
    with torch.no_grad():
        for unit in zero.units:
            for piece in (piece for flat in unit.flats for piece in flat.slices):
                piece.fill_(value)


def save_one(folder: Path) -> None:
    _, zero, optimizer = odd_zero(3)
    fill(zero, 1.0)
    checkpoint.save(folder, "one", zero, optimizer, step=1, extra="one")


class Countdown:
    """Counts the lines of the modules that write, in all threads, and kills the process at one of them."""

    def __init__(self, moment: int | None) -> None:
        self.lines, self.moment = 0, moment
        self.files = {files.__file__, snapshot.__file__, save_load.__file__}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_name
        if frame.f_code.co_filename not in self.files or name in ("encode", "take") or name.startswith("<"):
            return None  # what only looks at values would be nearly all of it
        if event == "line":
            self.lines += 1
            if self.lines == self.moment:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def killed_save(folder: Path, victim: int, moment: int | None, in_background: bool) -> int:
    _, zero, optimizer = odd_zero(3)
    fill(zero, 2.0)
    Together(zero)  # connects the ranks: a kill in there makes the other wait, and there is nothing to see
    countdown = Countdown(moment if dist.get_rank() == victim else None)
    saver = checkpoint.AsyncSaver(folder, keep=1)
    threading.settrace(countdown)
    sys.settrace(countdown)
    if in_background:
        saver.save("two", zero, optimizer, step=2, extra="two")
        saver.wait()
    else:
        checkpoint.save(folder, "two", zero, optimizer, step=2, extra="two", keep=1)
    sys.settrace(None)
    return countdown.lines


def look_after_the_kill(folder: Path) -> list[str]:
    found = []
    for attempt in sorted(folder.iterdir()):
        _, zero, optimizer = odd_zero(2)
        loaded = checkpoint.load(attempt, zero, optimizer)
        values = torch.cat([value.view(-1) for value in zero.full_state().values()])
        assert loaded.extra == loaded.tag
        assert (values == {"one": 1.0, "two": 2.0}[loaded.tag]).all()
        checkpoint.save(attempt, "three", zero, optimizer, step=3)  # what was left is no hindrance
        assert not list(attempt.glob("*.partial*"))
        assert checkpoint.load(attempt, zero, optimizer).tag == "three"
        found.append(loaded.tag)
    return found


@pytest.mark.parametrize(("victim", "in_background", "moments"), [(0, False, 16), (1, False, 5), (0, True, 6)])
def test_f36_killed_at_any_moment_the_previous_or_the_new_one_loads(
    victim: int, in_background: bool, moments: int, tmp_path: Path
) -> None:
    run_ranks(2, save_one, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "whole")
    lines = run_ranks(2, killed_save, tmp_path / "whole", victim, None, in_background)[victim]
    assert lines > 60
    for i in range(moments):
        attempt = tmp_path / "attempts" / f"{i:02}"
        shutil.copytree(tmp_path / "first", attempt)
        with pytest.raises(RankFailure) as failure:  # the last moments are the end of the commit, on rank 0
            run_ranks(2, killed_save, attempt, victim, lines - i * lines // moments, in_background)
        assert victim in failure.value.ranks
    found = run_ranks(1, look_after_the_kill, tmp_path / "attempts")[0]
    assert "one" in found
    assert "two" in found or victim == 1
    assert found == sorted(found, reverse=True)  # the earlier the kill, the older the checkpoint


# ---- F36, F37: damaged, foreign and hostile files


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file and make the manifest agree: what somebody does who means it."""
    (folder / name).write_bytes(content)
    entry = {"nbytes": len(content), "crc32": files.checksum(folder / name)}
    edit(folder, lambda m: m["files"].update({name: entry}))


def forge_tensors(folder: Path, name: str, change: Callable[[dict[str, Tensor], dict[str, Any]], Any]) -> None:
    with safetensors.safe_open(folder / name, "pt") as file:
        tensors, rest = {k: file.get_tensor(k).clone() for k in file.keys()}, json.loads(file.metadata()["minizero"])  # noqa: SIM118
    change(tensors, rest)
    files.write_tensors(folder / "forged", tensors, {"minizero": json.dumps(rest)})
    forge(folder, name, (folder / "forged").read_bytes())


def rest_of(rest: dict[str, Any], key: str) -> list[Any]:
    return next(item for item in rest["dict"] if item[0] == key)


def random_key(tensors: dict[str, Tensor]) -> str:
    return next(key for key in tensors if key.startswith("rest/random/torch"))


class Marker:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


R1 = "rank-00001.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: os.truncate(f / R1, (f / R1).stat().st_size - 10), rf"{R1} has \d+ bytes, the manifest"),
    "empty": (lambda f: os.truncate(f / R1, 0), f"{R1} has 0 bytes"),
    "one bit": (lambda f: flip(f / R1), f"{R1} is damaged"),
    "swapped": (lambda f: exchange(f / R1, f / "rank-00000.safetensors"), r"rank-0000\d.safetensors (has|is damaged)"),
    "of another tag": (lambda f: shutil.copy(f.parent / "old" / R1, f / R1), f"{R1} (has|is damaged)"),
    "missing": (lambda f: (f / R1).unlink(), f"No such file or directory: .*{R1}"),
    "a link": (lambda f: link(f / R1), f"{R1} is no plain file"),
    "a pipe": (lambda f: ((f / R1).unlink(), os.mkfifo(f / R1)), f"{R1} is no plain file"),
    "a folder": (lambda f: ((f / R1).unlink(), (f / R1).mkdir()), f"{R1} is no plain file"),
    "folder is a link": (lambda f: link(f), "new is no folder"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "No such file or directory: .*manifest.json"),
    "manifest is a link": (lambda f: link(f / "manifest.json"), "manifest.json is no plain file"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 200), "manifest.json: all of it: Invalid JSON"),
    "no text": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "UnicodeDecodeError"),
    "nested": (lambda f: (f / "manifest.json").write_text("[" * 100000), "manifest.json: all of it"),
    "huge": (lambda f: os.truncate(f / "manifest.json", 1 << 40), "manifest.json has more than"),
    "of another": (lambda f: shutil.copy(f.parent / "old/manifest.json", f), "is the manifest of 'old'"),
    "format": (lambda f: edit(f, lambda m: m.update(format="minizero checkpoint 2")), "manifest.json: format"),
    "absurd world": (lambda f: edit(f, lambda m: m.update(world=10**15)), "manifest.json: files: must be"),
    "no world": (lambda f: edit(f, lambda m: m.update(world=0)), "manifest.json: world: "),
    "world in words": (lambda f: edit(f, lambda m: m.update(world="2")), "manifest.json: world: "),
    "unknown key": (lambda f: edit(f, lambda m: m.update(exec="rm")), "manifest.json: exec: Extra inputs"),
    "path": (
        lambda f: edit(f, lambda m: m["files"].update({"../old/" + R1: m["files"].pop(R1)})),
        "manifest.json: files: must be those of 2 ranks",
    ),
    "absurd shape": (lambda f: parameter(f, shape=[10**30]), r"'blocks.0.0.weight' was saved as .* \(1000"),
    "negative": (lambda f: parameter(f, shape=[-2]), "manifest.json: flats.0.parameters.0.shape.0"),
    "dtype": (lambda f: parameter(f, dtypes={"master": "float64"}), "'blocks.0.0.weight' was saved as float64"),
    "no dtype": (lambda f: parameter(f, dtypes={"master": "float32", "state/x": "load"}), "'load' is no dtype"),
    "unknown name": (lambda f: parameter(f, name="other"), "parameter 'blocks.0.0.weight' is not in the checkpoint"),
    "no master": (lambda f: parameter(f, dtypes={}), "'blocks.0.0.weight' was saved as None"),
    "twice": (lambda f: edit(f, lambda m: m["flats"].append(m["flats"][0])), "a parameter is there twice"),
    "a pickle": (lambda f: forge(f, R1, pickle.dumps(Marker(f.parent / "marker"))), f"{R1}: SafetensorError"),
    "long header": (lambda f: forge(f, R1, b"\xff" * 8 + b"{}"), f"{R1}: SafetensorError"),
    "not ours": (lambda f: forge(f, R1, safetensors.torch.save({"a": torch.ones(1)})), f"{R1}: "),
    "cut otherwise": (
        lambda f: forge_tensors(f, R1, lambda t, r: t.update({"master/blocks.0.0.bias": torch.ones(1)})),
        rf"{R1}: .*'master/blocks.0.0.bias' is F32 \[1\]",
    ),
    "other dtype": (
        lambda f: forge_tensors(f, R1, lambda t, r: t.update({k: t[k].double() for k in t if k[0] == "m"})),
        f"{R1}: .* is F64",
    ),
    "tensor gone": (lambda f: forge_tensors(f, R1, lambda t, r: t.pop(random_key(t))), f"{R1}: KeyError"),
    "random": (
        lambda f: forge_tensors(f, R1, lambda t, r: t.update({random_key(t): torch.zeros(3).byte()})),
        f"{R1}: .*RNG state",
    ),
    "kind": (
        lambda f: forge_tensors(f, R1, lambda t, r: rest_of(r, "extra").__setitem__(1, {"eval": ["1"]})),
        f"{R1}: KeyError: 'eval'",
    ),
    "no states": (
        lambda f: forge_tensors(f, R1, lambda t, r: rest_of(r, "states").__setitem__(1, {"dict": []})),
        f"{R1}: no optimizer state of 'blocks",
    ),
}
LATEST = {
    "../new": "latest: tag '../new' must be",
    "/etc": "latest: tag '/etc' must be",
    "\xff": "latest: tag",
    "other": "other is no folder",
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def exchange(a: Path, b: Path) -> None:
    a.replace(a.parent / "aside")
    b.replace(a)
    (a.parent / "aside").replace(b)


def link(path: Path) -> None:
    path.replace(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def parameter(folder: Path, **change: Any) -> None:
    edit(folder, lambda m: m["flats"][0]["parameters"][0].update(change))


def load_damaged(folder: Path) -> None:
    rank = dist.get_rank()
    model = Net()
    zero = minizero.Zero(model)
    optimizer = zero.optimizer(minizero.AdamW, lr=0.1)
    for tag in ("old", "new"):
        model(torch.ones(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(folder, tag, zero, optimizer, step=1)
    model(torch.ones(8)).backward()
    optimizer.step()
    model(torch.ones(8)).backward()
    before, numbers = everything_of(zero, optimizer), torch.get_rng_state()
    cases = [(name, damage, message) for name, (damage, message) in DAMAGES.items()]
    cases += [(text, lambda f, t=text: (f.parent / "latest").write_text(t), m) for text, m in LATEST.items()]
    cases += [("latest is a link", lambda f: link(f.parent / "latest"), "latest is no plain file")]
    for number, (name, damage, message) in enumerate(cases):
        copy = folder.with_name(f"copy{number}")
        if rank == 0:
            shutil.copytree(folder, copy)
            damage(copy / "new")
        dist.barrier()
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(copy, zero, optimizer)
        assert_same(everything_of(zero, optimizer), before)
        assert torch.equal(torch.get_rng_state(), numbers), name
        assert not (copy / "marker").exists()
    checkpoint.load(folder, zero, optimizer)


def test_f36_f37_damaged_foreign_and_hostile_files_are_named_on_all_ranks_before_anything_changes(
    tmp_path: Path,
) -> None:
    run_ranks(2, load_damaged, tmp_path / "good")


def unpickle_nothing(folder: Path) -> None:
    _, zero, optimizer = start(3)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled a file")

    torch.load = pickle.load = refuse
    checkpoint.save(folder, "x", zero, optimizer, step=1)
    checkpoint.load(folder, zero, optimizer)


def test_f37_saving_and_loading_use_no_pickle(tmp_path: Path) -> None:
    run_ranks(2, unpickle_nothing, tmp_path)
    for path in [*tmp_path.glob("x/rank-*")]:
        safetensors.torch.load_file(path)


# ---- F38: frozen, tied, buffers, never used


def incomplete(stage: int, folder: Path) -> None:
    model, zero, optimizer = start(stage)
    train(model, optimizer, 2)
    checkpoint.save(folder, "x", zero, optimizer, step=2)
    checkpoint.export(folder / "whole", zero)
    state = zero.full_state()
    if dist.get_rank() == 0:
        plain, exported = Everything(), safetensors.torch.load_file(folder / "whole")
        plain.load_state_dict(exported, strict=True)
        assert plain.head.weight is plain.embedding.weight
        assert_same(dict(plain.state_dict()), state)


def go_on(stage: int, folder: Path) -> dict[str, Tensor]:
    model, zero, optimizer = start(stage, seed=1)
    checkpoint.load(folder, zero, optimizer)
    assert model.head.weight is model.embedding.weight
    assert model.passing.equal(torch.ones(2))
    state = zero.full_state()
    if dist.get_rank() == 0:
        assert_same(state, safetensors.torch.load_file(folder / "whole"))
    train(model, optimizer, 1)
    return state


@STAGES
def test_f38_frozen_tied_and_unused_parameters_and_buffers_are_all_there(stage: int, tmp_path: Path) -> None:
    run_ranks(2, incomplete, stage, tmp_path)
    for world in (1, 2, 3):
        run_ranks(world, go_on, (stage + world) % 3 + 1, tmp_path)


def stateless(folder: Path) -> None:
    """A parameter that no group holds, one that never had a step: no state before, none after."""
    for trained in (["0.weight"], ["0.weight", "2.bias"]):
        model = odd()
        zero = minizero.Zero(model)
        optimizer = zero.optimizer(minizero.AdamW, [{"params": [name]} for name in trained])
        checkpoint.save(folder, f"fresh-{len(trained)}", zero, optimizer, step=0)
        odd_training(model, optimizer, range(2))
        assert len(optimizer.state) == len(trained)
        checkpoint.save(folder, f"used-{len(trained)}", zero, optimizer, step=2)
        checkpoint.load(folder, zero, optimizer, tag=f"fresh-{len(trained)}")
        assert not optimizer.state
        checkpoint.load(folder, zero, optimizer)
        assert len(optimizer.state) == len(trained)
        odd_training(model, optimizer, range(1))


def test_f38_states_that_are_not_there_are_not_invented(tmp_path: Path) -> None:
    run_ranks(3, stateless, tmp_path)


# ---- F29: nothing grows, with evaluation, saves and loads


def soak(stage: int, folder: Path) -> None:
    model, zero, optimizer = start(stage)
    seen = []
    with checkpoint.AsyncSaver(folder, keep=2) as saver:
        for step in range(1, 101):
            train(model, optimizer, 1)
            if step % 10 == 0:
                model.eval()
                with torch.no_grad():
                    model(torch.randint(7, (4,)))
                model.train()
                saver.save(f"background-{step}", zero, optimizer, step=step, extra={"t": torch.ones(1000)})
                saver.wait()
                checkpoint.save(folder, f"step-{step}", zero, optimizer, step=step, keep=2)
                kept = checkpoint.load(folder, zero, optimizer, tag=f"background-{step}")
                checkpoint.export(folder / "whole", zero)
                del kept
            if step in (10, 50, 100):
                dist.barrier()
                gc.collect()
                hooks = sum(
                    len(getattr(m, name)) for m in model.modules() for name in vars(m) if name.endswith("_hooks")
                )
                storages = live_storages()
                handles = len(os.listdir("/proc/self/fd"))
                seen.append((len(storages), sum(storages.values()), hooks, threading.active_count(), handles))
    assert seen[0] == seen[1] == seen[2], seen
    gone = weakref.ref(model)
    saver = zero = optimizer = model = None
    gc.collect()
    assert gone() is None


@STAGES
def test_f29_a_hundred_steps_with_evaluation_saves_and_loads_leave_nothing_behind(stage: int, tmp_path: Path) -> None:
    run_ranks(2, soak, stage, tmp_path, timeout=120)
    assert len(list(tmp_path.iterdir())) == 4


# ---- F85: extra states, and state-dict hooks of modules


class Scaled(nn.Linear):
    """A layer with values that are neither parameters nor buffers."""

    def __init__(self, value: Any) -> None:
        super().__init__(3, 3)
        self.value, self.loads = value, 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value, self.loads = state, self.loads + 1


def some_value(start: float) -> Any:
    return {
        "scale": start,
        "seen": [1, (2, None, True)],
        3: "three",
        "amax": torch.tensor([start, math.inf]).to(torch.float8_e5m2),
        "pickled": BytesIO(b"\x80\0" + bytes([int(start)])),
        "raw": b"\xff",
    }


def text_of(value: Any) -> str:
    return files.to_text(value, "x")


def scaled(start: float) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.ModuleList([Scaled(start), Scaled(torch.tensor([start, 2.0])), Scaled(some_value(start))])
    return nn.ModuleDict({"blocks": blocks, "again": blocks[2]})


EXTRAS = ["blocks.0._extra_state", "blocks.1._extra_state", "blocks.2._extra_state", "again._extra_state"]


def values_of(model: nn.Module) -> list[str]:
    return [text_of(block.value) for block in model["blocks"]]


def save_extras(stage: int, folder: Path) -> None:
    rank = dist.get_rank()
    model = scaled(1.0 + 10 * rank)
    zero = minizero.Zero(model, stage=stage)
    assert values_of(model) == values_of(scaled(1.0))  # rank 0's, as of parameters and buffers
    for block, other in zip(model["blocks"], scaled(7.0 + rank)["blocks"], strict=True):
        block.value = other.value
    state, wanted = zero.full_state(), scaled(7.0)
    if rank == 0:
        assert state.keys() == wanted.state_dict().keys()
        fresh = scaled(0.0)
        fresh.load_state_dict(state, strict=True)
        assert values_of(fresh) == values_of(wanted)
        state[EXTRAS[2]]["seen"].append("not the model's")
    assert values_of(model) == values_of(scaled(7.0 + rank))
    checkpoint.save(folder, "seven", zero, step=1)
    checkpoint.export(folder / "whole", zero)
    with checkpoint.AsyncSaver(folder) as saver:
        saver.save("background", zero, step=2)
        model["blocks"][2].value["seen"].clear()
    # what a plain model has goes in, and what does not fit is refused before anything changes
    zero.load_full_state(scaled(3.0).state_dict())
    assert values_of(model) == values_of(scaled(3.0))
    other = scaled(4.0).state_dict()
    for changes, message in (({EXTRAS[0]: object()}, "of type object"), ({"x._extra_state": 1}, "not in the model")):
        with pytest.raises(ValueError, match=message):
            zero.load_full_state(other | changes)
    del other[EXTRAS[1]]
    with pytest.raises(ValueError, match=f"key '{EXTRAS[1]}' is missing"):
        zero.load_full_state(other)
    assert values_of(model) == values_of(scaled(3.0))


def load_extras(stage: int, folder: Path) -> None:
    model = scaled(0.0)
    zero = minizero.Zero(model, stage=stage)
    mine = 7.0 + (dist.get_rank() if dist.get_world_size() == 2 else 0)
    for tag in ("seven", "background"):
        checkpoint.load(folder, zero, tag=tag)
        assert values_of(model) == values_of(scaled(mine))
    zero.load_full_state(one_file.read(folder / "whole"))
    assert values_of(model) == values_of(scaled(7.0))
    for index in (0, 1, 2):
        model["blocks"][index].value = None
    other = minizero.Zero(scaled(0.0)["blocks"][0])
    with pytest.raises(CheckpointError, match="is not in the"):
        checkpoint.load(folder, other)


@STAGES
def test_F85_extra_states_are_saved_loaded_and_exported(stage: int, tmp_path: Path) -> None:
    run_ranks(2, save_extras, stage, tmp_path)
    for world in (2, 3 if stage == 3 else 1):
        run_ranks(world, load_extras, stage % 3 + 1, tmp_path)
    one_file.merge(tmp_path, tmp_path / "merged", "seven")
    for name in ("whole", "merged"):
        fresh = scaled(0.0)
        fresh.load_state_dict(one_file.read(tmp_path / name), strict=True)
        assert values_of(fresh) == values_of(scaled(7.0))
        assert torch.equal(safetensors.torch.load_file(tmp_path / name)[EXTRAS[1]], torch.tensor([7.0, 2.0]))


class Renames(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = destination.pop(prefix + "weight")


class Doubles(nn.Linear):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, *args)


class ReadsWeights(Scaled):
    def get_extra_state(self) -> Any:
        return self.weight.norm()


class OnlyGets(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


class Filters(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state.pop(kwargs.get("prefix", "") + "bias")
        return state


def hooked(register: str, hook: Any) -> nn.Module:
    module = nn.Linear(3, 3)
    getattr(module, register)(hook)
    return module


def adds_a_key(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[prefix + "version"] = torch.ones(1)


def copies_values(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].half()


def on_instance(module: nn.Module) -> nn.Module:
    module.state_dict = lambda *args, **kwargs: {}  # type: ignore[method-assign]
    return module


def recomputes(module: nn.Module, keys: Any) -> None:
    module.norm = module.weight.norm()


REFUSED: dict[str, Callable[[], nn.Module]] = {
    r"extra state of 'layer'.* is of type object": lambda: Scaled(object()),
    r"extra state of 'layer'/a/0 is of type set": lambda: Scaled({"a": [{1}]}),
    r"extra state of 'layer' is a tensor \(torch.complex128": lambda: Scaled(torch.ones(1, dtype=torch.complex128)),
    r"'layer.weight' is sharded.*used by 'norm'.*\(ReadsWeights\)": lambda: ReadsWeights(0),
    r"'layer' has get_extra_state without the other": lambda: OnlyGets(3, 3),
    r"'layer.kernel' is in the state dict, not.*'layer' \(Renames\)": lambda: Renames(3, 3),
    r"'layer.bias' is in the model, not.*\(Filters\)": lambda: Filters(3, 3),
    r"values of 'layer.weight' were used by 'mul'.*\(Doubles\)": lambda: Doubles(3, 3),
    r"'layer.version' is in the state dict": lambda: hooked("register_state_dict_post_hook", adds_a_key),
    r"'layer.weight'.*half": lambda: hooked("_register_state_dict_hook", copies_values),
    r"'layer.bias' is in the model": lambda: on_instance(nn.Linear(3, 3)),
    r"'layer.weight'.*norm": lambda: hooked("register_load_state_dict_post_hook", recomputes),
}


def refuse_hooks(stage: int) -> None:
    for message, build in REFUSED.items():
        model = nn.ModuleDict({"layer": build()})
        before = list(model.named_parameters())
        with pytest.raises(TypeError, match=f"(?s){message}"):
            minizero.Zero(model, stage=stage)
        assert all(p is q for (_, p), (_, q) in zip(model.named_parameters(), before, strict=True))
    odd_one = nn.ModuleDict({"layer": Scaled(object() if dist.get_rank() else 1)})
    with pytest.raises(ValueError, match="rank 1 has problem: the extra state of 'layer' is of type object"):
        minizero.Zero(odd_one, stage=stage)


def test_F85_what_a_full_state_could_not_carry_is_refused_by_name_before_anything_changes() -> None:
    run_ranks(2, refuse_hooks, 3)


class Cached(nn.Linear):
    """Loading resets a cache, old checkpoints had another name, a hook sees each load and each save."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[str] = []
        self._register_load_state_dict_pre_hook(self._old_name)
        self.register_load_state_dict_post_hook(lambda module, keys: module.seen.append("loaded"))
        self.register_state_dict_pre_hook(lambda module, prefix, keep_vars: module.seen.append("saved"))

    def _old_name(self, state: Any, prefix: str, *args: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.cache = None


def harmless() -> nn.Module:
    """What torch itself hooks in, besides."""
    torch.manual_seed(0)
    modules = [Cached(), nn.BatchNorm1d(3), nn.utils.spectral_norm(nn.Linear(3, 3))]
    modules += [nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), checkpoint_wrapper(nn.Linear(3, 3))]
    return nn.Sequential(*modules)


def keep_hooks(stage: int, folder: Path) -> None:
    model, plain = harmless(), harmless()
    zero = minizero.Zero(model, units=list(model), stage=stage)
    torch.manual_seed(5)
    model(torch.randn(4, 3)).sum().backward()
    zero.zero_grad()
    cached = model[0]
    for load in ("full state", "checkpoint"):
        if load == "checkpoint":
            checkpoint.save(folder, "x", zero, step=1)
        cached.cache, cached.seen = "stale", []
        if load == "full state":
            zero.load_full_state(plain.state_dict())
        else:
            checkpoint.load(folder, zero)
        assert cached.cache is None
        assert cached.seen[-1] == "loaded"
    state = zero.full_state()
    if dist.get_rank() == 0:
        assert_same(state, dict(plain.state_dict()))
        harmless().load_state_dict(state, strict=True)


@STAGES
def test_F85_hooks_that_leave_names_and_values_alone_are_called(stage: int, tmp_path: Path) -> None:
    run_ranks(2, keep_hooks, stage, tmp_path)


# ---- F95: each rank asks its own file system


def blind(method: str) -> Callable[..., Any]:
    """On rank 1 no file is ever there, as on a network file system that has not heard of it yet."""

    def not_there(self: Path, *args: Any, **kwargs: Any) -> Any:
        if method in ("exists", "is_file", "is_dir", "is_symlink"):
            return False
        raise FileNotFoundError(2, "No such file", str(self))

    return not_there


def one_rank_sees_nothing(folder: Path) -> None:
    rank = dist.get_rank()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = minizero.initialize(model=nn.Linear(3, 3), optimizer=partial(torch.optim.SGD, lr=0.1), config=config)
    assert engine.load_checkpoint(folder) == (None, None)  # nothing yet, for all
    engine.save_checkpoint(folder, "one")
    mine = folder if rank == 0 else folder / "elsewhere"
    for where, sees in ((folder, True), (mine, False)):
        begun = time.monotonic()
        if sees:
            with pytest.MonkeyPatch.context() as patch:
                for method in ("exists", "is_file", "is_dir", "is_symlink") if rank else ():
                    patch.setattr(Path, method, blind(method))
                path, _ = engine.load_checkpoint(where)
                assert path == str(folder / "one")
        else:
            with pytest.raises(CheckpointError, match=r"rank 1: .*elsewhere/one"):
                engine.load_checkpoint(where)
            with pytest.raises(CheckpointError, match=r"rank 1: .*elsewhere"):
                engine.save_checkpoint(where, "two")
            with pytest.raises(CheckpointError, match=r"rank 1: .*elsewhere/one"):
                checkpoint.load(where, engine.zero)
        assert time.monotonic() - begun < 10
    if rank:  # the folder of rank 1 is another one, with what a killed save has left
        (mine / "three.partial").mkdir(parents=True)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank 0: .*three.partial/rank-00001"):
        engine.save_checkpoint(mine, "three")
    # rank 0 sees no `latest`: then there is none for anybody
    assert engine.load_checkpoint(folder if rank else folder / "elsewhere2") == (None, None)
    assert (folder / "latest").read_text() == "one\n"


def test_F95_rank_0_says_which_files_are_there(tmp_path: Path) -> None:
    run_ranks(2, one_rank_sees_nothing, tmp_path / "shared", group_timeout=20)


# ---- F102: one file from a sharded checkpoint, without its model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.blocks = nn.ModuleList([Scaled(2.0), nn.BatchNorm1d(3)])
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.arange(5).to(torch.uint16), requires_grad=False)


def save_tied(stage: int, folder: Path) -> str:
    torch.manual_seed(1)
    model = Tied()
    zero = minizero.Zero(model, units=[model.embedding, *model.blocks], stage=stage)
    for tag, value in (("first", 1.0), ("second", 2.0)):
        model.blocks[0].value = value
        checkpoint.save(folder, tag, zero, zero.optimizer(minizero.AdamW), step=1)
    return text_of(dict(sorted(zero.full_state().items())))  # the pipe to the test does not know every dtype


def in_shell(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minizero.checkpoint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (3, 3)])
def test_F102_one_file_without_the_model(
    world: int, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run_ranks(world, save_tied, stage, tmp_path / "saved")[0]
    out = tmp_path / "one.safetensors"
    monkeypatch.setattr(one_file, "CHUNK", 16)
    largest, plain = [], one_file.parts_of
    monkeypatch.setattr(one_file, "parts_of", lambda *a: (largest.append(p[2].nbytes) or p for p in plain(*a)))
    monkeypatch.setattr(one_file, "durable", lambda path: files.durable(path))
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd, fsync=os.fsync: (synced.append(fd), fsync(fd)))
    assert one_file.merge(tmp_path / "saved", out) == tmp_path / "saved" / "second"
    assert len(largest) > 10  # in many pieces
    assert max(largest) <= 16  # each of them small: never a tensor, let alone the model
    assert len(synced) == 2  # the file, and its name in the folder
    found = one_file.read(out)
    assert text_of(dict(sorted(found.items()))) == wanted
    model = Tied()
    model.load_state_dict(found, strict=True)
    assert torch.equal(found["head.weight"], found["embedding.weight"])
    tensors = safetensors.torch.load_file(out)
    assert tensors.keys() == found.keys() - {"blocks.0._extra_state"}
    for folder, arguments in ((tmp_path / "saved", ["--tag", "first"]), (tmp_path / "saved/first", [])):
        done = in_shell(folder, tmp_path / "first.safetensors", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "first -> " in done.stdout
        assert one_file.read(tmp_path / "first.safetensors")["blocks.0._extra_state"] == 1.0
        (tmp_path / "first.safetensors").unlink()


def test_F102_what_cannot_become_one_file_is_said_in_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    run_ranks(2, save_tied, 3, saved)
    (tmp_path / "empty").mkdir()
    shutil.copytree(saved, tmp_path / "cut")
    (tmp_path / "cut/second/rank-00001.safetensors").unlink()
    shutil.copytree(saved, tmp_path / "bad")
    damaged = bytearray((tmp_path / "bad/second/rank-00001.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "bad/second/rank-00001.safetensors").write_bytes(damaged)
    (tmp_path / "there").write_text("old")
    cases: list[tuple[list[Any], str]] = [
        ([tmp_path / "none", out], "there is no folder .*none"),
        ([tmp_path / "empty", out], "no file named latest, and no manifest.json"),
        ([saved, out, "--tag", "third"], r"no checkpoint 'third' in .*latest has \['second', 'first'\]"),
        ([saved, out, "--tag", "../x"], "tag '../x' must be"),
        ([tmp_path / "cut", out], "No such file.*rank-00001"),
        ([tmp_path / "bad", out], "rank-00001.safetensors is damaged"),
        ([saved, tmp_path / "there"], "there is there already"),
        ([saved, tmp_path / "nowhere/out"], "there is no folder .*nowhere"),
    ]
    for arguments, message in cases:
        with pytest.raises(SystemExit) as exit_, pytest.MonkeyPatch.context() as patch:
            said: list[str] = []
            patch.setattr(sys.stderr, "write", said.append)
            one_file.main([str(argument) for argument in arguments])
        assert exit_.value.code == 1
        assert re.fullmatch(f"could not write .*: .*{message}.*\n", "".join(said)), said
    assert (tmp_path / "there").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad", "cut", "empty", "saved", "there"]


def test_F102_a_manifest_from_before_aliases_is_read(tmp_path: Path) -> None:
    run_ranks(2, save_tied, 3, tmp_path / "saved")
    path = tmp_path / "saved/second/manifest.json"
    content = json.loads(path.read_text())
    parameters = [p for flat in content["flats"] for p in flat["parameters"]]
    assert [p["aliases"] for p in parameters if p["name"] == "embedding.weight"] == [["head.weight"]]
    for parameter in parameters:
        del parameter["aliases"]
    path.write_text(json.dumps(content))
    one_file.merge(tmp_path / "saved", tmp_path / "out")
    assert "head.weight" not in one_file.read(tmp_path / "out")
    run_ranks(1, load_tied, tmp_path / "saved")


def load_tied(folder: Path) -> None:
    zero = minizero.Zero(Tied(), stage=1)
    checkpoint.load(folder, zero)
    assert zero.full_state()["blocks.0._extra_state"] == 2.0
