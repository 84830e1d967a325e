"""Chapter 26, config: one `ds_config.json` for DeepSpeed and minizero, with every key accounted for.

The models hold the keys that minizero uses, with DeepSpeed's names and defaults. What becomes of every other key of
DeepSpeed's is in the table of `keys`; a key that is in neither is an error.

    python -m minizero.config ds_config.json --params 1.3B --ranks 8      # explains a file key by key
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from minizero.config.explain import bytes_of, key_by_key
from minizero.config.read import ConfigError, Count, Real, Size, complaints, read_json, sift
from minizero.config.schedules import SCHEDULES
from minizero.config.trial import problems_of_names, problems_of_optimizer, problems_of_schedule
from minizero.memory import _count, _Parser
from minizero.optimizer import ELEMENTWISE, Adam, AdamW

Source = str | os.PathLike[str] | Mapping[str, Any]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FP16(_Model):
    """`"fp16"`: fp16 weights and activations, with a loss scale."""

    enabled: bool = False
    loss_scale: Real = 0.0
    initial_scale_power: Size = 16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    min_loss_scale: Count = 1


class BF16(_Model):
    """`"bf16"`: bf16 weights and activations."""

    enabled: bool = False
    check_grad_overflow: bool = True


class OffloadOptimizer(_Model):
    """`"offload_optimizer"`: where master weights and optimizer states live; `nvme_path` is a folder."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.device == "nvme" and self.nvme_path is None:
            raise ValueError('device "nvme" needs nvme_path, a folder')
        return self


class ZeroOptimization(_Model):
    """`"zero_optimization"`: the stage, and what only a stage can do."""

    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    stage3_prefetch_bucket_size: Size | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stage == 0 and self.offload_optimizer.device != "none":
            raise ValueError("offload_optimizer needs stage 1, 2 or 3")
        return self


class Named(_Model):
    """`"optimizer"` or `"scheduler"`: a class by name, and what goes to its constructor."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class Batch(NamedTuple):
    """train = micro * steps * ranks, in samples."""

    train: int
    micro: int
    steps: int


class Config(_Model):
    """What minizero takes from a configuration. `model_dump_json(indent=2)` shows it with all defaults filled in."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    managed_gradient_accumulation: bool = True
    gradient_clipping: Real = 1.0
    dataloader_drop_last: bool = False
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    zero_allow_untested_optimizer: bool = False
    optimizer: Named | None = None
    scheduler: Named | None = None
    fp16: FP16 = FP16()
    bf16: BF16 = BF16()
    zero_optimization: ZeroOptimization = ZeroOptimization()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError("fp16 and bf16 are both enabled: choose one")
        if self.zero_optimization.stage == 0 and self.dtype != torch.float32:
            raise ValueError("fp16 and bf16 need zero_optimization.stage 1, 2 or 3")
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Of weights in forward and backward."""
        return torch.float16 if self.fp16.enabled else torch.bfloat16 if self.bf16.enabled else torch.float32

    def batch(self, world: int) -> Batch:
        """The three batch sizes for `world` ranks, with what is missing inferred; raises ValueError as DeepSpeed does.

        A missing train batch size is the product, a missing factor the quotient; one size alone: no accumulation.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if train is None and micro is None:
            raise ValueError("train_batch_size or train_micro_batch_size_per_gpu must be there")
        if steps is None:
            steps = 1 if train is None or micro is None else train // (micro * world)
        if micro is None:
            micro = 0 if train is None else train // (steps * world)
        train = micro * steps * world if train is None else train
        if train != micro * steps * world:
            raise ValueError(
                f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} * "
                f"gradient_accumulation_steps {steps} * {world} ranks"
            )
        return Batch(train, micro, steps)


def load_config(config: Source, world: int | None = None) -> tuple[Config, tuple[str, ...]]:
    """The configuration in a file or dict, and the paths of its keys that minizero ignores.

    `world` ranks fill in the batch sizes; None: leave them as they are. Raises ConfigError, which lists all that is
    wrong, with the path of each key; OSError for a file that cannot be read.
    """
    source, content = read_json(config)
    problems: list[str] = []
    ignored: list[str] = []
    used = sift(content, "", problems, ignored)
    if not problems:
        try:
            loaded = Config.model_validate(used)
        except ValidationError as error:
            raise ConfigError(source, list(complaints(error))) from None
        problems += _problems_of_classes(loaded)
        if world is not None:
            try:
                sizes = loaded.batch(world)
                names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
                loaded = loaded.model_copy(update=dict(zip(names, sizes, strict=True)))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError(source, problems)
    return loaded, tuple(ignored)


def load_for_engine(config: Source, world: int) -> tuple[Config, tuple[str, ...]]:
    """As `load_config`; what `initialize` does not build is refused as well."""
    loaded, ignored = load_config(config, world)
    if loaded.zero_optimization.stage == 0:
        source = "config" if isinstance(config, Mapping) else os.fspath(config)
        told = "zero_optimization.stage 0 is minizero.Replicated(model): initialize() builds 1, 2 and 3"
        raise ConfigError(source, [f"{told}; without the key it is 0"])
    return loaded, ignored


def optimizer_class(named: Named) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class that `"optimizer"` names, and the options for its constructor.

    As in DeepSpeed, "Adam" means decoupled weight decay unless `adam_w_mode` is false, and no decay if none is given.
    Raises ValueError for a name that minizero has no element-wise optimizer for.
    """
    options = dict(named.params)
    if named.type.lower() in ("adam", "adamw"):
        decoupled = options.pop("adam_w_mode", True) or named.type.lower() == "adamw"
        options.pop("torch_adam", None)  # chooses an implementation of the same update
        return (AdamW if decoupled else Adam), {"weight_decay": 0.0, **options}
    classes = {cls.__name__: cls for cls in ELEMENTWISE}
    name = {"adagrad": "Adagrad"}.get(named.type.lower(), named.type)
    if name not in classes:
        raise ValueError(f"{named.type!r} is none of {', '.join(sorted(classes))}")
    return classes[name], options


def scheduler_class(named: Named) -> type[LRScheduler]:
    """The class that `"scheduler"` names: one of DeepSpeed's warm-ups, or one of torch's. Raises ValueError."""
    found = SCHEDULES.get(named.type) or getattr(torch.optim.lr_scheduler, named.type, None)
    if not (isinstance(found, type) and issubclass(found, LRScheduler)):
        raise ValueError(f"{named.type!r} is none of {', '.join(SCHEDULES)}, and no scheduler of torch")
    return found


def _problems_of_classes(config: Config) -> list[str]:
    problems: list[str] = []
    named, path = config.optimizer, "optimizer"
    try:
        if named is not None:
            cls, options = optimizer_class(named)
            more = ["adam_w_mode", "torch_adam"] if issubclass(cls, Adam) else []
            problems += problems_of_names(path, cls, named.params, more) or problems_of_optimizer(cls, options)
    except ValueError as error:
        problems.append(f"{path}.type: {error}")
    named, path = config.scheduler, "scheduler"
    try:
        if named is not None:
            kind = scheduler_class(named)
            problems += problems_of_names(path, kind, named.params) or problems_of_schedule(kind, named.params)
    except ValueError as error:
        problems.append(f"{path}.type: {error}")
    return problems


def main(arguments: Sequence[str] | None = None) -> None:
    """Explain the file on the command line; a file that minizero refuses is explained too, and exits with 2."""
    parser = _Parser("python -m minizero.config", description="What minizero and DeepSpeed make of each key of a file.")
    parser.add_argument("file")
    parser.add_argument("--params", type=_count, help="parameters, for the bytes it leads to: 7.5e9, 7.5B, 350M")
    parser.add_argument("--ranks", type=_count, default=1, help="default 1")
    options = parser.parse_args(arguments)
    try:
        print(key_by_key(*read_json(options.file)))
        config, _ = load_for_engine(options.file, options.ranks)
    except (ConfigError, OSError) as error:
        parser.error(str(error))
    print(f"\n{options.ranks} ranks, {Batch(*config.batch(options.ranks))}")
    zero = config.zero_optimization
    if options.params:
        print(bytes_of(options.params, options.ranks, zero.stage, config.dtype, zero.offload_optimizer.device))
