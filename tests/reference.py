"""A sharded model and the same model in one process, trained side by side on the same data and compared.

Everything here runs inside a rank function started by `harness.run_ranks`. Batches are listed for all ranks,
`batches[step][rank]`, and are the same list on every rank: the sharded model takes this rank's, the reference takes
them all and averages, which is the loss on the concatenated batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minizero


def in_double(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` on a rank, with float64 as the default: what differs then is wrong, not rounded otherwise."""
    torch.set_default_dtype(torch.float64)
    return fn(*args)


def random_batches(steps: int, *shape: int, seed: int = 1, dtype: torch.dtype | None = None) -> list[list[Tensor]]:
    """`batches[step][rank]`: a different normal tensor of `shape` for each."""
    generator = torch.Generator().manual_seed(seed)
    world = dist.get_world_size()
    return [[torch.randn(shape, generator=generator, dtype=dtype) for _ in range(world)] for _ in range(steps)]


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    """The default loss: the mean square of the model's output."""
    return model(batch).square().mean()


class Pair:
    """`model`, sharded by `zero` and updated by `optimizer`, next to `reference` and `reference_optimizer`.

    `build()` makes the model; it runs with the same seed for both, on all ranks. `units(model)` picks the units.
    Parameters without a gradient count as zero in minizero, so the reference fills in zeros before its step.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        stage: int,
        *,
        units: Callable[[nn.Module], Iterable[nn.Module]] | None = None,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        options: dict[str, Any] | None = None,
        clip: float | None = None,
        loss_of: Callable[[nn.Module, Any], Tensor] = mean_square,
        **zero_options: Any,
    ) -> None:
        self.clip, self.loss_of = clip, loss_of
        torch.manual_seed(0)
        self.reference = build()
        torch.manual_seed(0)
        self.model = build()
        self.zero = minizero.Zero(self.model, units(self.model) if units else None, stage=stage, **zero_options)
        options = {"lr": 0.1, "weight_decay": 0.1} if options is None else options
        self.optimizer = self.zero.optimizer(optimizer, **options)
        trained = [p for p in self.reference.parameters() if p.requires_grad]
        self.reference_optimizer = optimizer(trained, **options)

    def backward(self, batches: Sequence[Any]) -> float:
        """One forward and backward of each; returns the reference's loss. `batches[rank]`."""
        self.loss_of(self.model, batches[dist.get_rank()]).backward()
        losses = [self.loss_of(self.reference, batch) for batch in batches]
        loss = torch.stack(losses).sum() / len(losses)
        loss.backward()
        return loss.item()

    def step(self, set_to_none: bool = True) -> float | None:
        """Clip (if asked), step and zero the gradients of both; returns the norm before clipping."""
        norm = None
        trained = [p for p in self.reference.parameters() if p.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.clip is not None:
            norm = self.zero.clip_grad_norm(self.clip)
            expected = nn.utils.clip_grad_norm_(trained, self.clip)
            assert_close(torch.tensor(norm, dtype=torch.float64), expected.detach(), "gradient norm")
        self.optimizer.step()
        self.reference_optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.reference_optimizer.zero_grad(set_to_none=set_to_none)
        return norm

    def check_gradients(self) -> None:
        """The shards of the gradients, put together, are the reference's; zeros where it has none. Before `step`.

        Stage 1 reduces when somebody asks for the norm, so this asks.
        """
        if self.zero.stage == 1:
            self.zero.clip_grad_norm(float("inf"))
        found = full_gradients(self.zero)
        for name, parameter in self.reference.named_parameters():
            if parameter.requires_grad:
                wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                got = found.pop(name)
                assert got is not None or not wanted.any(), f"{name} has no gradient"
                assert_close(torch.zeros_like(wanted) if got is None else got.view_as(wanted), wanted, f"{name}.grad")
        assert not found, f"gradients of {sorted(found)} belong to no parameter"

    def check(self) -> None:
        """Same names and parameter values as the reference, on every rank, and nothing left gathered."""
        state, wanted = self.zero.full_state(), self.reference.state_dict()
        if dist.get_rank() == 0:
            assert set(state) == set(wanted)
            check_values(state, self.reference)
        else:
            assert state == {}
        if self.zero.stage < 3:
            check_values(dict(self.model.named_parameters()), self.reference)
        check_clean(self.zero)


def train_like_one_process(
    build: Callable[[], nn.Module],
    batches: Sequence[Sequence[Any]],
    stage: int,
    **options: Any,
) -> Pair:
    """Train both on `batches[step][rank]`, with gradients, values and loose ends checked after each step.

    `options` are those of Pair: units, optimizer, options, clip, loss_of, and what Zero takes.
    """
    pair = Pair(build, stage, **options)
    pair.check()
    for step, per_rank in enumerate(batches):
        pair.backward(per_rank)
        if stage > 1 or step % 2 == 1:  # so that in stage 1 some steps have to reduce by themselves
            pair.check_gradients()
        pair.step()
        pair.check()
    return pair


def full_gradients(zero: minizero.Zero) -> dict[str, Tensor | None]:
    """name -> the whole gradient, 1-D, from the slices of all ranks; None where no rank has one. On all ranks."""
    mine = {name: None if piece.grad is None else piece.grad.detach().clone() for name, piece in zero.named_slices()}
    everyone: list[Any] = [None] * zero.world.size
    dist.all_gather_object(everyone, mine, group=zero.world.shard)
    return {name: None if mine[name] is None else torch.cat([part[name] for part in everyone]) for name in mine}


def assert_close(found: Tensor, wanted: Tensor, name: str) -> None:
    """Equal to rounding: fp64 1e-9, fp32 1e-5, lower precision 1/64; same shape and dtype."""
    rtol, atol = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-5, 1e-7)}.get(wanted.dtype, (1 / 64, 1e-3))
    if name == "gradient norm":
        found = found.to(wanted.dtype)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def check_values(found: dict[str, Tensor], reference: nn.Module) -> None:
    """Every parameter in `found` has the value, shape and dtype that `reference` has under that name."""
    parameters = dict(reference.named_parameters(remove_duplicate=False))
    for name in found.keys() & parameters.keys():
        assert_close(found[name].detach(), parameters[name].detach(), name)


def check_clean(zero: minizero.Zero) -> None:
    """Between steps: no gradient on the full parameters, none waited for, and with stage 3 nothing gathered."""
    for unit in zero.units:
        assert not unit.use.in_backward, f"unit {unit.name!r} still awaits gradients, or counts calls in backward"
        for flat in unit.flats:
            left = [Tensor.grad.__get__(leaf) for leaf in flat.leaves]  # its class would say where the gradient is
            assert left == [None] * len(left), f"{flat.names}: gradient left on the full parameter"
            if zero.stage == 3:
                assert unit.state == "SHARDED", f"unit {unit.name!r} is {unit.state}"
                assert flat.full.untyped_storage().nbytes() == 0, f"unit {unit.name!r} holds full parameters"
