"""Chapter 26, config: `initialize` puts a model, an optimizer and a configuration together, as DeepSpeed's does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from minizero.collectives import find_place, init_distributed
from minizero.config import Config, load_for_engine, optimizer_class
from minizero.engine.client import Groups, describe_data, make_schedule, plan
from minizero.engine.feed import Feed, check_data
from minizero.engine.run import Engine
from minizero.offload import attach_offloaded
from minizero.optimizer import slice_groups
from minizero.overlap import ByBytes
from minizero.precision import LossScaler, Precision
from minizero.replicate import check_agreement
from minizero.zero import Zero

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    units: Iterable[nn.Module] | None = None,
) -> tuple[Engine, Any, Any, Any]:
    """(engine, optimizer, data loader or None, schedule or None), with DeepSpeed's arguments; call on all ranks.

    Args:
        args: an object whose `deepspeed_config` is the path, if `config` is not given.
        model: sharded in place, over all ranks. On the meta device it is initialised here, as `minizero.Zero` does.
        optimizer: built on the model's parameters, or a function that builds one from `model_parameters`; default: the
            one the configuration names. It is rebound to this rank's slices: the same object, with its groups and
            their values. It must not have stepped yet: shard first, then load a checkpoint. Without any, a model
            whose parameters are all frozen is served, such as a reference model: forward only.
        model_parameters: what that function, or the optimizer of the configuration, is to train; default: all.
        training_data: a data set with a length, or an IterableDataset; each rank gets its share of it in micro-batches,
            put together by `collate_fn`, in another order in each epoch. See `minizero.engine.feed.Feed`.
        lr_scheduler: bound to `optimizer`, or a function that makes one for it; default: that of the configuration.
        config: a file or a dict; `config_params` is its old name.
        units: as for `minizero.Zero`.
        distributed_port, mpu, mesh_param: refused if given. dist_init_required: False expects a process group.

    Raises, on all ranks and before anything is changed: ConfigError, TypeError, ValueError or KeyError, naming the
    key, argument or parameter; without a process group if the file is wrong.
    """
    _refuse(distributed_port=distributed_port != 29500, mpu=mpu is not None, mesh_param=bool(mesh_param))
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize() needs model=, an nn.Module, got {type(model).__name__}")
    loaded, ignored = _load(_only_one(config, config_params, args), dist_init_required)
    if training_data is not None:
        check_data(training_data)
    optimizer, groups = plan(model, optimizer, model_parameters, lr_scheduler, loaded)

    device = init_distributed()
    described = [f"{key}: {value}" for key, value in loaded.model_dump().items()]
    described.append(f"training_data: {describe_data(training_data)}")
    check_agreement(described, None, "configurations")
    if ignored and dist.get_rank() == 0:
        warnings.warn(f"minizero ignores {', '.join(ignored)}; `python -m minizero.config FILE` says why", stacklevel=2)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)
    zero = Zero(model, units, stage=loaded.zero_optimization.stage, **_zero_options(loaded))
    if optimizer is not None or loaded.optimizer is not None:
        optimizer = _build(zero, optimizer, groups, loaded)
    engine = Engine(zero, optimizer, _scaler(loaded), loaded, device)
    if optimizer is not None:
        engine.lr_scheduler = make_schedule(lr_scheduler, optimizer, loaded)
    if training_data is not None:
        engine.training_dataloader = _loader(training_data, collate_fn, engine)
    return engine, optimizer, engine.training_dataloader, engine.lr_scheduler


def _refuse(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"initialize() takes no {name}: there is data parallelism only, and the launcher's port")


def _load(config: Any, dist_init_required: bool | None) -> tuple[Config, tuple[str, ...]]:
    """Before there is a process group, a launcher's environment says how many ranks there will be."""
    world = dist.get_world_size() if dist.is_initialized() else find_place().world
    loaded, ignored = load_for_engine(config, world)
    if dist_init_required is False and not dist.is_initialized():
        raise ValueError("dist_init_required is False, but there is no process group")
    return loaded, ignored


def _only_one(config: Any, config_params: Any, args: Any) -> Any:
    given = [each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each is not None]
    if len(given) != 1:
        raise ValueError(f"initialize() needs one of config, config_params and args.deepspeed_config, got {len(given)}")
    return given[0]


def _zero_options(config: Config) -> dict[str, Any]:
    options: dict[str, Any] = {}
    wire = DTYPES[config.communication_data_type] if config.communication_data_type else None
    if config.dtype != torch.float32 or wire is not None:
        options["dtypes"] = Precision(config.dtype, wire)
    ahead = config.zero_optimization.stage3_prefetch_bucket_size
    if ahead is not None and config.zero_optimization.stage == 3:
        options["prefetch"] = ByBytes(ahead * config.dtype.itemsize)
    return options


def _scaler(config: Config) -> LossScaler | None:
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    if fp16.loss_scale:
        return LossScaler(fp16.loss_scale, window=None, minimum=fp16.loss_scale)
    lowest = float(fp16.min_loss_scale)
    return LossScaler(2.0**fp16.initial_scale_power, fp16.loss_scale_window, fp16.hysteresis, lowest)


def _build(zero: Zero, optimizer: Optimizer | None, groups: Groups | None, config: Config) -> Optimizer:
    """The optimizer on this rank's slices, with its states where the configuration wants them."""
    if optimizer is None:
        assert config.optimizer is not None
        cls, options = optimizer_class(config.optimizer)
        optimizer = cls(slice_groups(zero.flats, groups), **options)
    else:
        rebind(optimizer, zero, groups)
    offload = config.zero_optimization.offload_optimizer
    if offload.device == "none":
        return zero.attach(optimizer, elementwise=True)
    return attach_offloaded(zero, optimizer, offload.nvme_path if offload.device == "nvme" else None, elementwise=True)


def rebind(optimizer: Optimizer, zero: Zero, groups: Groups | None) -> None:
    """Let an optimizer that was built on whole parameters update this rank's slices; it stays the same object.

    `groups` are its param groups with names of parameters. Schedules that hold the optimizer, or one of its groups, go
    on to set the rates that are used.
    """
    sliced = slice_groups(zero.flats, groups)
    fresh: Any = type(optimizer)  # Adagrad's state begins with the constructor
    optimizer.state = fresh([dict(group) for group in sliced]).state
    for group, new in zip(optimizer.param_groups, sliced, strict=True):
        group.update(new)


def _loader(data: Any, collate_fn: Callable[..., Any] | None, engine: Engine) -> Feed:
    place = engine.zero.world.rank, engine.world_size
    drop_last = engine.config.dataloader_drop_last
    return Feed(
        data, engine.batch.micro, place, engine.zero.world.shard, engine.warn_of_open_window, collate_fn, drop_last
    )
