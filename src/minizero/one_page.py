"""Chapter 10, one page: ZeRO-3 with nothing left out that it needs, and nothing in it that it does not.

    torchrun --nproc_per_node 3 -m minizero.one_page

trains a small GPT on three ranks, each with a third of everything, and on one process beside it, and compares the two
after every step. Needs PyTorch and nothing of this package. Chapter 10 shows what the page leaves out, and where the
book adds it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 65, 16, 32, 4, 3
BATCH = 12  # sequences of a step, over all ranks: for 2, 3, 4, 6 or 12 of them
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # PyTorch 2.13 renamed both
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Block(nn.Module):
    """Attention and MLP, (batch, context, WIDTH) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Tokens (batch, context) and the tokens that follow each -> the mean loss, in nats."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: D102
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = self.norm(h) @ self.tokens.weight.T  # the embedding again: one parameter, used twice
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


# ---- ZeRO-3 --------------------------------------------------------------------------


class Unit:
    """Parameters that come and go together: views of one buffer, with memory only while used.

    Each rank always keeps `shard`, 1/N of the buffer. It is all that the optimizer is given.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.gradients = parameters, dict[Tensor, Any]()
        self.ranks, rank = dist.get_world_size(), dist.get_rank()
        sizes = [p.numel() for p in parameters]
        self.padding = parameters[0].new_zeros(-sum(sizes) % self.ranks)  # N equal shards cover all
        self.full = torch.cat([*(p.detach().flatten() for p in parameters), self.padding])
        dist.broadcast(self.full, src=0)  # all ranks begin with rank 0's values
        self.shard = nn.Parameter(self.full.chunk(self.ranks)[rank].clone())
        for p, part in zip(parameters, self.full[: sum(sizes)].split(sizes), strict=True):
            p.data = part.view_as(p)
            p.register_post_accumulate_grad_hook(self.collect)
        self.free()
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(self.after_forward)

    def gather(self) -> None:
        """Make the parameters whole."""
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full.numel() * self.full.itemsize)  # all views are valid again
            all_gather(self.full, self.shard.detach())

    def free(self) -> None:
        """Let go of their memory. Whoever reads them now reads nothing."""
        self.full.untyped_storage().resize_(0)

    def after_forward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Free them until backward comes, which enters the unit through its output."""
        self.free()
        if output.requires_grad:
            output.register_hook(lambda gradient: self.gather())

    def collect(self, parameter: Tensor) -> None:
        """Keep a gradient; the last one means that backward has left the unit."""
        self.gradients[parameter], parameter.grad = parameter.grad, None
        if len(self.gradients) < len(self.parameters):
            return
        parts = [self.gradients.pop(p).flatten() for p in self.parameters]
        mean = torch.empty_like(self.shard)
        reduce_scatter(mean, torch.cat([*parts, self.padding]) / self.ranks)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        self.free()


# ---- train, beside one process that has everything -----------------------------------


def sharded(model: GPT) -> list[Unit]:
    """A unit for each block, and one for the rest."""
    units = [Unit(block, list(block.parameters())) for block in model.blocks]
    inside = set(model.blocks.parameters())
    return [*units, Unit(model, [p for p in model.parameters() if p not in inside])]


def differences(unit: Unit, twins: list[nn.Parameter]) -> list[float]:
    """The largest difference from one process, of the unit's parameters and of their gradients."""
    found = []
    for what in ("data", "grad"):  # AdamW hardly notices a gradient that is N times too large
        whole = torch.empty(unit.shard.numel() * unit.ranks)
        all_gather(whole, getattr(unit.shard, what))
        expected = torch.cat([getattr(p, what).flatten() for p in twins])
        found.append((whole[: len(expected)] - expected).abs().max().item())
    return found


def train(steps: int = 20) -> tuple[float, float]:
    """The last loss, and the largest difference from one process of any parameter or gradient in any step."""
    ranks, rank, worst = dist.get_world_size(), dist.get_rank(), 0.0
    if BATCH % ranks:
        raise ValueError(f"{ranks} ranks cannot share {BATCH} sequences: take 2, 3, 4, 6 or 12")
    torch.manual_seed(0)
    single, model = GPT(), GPT()
    if rank == 0:  # the others get these values by the broadcast
        model.load_state_dict(single.state_dict())
    twins = dict(zip(model.parameters(), single.parameters(), strict=True))
    units = sharded(model)
    optimizer = torch.optim.AdamW([unit.shard for unit in units], lr=1e-3)
    reference = torch.optim.AdamW(single.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(VOCAB, (BATCH, CONTEXT + 1))  # every rank draws all of it
        mine = batch.chunk(ranks)[rank]
        model(mine[:, :-1], mine[:, 1:]).backward()
        loss = single(batch[:, :-1], batch[:, 1:])
        loss.backward()
        assert not any(unit.full.untyped_storage().nbytes() for unit in units), "something is whole between steps"
        optimizer.step()
        reference.step()
        worst = max(worst, *(d for unit in units for d in differences(unit, [twins[p] for p in unit.parameters])))
        assert worst < 1e-12, f"{worst:.1e} from one process"
        optimizer.zero_grad()
        reference.zero_grad()
    return loss.item(), worst


def main() -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)  # a wrong step cannot hide in rounding
    loss, worst = train()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, loss {loss:.4f}, at most {worst:.1e} from one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
