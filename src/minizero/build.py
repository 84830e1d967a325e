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
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from minizero.collectives import init_distributed
from minizero.config import Config, load_config, optimizer_class, scheduler_class
from minizero.engine import Engine
from minizero.offload import attach_offloaded
from minizero.optimizer import check_elementwise, slice_groups
from minizero.precision import LossScaler, Precision
from minizero.prefetch import ByBytes
from minizero.replicate import check_agreement
from minizero.zero import Zero

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Groups = list[dict[str, Any]]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
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
) -> tuple[Engine, Optimizer, Any, Any]:
    """(engine, optimizer, data loader or None, schedule or None), with DeepSpeed's arguments; call on all ranks.

    Args:
        args: an object whose `deepspeed_config` is the path, if `config` is not given.
        model: sharded in place, over all ranks. On the meta device it is initialised here, as `minizero.Zero` does.
        optimizer: built on the model's parameters, or a function that builds one from `model_parameters`; default: the
            one the configuration names. It is rebound to this rank's slices: the same object, with its groups and
            their values. It must not have stepped yet: shard first, then load a checkpoint.
        model_parameters: what that function, or the optimizer of the configuration, is to train; default: all.
        training_data: a dataset; each rank gets its share of it in micro-batches, put together by `collate_fn`.
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
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = None if model_parameters is None else _as_groups(model_parameters)
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        optimizer = optimizer(list(model.parameters()) if wanted is None else wanted)
    if optimizer is not None:
        groups: Groups | None = _named(optimizer.param_groups, names)
        _check_client(optimizer, loaded, lr_scheduler)
    elif loaded.optimizer is not None:
        groups = None if wanted is None else _named(wanted, names)
    else:
        raise ValueError('initialize() needs optimizer=, or an "optimizer" in the configuration')

    device = init_distributed()
    check_agreement([f"{key}: {value}" for key, value in loaded.model_dump().items()], None, "configurations")
    if ignored and dist.get_rank() == 0:
        warnings.warn(f"minizero ignores {', '.join(ignored)}; `python -m minizero.config FILE` says why", stacklevel=2)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)
    zero = Zero(model, units, stage=loaded.zero_optimization.stage, **_zero_options(loaded))
    optimizer = _build(zero, optimizer, groups, loaded)
    engine = Engine(zero, optimizer, _scaler(loaded), loaded, device)
    engine.lr_scheduler = _schedule(lr_scheduler, optimizer, loaded)
    if training_data is not None:
        engine.training_dataloader = _loader(training_data, collate_fn, engine)
    return engine, optimizer, engine.training_dataloader, engine.lr_scheduler


def _refuse(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"initialize() takes no {name}: there is data parallelism only, and the launcher's port")


def _load(config: Any, dist_init_required: bool | None) -> tuple[Config, tuple[str, ...]]:
    """Before there is a process group, a launcher's environment says how many ranks there will be."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    loaded, ignored = load_config(config, world)
    if loaded.zero_optimization.stage == 0:
        raise ValueError("zero_optimization.stage 0 is minizero.Replicated(model): initialize() builds 1, 2 and 3")
    if dist_init_required is False and not dist.is_initialized():
        raise ValueError("dist_init_required is False, but there is no process group")
    return loaded, ignored


def _only_one(config: Any, config_params: Any, args: Any) -> Any:
    given = [each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each is not None]
    if len(given) != 1:
        raise ValueError(f"initialize() needs one of config, config_params and args.deepspeed_config, got {len(given)}")
    return given[0]


def _as_groups(parameters: Iterable[Any]) -> Groups:
    listed = list(parameters)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def _named(groups: Groups, names: dict[int, str]) -> Groups:
    """The groups with names in place of parameters; those that are frozen are left out, as no step changes them."""
    found: Groups = []
    for i, group in enumerate(groups):
        parameters = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        for parameter in parameters:
            if id(parameter) not in names:
                raise KeyError(f"param group {i}: the parameter of shape {tuple(parameter.shape)} is not the model's")
        trained = [names[id(parameter)] for parameter in parameters if parameter.requires_grad]
        found.append({**group, "params": trained} | ({"param_names": trained} if "param_names" in group else {}))
    return found


def _check_client(optimizer: Optimizer, config: Config, scheduler: Any) -> None:
    check_elementwise(type(optimizer), config.zero_allow_untested_optimizer)
    for state in optimizer.state.values():
        if "step" not in state or state["step"] > 0:
            raise ValueError(
                f"the {type(optimizer).__name__} has stepped: its state is of whole parameters. Initialize first, then "
                "load a checkpoint"
            )
    if isinstance(scheduler, LRScheduler) and scheduler.optimizer is not optimizer:
        raise ValueError("lr_scheduler= is bound to another optimizer: the rates it sets would never be used")


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


def _schedule(given: Any, optimizer: Optimizer, config: Config) -> Any:
    if callable(given):
        return given(optimizer)
    if given is None and config.scheduler is not None:
        return scheduler_class(config.scheduler)(optimizer, **config.scheduler.params)
    if isinstance(given, LRScheduler) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        _mark_step(optimizer)
    return given


def _mark_step(optimizer: Optimizer) -> None:
    """Offloading has replaced `step()`, on which torch's schedules set a mark, to warn who steps them too early."""
    step: Any = optimizer.step

    def marked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked  # type: ignore[method-assign]


def _loader(data: Dataset[Any], collate_fn: Callable[..., Any] | None, engine: Engine) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, engine.world_size, engine.global_rank)
    drop_last = engine.config.dataloader_drop_last
    return DataLoader(data, engine.batch.micro, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last)
