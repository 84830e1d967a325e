"""F15, F16, F19, F20, F25, F26, F88 to F90, F94, F99 as a user of `initialize` meets them, stages 1 to 3."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import preload, run_ranks
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import minizero
from minizero.collectives.launch import LaunchError, Place, choose_device, find_place, meeting_point

pytestmark = pytest.mark.ch26
preload("minizero.engine.build")


class Weight(nn.Module):
    """One weight w; forward is w · x."""

    def __init__(self, value: float = 0.0, size: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def start(stage: int, model: nn.Module, client: Any = None, schedule: Any = None, **keys: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    config |= keys
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return minizero.initialize(model=model, optimizer=client, lr_scheduler=schedule, config=config)[0]


def value(engine: Any) -> list[float]:
    """The weight, from its master slices on all ranks, exact."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [x for _, piece in engine.zero.named_slices() for x in piece.tolist()])
    return [x for part in everyone for x in part]


def on_all_stages(fn: Any, *args: Any) -> None:
    for stage in (1, 2, 3):
        try:
            fn(stage, *args)
        except BaseException as error:
            error.add_note(f"in stage {stage}")
            raise


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def feed(engine: Any, *xs: float, steps: bool = True) -> None:
    for x in xs:
        engine.backward(engine(torch.tensor(x)) + x)
        if steps:
            engine.step()


# ---- F15, F16


def mean_of_all_micro_batches(stage: int) -> None:
    mine = [(1.0, 3.0), (5.0, 7.0)][dist.get_rank()]
    model = Weight()
    engine = start(stage, model, sgd(model), gradient_accumulation_steps=2)
    feed(engine, *mine)
    assert value(engine) == [-4.0]
    assert engine.mean_loss() == 4.0
    assert engine.get_global_grad_norm() == 4.0

    model = Weight()
    engine = start(stage, model, sgd(model), gradient_accumulation_steps=2)
    with engine.no_sync():
        engine.backward(engine(torch.tensor(mine[0])))
    engine.step()
    feed(engine, mine[1])
    assert value(engine) == [-4.0]


def test_f15_the_gradient_of_a_window_is_the_mean_over_micro_batches_and_ranks() -> None:
    run_ranks(2, on_all_stages, mean_of_all_micro_batches)


def windows_by_hand(stage: int) -> None:
    model = Weight()
    engine = start(stage, model, sgd(model), gradient_accumulation_steps=1)
    engine.backward(engine(torch.tensor(1.0)))
    with pytest.raises(RuntimeError, match=r"engine\.backward\(\) twice without engine\.step\(\)"):
        engine.backward(engine(torch.tensor(3.0)))
    engine.step()
    assert value(engine) == [-1.0]

    model = Weight()
    engine = start(stage, model, sgd(model), gradient_accumulation_steps=2, managed_gradient_accumulation=False)
    feed(engine, 1.0, 3.0, steps=False)
    engine.step()
    assert value(engine) == [-2.0]
    feed(engine, 1.0, 1.0, 1.0, 1.0, steps=False)  # four halves
    engine.step()
    assert value(engine) == [-4.0]
    assert (engine.global_steps, engine.global_samples) == (2, 12)
    engine.backward(engine(torch.tensor(3.0)), scale_wrt_gas=False)
    engine.step()
    assert value(engine) == [-7.0]


def test_f16_a_second_backward_without_a_step_is_refused_or_added_where_the_file_says_so() -> None:
    run_ranks(2, on_all_stages, windows_by_hand)


# ---- F19, F20


def clipping_of_what_was_scaled(stage: int, scale: dict[str, Any]) -> None:
    model = Weight(size=2)
    engine = start(stage, model, sgd(model), gradient_clipping=1.0, fp16={"enabled": True, **scale})
    before = engine.loss_scale()
    engine.backward(engine(torch.tensor([3.0, 4.0])))
    engine.step()
    assert before in (256.0, 1024.0)
    assert engine.get_global_grad_norm() == pytest.approx(5.0)
    assert value(engine) == pytest.approx([-0.6, -0.8], rel=1e-6)


def test_f19_clipping_and_the_norm_that_is_told_know_nothing_of_the_loss_scale() -> None:
    for scale in ({"loss_scale": 1024}, {"initial_scale_power": 8}):
        run_ranks(2, on_all_stages, clipping_of_what_was_scaled, scale)


def overflows(stage: int) -> None:
    """Two elements on three ranks: the gradient that overflows is in a shard that one rank alone has."""
    model = Weight(1.0, size=3)
    scaling = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "min_loss_scale": 4}
    engine = start(stage, model, torch.optim.Adam(model.parameters(), lr=0.5), fp16=scaling)
    finite, infinite = torch.ones(3), torch.tensor([1.0, 1.0, 60000.0])
    engine.backward(engine(finite))
    engine.step()
    before = value(engine)
    for attempt, scale in enumerate([8.0, 4.0, 4.0]):
        engine.backward(engine(infinite * (1.0 if dist.get_rank() == 2 else 0.0)))
        engine.step()
        assert (engine.was_step_applied(), engine.get_global_grad_norm()) == (False, None)
        assert (engine.skipped_steps, engine.loss_scale()) == (attempt + 1, scale)
        assert value(engine) == before
    engine.backward(engine(finite))
    engine.step()
    assert engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps) == (5, 3)
    states = [state["step"] for state in engine.optimizer.state.values() if state]
    assert {float(step) for step in states} == {2.0}

    for keys, is_skipped in (
        ({"bf16": {"enabled": True}}, True),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, False),
        ({}, False),
    ):
        model = Weight(1.0, size=3)
        engine = start(stage, model, sgd(model), **keys)
        engine.backward(engine(torch.full((3,), float("nan") if dist.get_rank() == 1 else 1.0)))
        if is_skipped:
            engine.step()
            assert engine.skipped_steps == 1
        else:
            with pytest.raises(minizero.NonFiniteGradientError, match="no step was taken"):
                engine.step()
            engine.zero_grad()
        assert value(engine) == [1.0, 1.0, 1.0]
        engine.backward(engine(torch.ones(3)))
        engine.step()
        assert value(engine) == [0.0, 0.0, 0.0]


def test_f20_what_one_rank_finds_infinite_all_ranks_skip_or_raise_by_rule() -> None:
    run_ranks(3, on_all_stages, overflows)


# ---- F25


def rates_that_are_applied(stage: int, folder: str, own: bool) -> None:
    """Three steps of gradient 1, a window that overflows between the first two, saved and resumed before the last."""

    def begin() -> Any:
        model = Weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule: Any = {"scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.5}}}
        keys = {} if own else schedule
        halve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k) if own else None
        scaling = {"enabled": True, "initial_scale_power": 2}
        return start(stage, model, optimizer, halve, gradient_accumulation_steps=4, fp16=scaling, **keys)

    engine, applied = begin(), []
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    assert engine.lr_scheduler.optimizer is engine.optimizer
    for window in ([1.0] * 4, [1.0, float("inf"), 1.0, 1.0], [1.0] * 4):
        before = value(engine)[0]
        feed(engine, *window)
        applied.append(before - value(engine)[0])
    engine.save_checkpoint(f"{folder}/{stage}{own}")
    engine = begin()
    engine.load_checkpoint(f"{folder}/{stage}{own}")
    assert engine.get_lr() == [0.25]
    assert engine.skipped_steps == 1
    before = value(engine)[0]
    feed(engine, *[1.0] * 4)
    applied.append(before - value(engine)[0])
    assert applied == [1.0, 0.0, 0.5, 0.25], applied
    assert engine.get_lr() == [0.125]


def test_f25_the_rates_that_are_applied_are_the_schedule_s_and_a_skipped_step_uses_up_none(tmp_path: Any) -> None:
    for own in (True, False):
        run_ranks(2, on_all_stages, rates_that_are_applied, str(tmp_path), own)


# ---- F26


def decay(stage: int) -> None:
    params = {"lr": 0.1, "weight_decay": 0.1}
    decayed = {
        0.99: [("Adam", {}), ("AdamW", {}), ("AdamW", {"adam_w_mode": False}), ("adam", {"torch_adam": True})],
        0.9: [("Adam", {"adam_w_mode": False})],
    }
    for wanted, cases in decayed.items():
        for kind, more in cases:
            engine = start(stage, Weight(1.0), optimizer={"type": kind, "params": params | more})
            feed(engine, 0.0)
            assert value(engine) == pytest.approx([wanted], rel=1e-6), (kind, more)
    for cls, wanted in ((torch.optim.Adam, 0.9), (torch.optim.AdamW, 0.99)):
        model = Weight(1.0)
        engine = start(stage, model, cls(model.parameters(), **params))
        feed(engine, 0.0)
        assert value(engine) == pytest.approx([wanted], rel=1e-6), cls


class ByNorm(torch.optim.Optimizer):
    """Steps along the gradient divided by its norm: of a slice that is another one than of the whole."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()


def by_norm(stage: int) -> None:
    model = Weight(size=2)
    optimizer = ByNorm(model.parameters())
    with pytest.raises(TypeError, match="ByNorm is not known to treat every element by itself"):
        start(stage, model, optimizer)
    start(stage, model, optimizer, zero_allow_untested_optimizer=True)


def test_f26_adam_decays_as_its_name_and_adam_w_mode_say_and_norms_are_refused() -> None:
    run_ranks(2, on_all_stages, decay)
    run_ranks(2, on_all_stages, by_norm)


# ---- F88


class Stream(torch.utils.data.IterableDataset[Any]):
    """0 to 10; or, as if it knew of ranks, every second of them."""

    def __init__(self, shares_itself: bool = False) -> None:
        self.shares_itself, self.told = shares_itself, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        step, first = (2, dist.get_rank()) if self.shares_itself else (1, 0)
        return (torch.tensor(float(i)) for i in range(first, 11, step))


def fed(data: Any, **keys: Any) -> Any:
    model = Weight()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}} | keys
    engine, *_ = minizero.initialize(model=model, optimizer=sgd(model), config=config, training_data=data)
    return engine


def seen(loader: Any, limit: int = 99) -> list[int]:
    return [int(x) for batch in itertools.islice(loader, limit) for x in batch]


def shares(folder: str) -> dict[str, Any]:
    stream, listed = Stream(), fed([float(i) for i in range(12)])
    loader = fed(stream).training_dataloader
    found: dict[str, Any] = {"stream": [seen(loader), seen(loader)], "told": stream.told}
    found["listed"] = [seen(listed.training_dataloader) for _ in range(2)]
    seen(listed.training_dataloader, 1)  # a loop that is left
    rest = iter(listed.training_dataloader)
    first = seen(rest, 1)
    listed.save_checkpoint(folder)
    found["unbroken"] = first + seen(rest)
    again = fed([float(i) for i in range(12)], train_micro_batch_size_per_gpu=1)
    again.load_checkpoint(folder)
    found["resumed"] = first + seen(again.training_dataloader)
    again.training_dataloader.set_epoch(0)
    found["chosen"] = seen(again.training_dataloader)
    found["next"] = seen(again.training_dataloader)
    with pytest.raises(ValueError, match="training_data= begins with other samples on rank 1 than on rank 0"):
        seen(fed(Stream(shares_itself=True)).training_dataloader)
    again.training_dataloader.set_epoch(dist.get_rank())
    with pytest.raises(ValueError, match="rank 0 has sample 0 of epoch 0, rank 1 has sample 0 of epoch 1"):
        seen(again.training_dataloader)
    with pytest.raises(ValueError, match="rank 0 has training_data: 2 samples, rank 1 has training_data: 3 samples"):
        fed([0.0] * (2 + dist.get_rank()))
    wrong: list[tuple[Any, str]] = [
        ((x for x in [1.0]), "is a generator, and ends with one epoch"),
        ({"a": 1}, "a dict"),
    ]
    wrong.append((torch.utils.data.DataLoader([1.0]), "takes the data set, and makes the DataLoader"))
    for data, message in wrong:
        with pytest.raises(TypeError, match=message):
            fed(data)
    return found


def test_F88_each_rank_has_its_share_in_another_order_each_epoch_and_a_resumed_run_goes_on_in_it(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, shares, str(tmp_path))
    assert first["stream"] == [[0, 2, 4, 6, 8]] * 2
    assert second["stream"] == [[1, 3, 5, 7, 9]] * 2  # the eleventh would be one rank's alone
    assert first["told"] == [0, 1]
    for epoch in range(2):
        assert sorted(first["listed"][epoch] + second["listed"][epoch]) == list(range(12))
    for found in (first, second):
        assert found["listed"][0] != found["listed"][1]
        assert found["unbroken"] == found["resumed"]
        assert found["unbroken"] not in found["listed"]
        assert [found["chosen"], found["next"]] == found["listed"]


# ---- F89


def environment(**variables: Any) -> dict[str, str]:
    return {name: str(value) for name, value in variables.items()}


BATCH = environment(SLURM_JOB_ID=7, SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_LOCALID=0)
TASK = BATCH | environment(SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=5, SLURM_PROCID=4, SLURM_LOCALID=1, SLURM_NODEID=1)
TASK |= {"SLURM_STEP_TASKS_PER_NODE": "3,2", "SLURM_STEP_NODELIST": "gpu[003-004,9]-b,login1"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": str(n) for name, n in zip(("RANK", "SIZE", "LOCAL_RANK"), (1, 4, 1), strict=True)
}
TORCHRUN = environment(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, MASTER_ADDR="host", MASTER_PORT=1)


@pytest.mark.ch04
@pytest.mark.parametrize(
    ("told", "numbers"),
    [
        ({}, (0, 1, 0, 1)),
        (TORCHRUN, (5, 8, 1, 4)),
        (TASK | TORCHRUN | OPEN_MPI, (5, 8, 1, 4)),  # torchrun inside of a step
        (BATCH, (0, 1, 0, 1)),  # a batch script, or a notebook in it, is no task of a step
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}, (0, 1, 0, 1)),  # an interactive shell
        (TASK, (4, 5, 1, 2)),
        (environment(SLURM_PROCID=1, SLURM_NTASKS=2, SLURM_LOCALID=1), (1, 2, 1, 2)),
        (OPEN_MPI, (1, 4, 1, 4)),
        (BATCH | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 4, 1, 2)),
        (environment(PMI_RANK=1, PMI_SIZE=2, MPI_LOCALRANKID=0, MPI_LOCALNRANKS=1), (1, 2, 0, 1)),
        (environment(PMI_RANK=0, PMI_SIZE=1), (0, 1, 0, 1)),
        (environment(RANK=0, WORLD_SIZE=1) | TASK, (0, 1, 0, 1)),  # the way to single processes under srun
    ],
)
def test_F89_what_any_launcher_says_is_read(told: dict[str, str], numbers: tuple[int, ...]) -> None:
    assert find_place(told)[:4] == numbers


@pytest.mark.ch04
@pytest.mark.parametrize(
    ("told", "message"),
    [
        (environment(WORLD_SIZE=2), "sets WORLD_SIZE but not RANK: start it with `torchrun"),
        (environment(RANK=0), "sets RANK but not WORLD_SIZE: start it with `torchrun"),
        (environment(RANK=2, WORLD_SIZE=2), "RANK must be a whole number from 0 and below 2, got '2'"),
        (environment(RANK="", WORLD_SIZE=2), "RANK must be a whole number from 0 and below 2, got ''"),
        (environment(RANK=0, WORLD_SIZE="two"), "WORLD_SIZE must be a whole number from 1, got 'two'"),
        (environment(RANK=0, WORLD_SIZE=2, LOCAL_RANK=2), "LOCAL_RANK must be a whole number from 0 and below 2"),
        (environment(RANK=0, WORLD_SIZE=2), "RANK and WORLD_SIZE are set but not MASTER_ADDR"),
        (environment(OMPI_COMM_WORLD_RANK=0), "sets OMPI_COMM_WORLD_RANK but not OMPI_COMM_WORLD_SIZE"),
        (environment(PMI_SIZE=2), "sets PMI_SIZE but not PMI_RANK"),
        (environment(PMIX_RANK=0, PMIX_NAMESPACE="x"), "does not say how many there are"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "several machines, and does not say where they meet: set MASTER_",
        ),
        (OPEN_MPI | {"MASTER_PORT": "70000"}, "MASTER_PORT must be a whole number from 1 to 65535"),
    ],
)
def test_F89_half_a_description_is_an_error_that_says_what_starts_ranks(told: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as error:
        meeting_point(find_place(told), told)
    assert message in str(error.value)


@pytest.mark.ch04
def test_F89_ranks_of_a_launcher_meet_where_it_says_or_at_a_port_of_their_job() -> None:
    host, port = meeting_point(find_place(TASK), TASK)
    assert host == "gpu003-b"
    assert 10000 <= port < 30000
    other = TASK | {"SLURM_STEP_ID": "1"}
    assert meeting_point(find_place(other), other)[1] != port
    assert meeting_point(find_place(OPEN_MPI), OPEN_MPI)[0] == "127.0.0.1"
    chosen = OPEN_MPI | {"MASTER_ADDR": "there", "MASTER_PORT": "12"}
    assert meeting_point(find_place(chosen), chosen) == ("there", 12)


JOIN = """
import os
import sys
import torch
import torch.distributed as dist
import minizero

minizero.init_distributed(timeout=60)
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"{dist.get_rank()} of {dist.get_world_size()}: {total.item():g}")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.ch04
def test_F89_tasks_that_srun_started_are_one_group() -> None:
    pair = []
    for rank in range(2):
        task = environment(SLURM_JOB_ID=os.getpid(), SLURM_STEP_ID=3, SLURM_NTASKS=2, SLURM_STEP_NUM_TASKS=2)
        task |= environment(SLURM_PROCID=rank, SLURM_LOCALID=rank, OMP_NUM_THREADS=1)
        pair.append(
            subprocess.Popen([sys.executable, "-c", JOIN], env=os.environ | task, stdout=subprocess.PIPE, text=True)
        )
    try:
        assert [process.communicate(timeout=120)[0] for process in pair] == ["0 of 2: 2", "1 of 2: 2"]
    finally:
        for process in pair:
            process.kill()


@pytest.mark.ch04
@pytest.mark.parametrize(
    ("gpus", "device", "said"),
    [
        (["a", "b"], "cuda", ""),  # one to each task, as with --gpus-per-task=1: number 0 for both
        (["a", "a"], "cpu", "sees no GPU that no other rank uses, and NCCL wants one for each"),
        (["a", ""], "cpu", "rank 1 sees no GPU, and NCCL wants one for each"),
        (["", ""], "cpu", ""),
    ],
)
def test_F89_a_gpu_for_each_rank_or_the_cpu_for_all_and_an_unused_gpu_is_said_aloud(
    gpus: list[str], device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = threading.local()
    place.gpu = ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(place.gpu))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=place.gpu))
    store, found = HashStore(), dict[int, Any]()

    def choose(rank: int) -> None:
        place.gpu = gpus[rank]
        found[rank] = choose_device(store, Place(rank, 2, rank, 2))

    threads = [threading.Thread(target=choose, args=[rank], daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [str(found[rank][0]) for rank in range(2)] == ["cuda:0" if device == "cuda" else "cpu"] * 2
    for rank in range(2):
        assert (said in found[rank][1]) if said else found[rank][1] == ""


# ---- F90


class Counting:
    """A schedule of somebody's own, without a state_dict; on one rank it may raise, or set another rate."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self, raises_on: int = -1, differs: float = 0.0) -> None:
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.5**self.steps + differs * dist.get_rank()
        if raises_on == dist.get_rank():
            raise KeyError("of its own")


def steps_that_raise(stage: int) -> None:
    def counts() -> tuple[Any, ...]:
        rate = engine.optimizer.param_groups[0]["lr"]
        return value(engine), rate, engine.global_steps, engine.micro_steps, engine.lr_scheduler.state_dict()

    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    model = Weight(1.0)
    engine = start(stage, model, sgd(model), lambda optimizer: plateau(optimizer, patience=0, factor=0.5))
    engine.backward(engine(torch.tensor(1.0)))
    before = counts()
    with pytest.raises(TypeError, match="metrics"):
        engine.step()
    assert counts() == before
    engine.step({"metrics": 1.0})
    assert value(engine) == [0.0]
    engine.backward(engine(torch.tensor(1.0)))
    before = counts()
    with pytest.raises(
        ValueError, match=r"learning rates, now and after the step, differ by rank: \[1.0, 1.0\] on rank 0"
    ):
        engine.step({"metrics": [0.5, 2.0][dist.get_rank()]})
    assert counts() == before
    engine.step({"metrics": 2.0})
    assert (value(engine), engine.get_lr(), engine.global_steps) == ([-1.0], [0.5], 2)

    model = Weight(1.0)
    engine = start(stage, model, sgd(model), Counting)
    feed(engine, 1.0)
    assert (value(engine), engine.get_lr(), engine.lr_scheduler.steps) == ([0.0], [0.5], 1)
    engine.backward(engine(torch.tensor(1.0)))
    for options in ({"raises_on": 1}, {"differs": 0.5}, {"unknown": 1}):
        with pytest.raises((KeyError, RuntimeError, ValueError, TypeError)):
            engine.step(options)
        assert (value(engine), engine.get_lr(), engine.lr_scheduler.steps) == ([0.0], [0.5], 1)
    engine.step()
    assert (value(engine), engine.get_lr(), engine.lr_scheduler.steps) == ([-0.5], [0.25], 2)


def short_schedules(stage: int) -> None:
    """A schedule that cannot be stepped once more; and one that the program's optimizer cannot have."""
    model, config = Weight(1.0), {"type": "OneCycleLR", "params": {"max_lr": 1.0, "total_steps": 2}}
    engine = start(stage, model, torch.optim.Adam(model.parameters()), scheduler=config)
    feed(engine, 1.0)
    feed(engine, 1.0)
    before = value(engine), engine.global_steps
    engine.backward(engine(torch.tensor(1.0)))
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        engine.step()
    assert (value(engine), engine.global_steps) == before
    model, config = Weight(1.0), {"type": "CyclicLR", "params": {"base_lr": 0.1, "max_lr": 1.0}}
    with pytest.raises(ValueError, match="scheduler: CyclicLR cannot be stepped: ValueError: optimizer must support"):
        start(stage, model, torch.optim.Adagrad(model.parameters()), scheduler=config)
    start(stage, model, torch.optim.Adam(model.parameters()), scheduler=config)  # nothing was changed


def test_F90_a_step_that_raises_has_changed_nothing_and_rates_that_differ_by_rank_are_noticed() -> None:
    run_ranks(2, on_all_stages, steps_that_raise)
    run_ranks(2, on_all_stages, short_schedules)


# ---- F94


def other_rates(folder: str) -> list[str]:
    def begin(decay: float, steps: int) -> Any:
        optimizer = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": decay}}
        scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": 2}}
        return start(2, Weight(1.0), optimizer=optimizer, scheduler=scheduler)

    engine = begin(0.1, 10)
    feed(engine, 1.0)
    engine.save_checkpoint(folder)
    with warnings.catch_warnings(record=True) as caught:
        engine = begin(0.2, 20)
        warnings.simplefilter("always")
        engine.load_checkpoint(folder)
    assert engine.lr_scheduler.total_num_steps == 10
    return [str(warning.message) for warning in caught]


def test_F94_a_rate_or_an_option_that_is_not_the_file_s_after_a_resume_is_named(tmp_path: Path) -> None:
    first, second = run_ranks(2, other_rates, str(tmp_path))
    assert second == []
    assert [message.partition(", which")[0] for message in first] == [
        f"{name} in the configuration and was {was} in the run that was saved"
        for name, was in (("scheduler.params.total_num_steps is 20", 10), ("optimizer.params.weight_decay is 0.2", 0.1))
    ]


# ---- F99


def windows_that_end_early(stage: int, folder: str) -> None:
    for keys in ({}, {"managed_gradient_accumulation": False}, {"fp16": {"enabled": True, "loss_scale": 8}}):
        model = Weight()
        engine = start(stage, model, sgd(model), gradient_accumulation_steps=4, **keys)
        by_hand = "managed_gradient_accumulation" in keys
        feed(engine, 1.0, 1.0, 1.0, 1.0, steps=not by_hand)
        if by_hand:
            engine.step()
        assert value(engine) == [-1.0]
        feed(engine, 1.0, steps=not by_hand)
        feed(engine, 5.0, steps=False)  # the last one not stepped
        with pytest.raises(RuntimeError, match=r"2 micro-batches in the window: .* end_window\(\) steps with what"):
            engine.save_checkpoint(folder)
        engine.end_window()
        assert value(engine) == [-4.0]
        assert (engine.global_steps, engine.global_samples, engine.get_global_grad_norm()) == (2, 12, 3.0)
        engine.save_checkpoint(f"{folder}/{stage}{len(keys)}{by_hand}")
        engine.end_window()  # nothing is left
        assert (engine.global_steps, value(engine)) == (2, [-4.0])
        if not by_hand:
            assert [engine.is_gradient_accumulation_boundary()] == [False]
            feed(engine, 1.0, 1.0, 1.0)
            assert engine.global_steps == 2
            feed(engine, 1.0)  # the next window is a whole one
            assert (engine.global_steps, value(engine)) == (3, [-5.0])

    with engine.no_sync():
        engine.backward(engine(torch.tensor(2.0)))
    engine.step()
    engine.end_window()
    assert value(engine) == [-7.0]
    engine.backward(engine(torch.tensor(2.0)), scale_wrt_gas=False)
    engine.end_window()
    assert value(engine) == [-9.0]
    if stage == 1:  # in the others a backward of one rank alone waits for its peers
        feed(engine, *[1.0] * (1 + dist.get_rank()))
        with pytest.raises(RuntimeError, match=r"as many micro-batches, all divided alike, not \[1, 2\]"):
            engine.end_window()
    engine.zero_grad()
    engine.end_window()
    assert value(engine) == [-9.0]


def epochs_of_five() -> list[str]:
    engine = fed([1.0] * 10, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=2)
    for ends in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x in engine.training_dataloader:
                feed(engine, x.item())
                if ends and engine.micro_steps % 5 == 0:
                    engine.end_window()
        if ends:
            assert caught == []
        else:
            told = [str(warning.message) for warning in caught]
            engine.end_window()
    assert engine.global_steps == 6
    return told


def test_F99_a_window_that_data_leaves_open_is_ended_by_what_there_is_and_said_aloud(tmp_path: Path) -> None:
    run_ranks(2, on_all_stages, windows_that_end_early, str(tmp_path))
    first, second = run_ranks(2, epochs_of_five)
    assert second == []
    assert [message.partition(":")[0] for message in first] == ["the data ended 1 micro-batches into a window of 2"]


# ---- papercuts


def served(stage: int) -> None:
    model = Weight(2.0, size=3).requires_grad_(False)
    engine, optimizer, loader, schedule = minizero.initialize(
        model=model, config={"train_batch_size": 2, "zero_optimization": {"stage": stage}}
    )
    assert (optimizer, loader, schedule) == (None, None, None)
    assert engine.eval()(torch.ones(3)).item() == 6.0
    assert engine.get_lr() == []
    with pytest.raises(RuntimeError, match="made without an optimizer, to serve a frozen model"):
        engine.backward(torch.zeros(1, requires_grad=True).sum())
    with pytest.raises(ValueError, match="was given an lr_scheduler and no optimizer"):
        start(stage, Weight().requires_grad_(False), schedule=Counting)


def a_module(stage: int) -> None:
    model = Weight(1.0, size=4)
    engine = start(stage, model, sgd(model))
    wrapper = nn.ModuleDict({"policy": engine})
    assert isinstance(engine, nn.Module)
    assert list(engine.children()) == [model]
    assert [name for name, _ in wrapper.named_parameters()] == ["policy.module.w"]
    assert [module for module in wrapper.modules() if isinstance(module, Weight)] == [model]
    assert engine.train(False) is engine
    assert (engine.training, model.training) == (False, False)
    wrapper.train()
    assert (engine.training, model.training) == (True, True)
    calls = []
    engine.register_forward_hook(lambda module, args, output: calls.append(module))
    engine.to("cpu").apply(lambda module: calls.append(module))
    feed(engine, 1.0)
    assert calls == [model, engine, engine]
    assert value(engine) == [0.0] * 4
    if stage == 3:
        with pytest.raises(minizero.ShardedAccessError, match=r"zero\.full_state\(\)"):
            engine.state_dict()
    else:
        assert list(engine.state_dict()) == ["module.w"]
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a sharded model cannot be"):
            copies(engine)
    feed(engine, 1.0, steps=False)
    engine.zero_grad()
    assert all(piece.grad is None for _, piece in engine.zero.named_slices())


def test_a_frozen_model_is_served_without_an_optimizer_and_an_engine_is_a_module() -> None:
    run_ranks(2, on_all_stages, served)
    run_ranks(2, on_all_stages, a_module)
