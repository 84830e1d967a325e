"""Checkpoints under faults of public bug reports: F29 with saves, F34 to F38; kill -9, damage, hostile files."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import harness
import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from _rank import live_storages
from harness import RankFailure, run_ranks
from test_checkpoint import Everything, assert_same, everything_of, start, train
from torch import Tensor, nn

import minizero
from minizero import checkpoint, files, manifest
from minizero.data import Batches
from minizero.manifest import CheckpointError
from minizero.precision import LossScaler
from minizero.snapshot import Ranks

harness.preload("minizero.checkpoint", "minizero.precision", "test_checkpoint")
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
    from minizero import reading

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
        self.files = {files.__file__, sys.modules["minizero.snapshot"].__file__, checkpoint.__file__}

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
    Ranks(zero)  # connects the ranks: a kill in there makes the other wait, and there is nothing to see
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
