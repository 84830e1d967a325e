"""One adapter for each way to train the same model: one process, torch DDP, FSDP2, DeepSpeed 1-3, minizero 0-3.

All have the same verbs, so the measuring scripts do not know which method they measure. An adapter takes a whole model,
alike on all ranks, and may take it apart. Libraries are imported where they are used: a run of torch's DDP must not be
able to feel DeepSpeed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minizero
from compare.deepspeed_op import quote_library_path
from minizero import GPT, checkpoint
from minizero.offload import offload_optimizer
from minizero.precision import Precision

DEEPSPEED_FILE = Path(__file__).resolve().parents[2] / "configs" / "zero3.json"

OptimizerClass = Callable[..., torch.optim.Optimizer]  # called with parameters and lr=


class Method:
    """Plain training on this rank alone: the one process everything is compared with, and the floor of bench.py.

    The other methods are variations of it. `optimizer_class(parameters, lr=lr)` is called once. A step has one backward
    for each of `parts` micro-batches, and clips to `max_norm`, if that is set, by the global norms that `norms` keeps.
    """

    parts, max_norm, exact_norm = 1, 0.0, False
    network: Any  # a module, or what the library makes of it
    optimizer: Any

    def __init__(self, model: GPT, optimizer_class: OptimizerClass, lr: float) -> None:
        self.network = self.distribute(model)
        self.optimizer = optimizer_class(self.network.parameters(), lr=lr)
        self.norms: list[float] = []

    def distribute(self, model: GPT) -> Any:
        """What the method does to the model before the optimizer is made."""
        return model

    def backward(self, x: Tensor, y: Tensor) -> float:
        """Forwards and backwards on this rank's tokens and targets, (B, T) each; returns their loss."""
        micro_batches = zip(x.chunk(self.parts), y.chunk(self.parts), strict=True)
        return sum(self.backward_part(*micro_batch) for micro_batch in micro_batches) / self.parts

    def backward_part(self, x: Tensor, y: Tensor) -> float:
        """One forward and backward; returns the loss on this part."""
        loss = self.network(x, y)
        (loss / self.parts).backward()
        return float(loss.item())

    def clip(self) -> float:
        """Scale the gradients to `max_norm`; returns their norm before, added up in float64 if `exact_norm`."""
        gradients: list[Tensor] = [parameter.grad for parameter in self.network.parameters()]
        norm = nn.utils.get_total_norm([g.double() for g in gradients] if self.exact_norm else gradients)
        nn.utils.clip_grads_with_norm_(self.network.parameters(), self.max_norm, norm)
        return float(norm)

    def update(self) -> None:
        """Let the optimizer move the parameters, and forget the gradients."""
        if self.max_norm:
            self.norms.append(self.clip())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, x: Tensor, y: Tensor) -> float:
        """One training step; returns the loss on this rank's part of the batch."""
        loss = self.backward(x, y)
        self.update()
        return loss

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by the model's own name. A collective; only rank 0 may look at the answer."""
        return {name: parameter.detach() for name, parameter in self.network.named_parameters()}


class InBF16(Method):
    """One process that computes in bf16, with fp32 masters: what the rows in bf16 are compared with, by hand."""

    def distribute(self, model: GPT) -> nn.Module:
        """The optimizer's model keeps fp32; a copy computes."""
        self.copy = copy.deepcopy(model).to(torch.bfloat16)
        return model

    def backward_part(self, x: Tensor, y: Tensor) -> float:
        """Round the masters, compute, add the gradients up in fp32."""
        pairs = list(zip(self.network.parameters(), self.copy.parameters(), strict=True))
        with torch.no_grad():
            for master, rounded in pairs:
                rounded.copy_(master)
        loss = self.copy(x, y)
        loss.backward()
        for master, rounded in pairs:
            assert rounded.grad is not None
            share = rounded.grad.to(master.dtype) / self.parts
            master.grad = share if master.grad is None else master.grad + share
            rounded.grad = None
        return float(loss.item())


class DDP(Method):
    """torch's DistributedDataParallel with its defaults."""

    def distribute(self, model: GPT) -> nn.Module:
        """Wrap the model; its parameters stay where they are."""
        return nn.parallel.DistributedDataParallel(model)

    def full_parameters(self) -> dict[str, Tensor]:
        """The wrapper puts "module." before each name."""
        return {name.removeprefix("module."): p for name, p in super().full_parameters().items()}


class FSDP2(Method):
    """torch's fully_shard, one unit per block and one for the rest: its tutorial's setup, and minizero's units."""

    def distribute(self, model: GPT) -> Any:
        """Shard in place; parameters become DTensors."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **self.policy())
        return fully_shard(model, mesh=mesh, **self.policy())

    def policy(self) -> dict[str, Any]:
        """Further arguments of fully_shard."""
        return {}

    def clip(self) -> float:
        """The norm is a DTensor, each rank's share of it."""
        norm: Any = nn.utils.clip_grad_norm_(self.network.parameters(), self.max_norm)
        return float(norm.full_tensor())

    def full_parameters(self) -> dict[str, Tensor]:
        """All-gather each DTensor."""
        parameters: dict[str, Any] = dict(super().full_parameters())
        return {name: parameter.full_tensor() for name, parameter in parameters.items()}


class FSDP2InBF16(FSDP2):
    """The same with parameters, activations and the gradients on the wire in bf16."""

    def policy(self) -> dict[str, Any]:
        """What is computed, and what is sent."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}


class RefusedError(Exception):
    """A method does not take this model, and says why."""


class DeepSpeed(Method):
    """DeepSpeed ZeRO with configs/zero3.json, where only the stage and the batch size are replaced.

    The file makes DeepSpeed do what the others do, no more and no less. No gradient clipping (its default is 1.0). One
    block of a width-384 GPT (1.8 million elements) in flight at a time: its default buckets of 5e8 elements would hold
    this model whole, and its persistence threshold would keep the small parameters on all ranks. Its replacement of
    torch.nn.functional.linear stays off: that would change the other methods in the same process as well. `keys` are
    added to the file's.

    Raises RefusedError for a float64 model in stage 3 where DeepSpeed takes the device to support fp16. It hands the
    model's dtype on as `dtype or torch.float16 if is_fp16_supported() else …`, which Python reads as
    `(dtype or torch.float16) if …`: elsewhere float64 is not looked at, there it is none of the three dtypes it allows.
    """

    def __init__(
        self, model: GPT, optimizer_class: OptimizerClass, lr: float, stage: int, micro_batch: int, **keys: Any
    ) -> None:
        config = json.loads(DEEPSPEED_FILE.read_text()) | keys
        config["zero_optimization"]["stage"] = stage
        config["train_batch_size"] = micro_batch * dist.get_world_size()
        # a client optimizer: one named in the file would be DeepSpeed's own compiled Adam, and another algorithm
        optimizer = optimizer_class(model.parameters(), lr=lr)
        self.stage, self.norms = stage, []
        quote_library_path()
        with contextlib.redirect_stdout(sys.stderr):  # it has news for the reader of a table
            import deepspeed

            try:
                engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            except AssertionError as error:
                if "Invalid data type torch.float64" not in str(error):
                    raise
                raise RefusedError(str(error)) from error
        self.network, self.optimizer, _, _ = engine

    def backward_part(self, x: Tensor, y: Tensor) -> float:
        """The engine scales, reduces and shards in its own backward; its step counts the micro-batches."""
        loss = self.network(x, y)
        self.network.backward(loss)
        if not self.network.is_gradient_accumulation_boundary():
            self.network.step()
        return float(loss.item())

    def update(self) -> None:
        """The engine's step also clips and forgets the gradients."""
        self.network.step()
        if self.max_norm:
            self.norms.append(float(self.network.get_global_grad_norm()))

    def full_parameters(self) -> dict[str, Tensor]:
        """Stages 1 and 2 hold everything between steps; stage 3 gathers. Of 16-bit parameters, the fp32 masters."""
        import deepspeed

        named = dict(self.network.module.named_parameters())
        if self.network.bfloat16_enabled():
            return {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in named.items()}
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=self.stage == 3):
            return {name: parameter.detach().clone() for name, parameter in named.items()}


class Replicated(Method):
    """minizero's stage 0: chapter 2's bucketed DDP."""

    def distribute(self, model: GPT) -> nn.Module:
        """Install the reductions in place."""
        self.controller = minizero.Replicated(model)
        return model


class MiniZero(Method):
    """minizero's stages 1 to 3, one unit per block and one for the rest."""

    def __init__(
        self, model: GPT, optimizer_class: Any, lr: float, stage: int, dtypes: Precision | None = None
    ) -> None:
        self.network = model
        self.zero = minizero.Zero(model, units=model.blocks, stage=stage, dtypes=dtypes)
        self.optimizer = self.zero.optimizer(optimizer_class, lr=lr)
        self.norms = []

    def clip(self) -> float:
        """Of all ranks' slices."""
        return self.zero.clip_grad_norm(self.max_norm)

    def full_parameters(self) -> dict[str, Tensor]:
        """Whole on rank 0, nothing elsewhere."""
        return self.zero.full_state()


class Offloaded(MiniZero):
    """minizero's stage 3 with masters and optimizer states in host memory."""

    def __init__(self, model: GPT, optimizer_class: Any, lr: float) -> None:
        self.network = model
        self.zero = minizero.Zero(model, units=model.blocks)
        self.optimizer = offload_optimizer(self.zero, optimizer_class, lr=lr)
        self.norms = []


class Resumed(MiniZero):
    """minizero's stage 3, but the first step is stage 1's: that model is saved, and gone when this one loads it."""

    def __init__(self, model: GPT, optimizer_class: OptimizerClass, lr: float) -> None:
        super().__init__(model, optimizer_class, lr, stage=1)
        self.optimizer_class, self.lr, self.is_resumed = optimizer_class, lr, False

    def step(self, x: Tensor, y: Tensor) -> float:
        """The first one ends with a checkpoint, and with another model in the place of this one."""
        loss = super().step(x, y)
        if not self.is_resumed:
            folder, config = shared_folder(), self.network.config
            dtype, device = (getattr(next(self.network.parameters()), name) for name in ("dtype", "device"))
            checkpoint.save(folder, "one", self.zero, self.optimizer, step=1)
            del self.network, self.zero, self.optimizer
            super().__init__(GPT(config).to(dtype).to(device), self.optimizer_class, self.lr, stage=3)
            checkpoint.load(folder, self.zero, self.optimizer)
            self.is_resumed = True
            remove_shared(folder)
        return loss


def shared_folder() -> Path:
    """A new folder for all ranks, where the script was started: /tmp is memory on some machines."""
    names = [tempfile.mkdtemp(prefix="checkpoints-", dir=".") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return Path(str(names[0])).absolute()


def remove_shared(folder: Path) -> None:
    """Remove it when all ranks are done with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def builders(micro_batch: int) -> dict[str, Callable[[GPT, OptimizerClass, float], Method]]:
    """Name -> constructor of every method; a rank is given `micro_batch` sequences a step."""
    named: dict[str, Callable[[GPT, OptimizerClass, float], Method]] = {"one": Method, "ddp": DDP, "fsdp2": FSDP2}
    for stage in (1, 2, 3):
        named[f"deepspeed{stage}"] = partial(DeepSpeed, stage=stage, micro_batch=micro_batch)
    named["minizero0"] = Replicated
    for stage in (1, 2, 3):
        named[f"minizero{stage}"] = partial(MiniZero, stage=stage)
    for name in (
        "one",
        "fsdp2",
        *(f"{library}{stage}" for library in ("deepspeed", "minizero") for stage in (1, 2, 3)),
    ):
        named[f"{name}-acc4"] = partial(in_parts, named[name], 1 if name == "one" else 4)
    named["one-bf16"], named["fsdp2-bf16"] = InBF16, FSDP2InBF16
    for stage in (1, 2, 3):
        bf16: dict[str, Any] = {"bf16": {"enabled": True}}
        named[f"deepspeed{stage}-bf16"] = partial(DeepSpeed, stage=stage, micro_batch=micro_batch, **bf16)
        named[f"minizero{stage}-bf16"] = partial(MiniZero, stage=stage, dtypes=Precision(torch.bfloat16))
    zero = json.loads(DEEPSPEED_FILE.read_text())["zero_optimization"] | {"offload_optimizer": {"device": "cpu"}}
    offload = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}  # else it refuses torch's optimizers
    named["deepspeed3-offload"] = partial(DeepSpeed, stage=3, micro_batch=micro_batch, **offload)
    named["minizero3-offload"] = Offloaded
    named["minizero3-resume"] = Resumed
    return named


MAX_NORM = 1.0  # of the clipping in rows that end in -acc4


def in_parts(build: Callable[..., Method], parts: int, *arguments: Any) -> Method:
    """The method with several micro-batches in a step, and clipping."""
    keys = {"gradient_accumulation_steps": parts, "gradient_clipping": MAX_NORM}
    is_deepspeed = isinstance(build, partial) and build.func is DeepSpeed
    method = build(*arguments, **keys) if is_deepspeed else build(*arguments)
    method.parts, method.max_norm = parts, MAX_NORM
    return method
