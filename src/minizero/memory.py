"""Where the bytes of a training run go, before anything is run. Chapters 1 and 3.

One idea: every stage of ZeRO divides one more term of the same sum by the number of ranks. The sum is parameters,
gradients and optimizer states; stage 1 divides the last term, stage 2 the last two, stage 3 all three. What comes on
top (activations, gathered units, padding) and what each stage sends is computed here as well.

Counts are elements, sizes are bytes, GB is 10⁹ bytes as in the papers. An argument that is out of range raises
ValueError with its name. Nothing here measures: chapters and tests hold these numbers against real tensors.

    python -m minizero.memory --params 7.5e9 --ranks 64
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import NoReturn


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of each kind of model state, when the optimizer is Adam.

    Attributes:
        parameters: the weights that forward and backward use.
        gradients: what backward leaves behind.
        optimizer: what only the optimizer reads.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes per parameter in all."""
        return self.parameters + self.gradients + self.optimizer


# The 16, 18 and 20 bytes per parameter people argue about are all right, each for another program.
PRECISIONS = {
    # 4 weight + 4 gradient + 4 momentum + 4 variance = 16: everything in fp32.
    "fp32": Precision(4, 4, 8),
    # 2 weight + 2 gradient + 4 master weight + 4 momentum + 4 variance = 16: the paper's K = 12 (ZeRO, section 3.1).
    # The optimizer reads the 16-bit gradient as it is, converting on the way.
    "mixed": Precision(2, 2, 12),
    # 2 weight + 4 gradient + 12 = 18: gradients are summed in fp32, and the 16-bit one is freed as soon as it is added.
    # Megatron's count for "bf16 parameters, fp32 gradients"; stage 1 leaves 6 + 12/N.
    "mixed-fp32-gradients": Precision(2, 4, 12),
    # 2 weight + 2 gradient + 4 fp32 copy of the gradient + 12 = 20: the optimizer converts all gradients first.
    # The copy is the optimizer's and sharded with it. Megatron's count for 16-bit gradients; stage 1 leaves 4 + 16/N.
    "mixed-gradient-copy": Precision(2, 2, 16),
}


@dataclass(frozen=True)
class ModelStates:
    """Bytes of model states on the fullest rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of the three kinds together."""
        return self.parameters + self.gradients + self.optimizer


def model_states(params: int, ranks: int, stage: int, precision: str | Precision = "mixed") -> ModelStates:
    """Bytes that `params` trainable parameters keep on the fullest of `ranks` ranks (ZeRO, section 5 and figure 1).

    With Ψ parameters, N ranks and 2 + 2 + K bytes per parameter: stage 0 keeps (2 + 2 + K)Ψ, stage 1 (2 + 2)Ψ + KΨ/N,
    stage 2 2Ψ + (2 + K)Ψ/N, and stage 3 (2 + 2 + K)Ψ/N. A shard holds whole elements: Ψ/N is rounded up.

    Args:
        params: Ψ in elements. To count padding too, give `sum(units) + padding(units, ranks)`.
        ranks: N, data-parallel ranks.
        stage: 0 (replicated) to 3.
        precision: a key of `PRECISIONS`, or your own `Precision`.
    """
    check_positive(params=params, ranks=ranks)
    _check_stage(stage)
    if isinstance(precision, str):
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        precision = PRECISIONS[precision]
    shard = shard_elements(params, ranks)
    return ModelStates(
        parameters=precision.parameters * (shard if stage >= 3 else params),
        gradients=precision.gradients * (shard if stage >= 2 else params),
        optimizer=precision.optimizer * (shard if stage >= 1 else params),
    )


def shard_elements(elements: int, ranks: int) -> int:
    """Elements of each rank's shard of a flat buffer: elements / ranks, rounded up."""
    check_positive(elements=elements, ranks=ranks)
    return -(-elements // ranks)


def padding(units: Sequence[int], ranks: int) -> int:
    """Elements that make every unit's flat buffer divide by `ranks`, summed; below `len(units) * ranks`.

    Args:
        units: elements of each unit's flat buffer.
        ranks: N.
    """
    return sum(shard_elements(unit, ranks) * ranks - unit for unit in units)


def gathered_bytes(units: Sequence[int], ranks: int, bytes_per_element: int, prefetch: int = 1) -> int:
    """Most bytes of gathered weights that stage 3 holds at a moment, on top of the shards.

    While a unit computes, the next `prefetch` units are on their way: the largest run of `prefetch + 1` consecutive
    units is there at once, padding included. A root unit that stays for the whole pass comes on top, and in backward
    the full gradients of the unit at work.

    Args:
        units: elements of each unit, in the order of execution.
        ranks: N.
        bytes_per_element: of a gathered weight.
        prefetch: units gathered ahead, 0 for none.
    """
    check_positive(units=len(units), bytes_per_element=bytes_per_element)
    if type(prefetch) is not int or prefetch < 0:
        raise ValueError(f"prefetch must be an integer of 0 or more, got {prefetch!r}")
    full = [shard_elements(unit, ranks) * ranks for unit in units]
    runs = (sum(full[first : first + prefetch + 1]) for first in range(len(full)))
    return bytes_per_element * max(runs)


def traffic(params: int, ranks: int, stage: int, bytes_per_element: int) -> int:
    """Bytes that each rank sends in one training step (ZeRO, section 7), receiving as many.

    An all-gather or a reduce-scatter of Ψ elements sends Ψ(N−1)/N. Stage 0 does an all-reduce, which is one of each;
    stages 1 and 2 reduce-scatter gradients and all-gather updated weights: 2Ψ(N−1)/N. Stage 3 gathers the weights
    twice, for forward and for backward: 3Ψ(N−1)/N. The N−1 shards are counted with their padding.

    Args:
        params: Ψ in elements.
        ranks: N.
        stage: 0 to 3.
        bytes_per_element: on the wire.
    """
    check_positive(params=params, ranks=ranks, bytes_per_element=bytes_per_element)
    _check_stage(stage)
    passes = 3 if stage == 3 else 2
    return passes * (ranks - 1) * shard_elements(params, ranks) * bytes_per_element


def paper_activation_bytes(batch: int, sequence: int, width: int, heads: int, keep: str = "all") -> int:
    """Bytes one transformer block keeps for its backward, as Korthikanti et al. count them (2022, section 4.1).

    16-bit activations, dropout masks of one byte. With sequence s, batch b, width h, heads a:

    - `keep="all"`: sbh(34 + 5as/h). The second term belongs to the scores of all pairs of positions.
    - `keep="no-scores"`: 34sbh. Scores are computed again in backward (their section 5; flash attention does so too).
    - `keep="input"`: 2sbh. Full activation checkpointing keeps the block's input and repeats the forward in backward;
      the one block that backward is in has "all" again.

    No stage of ZeRO divides these: each rank has its own samples.
    """
    check_positive(batch=batch, sequence=sequence, width=width, heads=heads)
    values = sequence * batch * width
    kept = {"all": 34 * values + 5 * heads * sequence**2 * batch, "no-scores": 34 * values, "input": 2 * values}
    if keep not in kept:
        raise ValueError(f"keep must be one of {', '.join(kept)}, got {keep!r}")
    return kept[keep]


def block_activation_bytes(batch: int, sequence: int, width: int, heads: int, bytes_per_element: int = 4) -> int:
    """Bytes a `minizero.models.Block` keeps for its backward on a CPU, without dropout: exact.

    Per token, 16 vectors of the width: what the two norms read (2), what the four linear layers read (1 + 1 + 1 + 4),
    queries, keys and values (3), and what the GELU reads (4). The output of attention is what its last linear layer
    reads, and counts once. Then mean and 1/σ of each norm (4 numbers) and, for each head, the log-sum-exp of the scores
    (fp32 at least), from which the fused attention computes them again.

    The paper's 34sbh are the same 16 vectors at 2 bytes each and two dropout masks; it leaves the last line out.

    Args:
        batch, sequence, width, heads: B, T, C and the heads of the block.
        bytes_per_element: of its weights and activations.
    """
    check_positive(batch=batch, sequence=sequence, width=width, heads=heads, bytes_per_element=bytes_per_element)
    tokens = batch * sequence
    return tokens * ((16 * width + 4) * bytes_per_element + heads * max(4, bytes_per_element))


def check_positive(**values: int) -> None:
    """Raise ValueError, with the name of the argument, for one that is no positive integer."""
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_stage(stage: int) -> None:
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")


def table(params: int, ranks: int, precision: str = "mixed") -> str:
    """Model states of one rank under the four stages, as aligned text; arguments as for `model_states`."""
    stages = [model_states(params, ranks, stage, precision) for stage in range(4)]
    unit, divisor = ("GB", 1e9) if stages[0].total >= 1e9 else ("MB", 1e6)
    rows = [["stage", "parameters", "gradients", "optimizer", "total", "saved"]]
    for stage, states in enumerate(stages):
        sizes = [states.parameters / divisor, states.gradients / divisor, states.optimizer / divisor]
        cells = [f"{size:.1f}" if size >= 0.1 else f"{size:.2g}" for size in [*sizes, states.total / divisor]]
        rows.append([str(stage), *cells, f"{stages[0].total / states.total:.1f}x"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    each = PRECISIONS[precision]
    terms = f"{each.parameters} + {each.gradients} + {each.optimizer} = {each.total} bytes per parameter"
    title = f"{params:,} parameters on {ranks:,} ranks, Adam, {precision}: {terms}"
    note = f"Model states of one rank in {unit} ({divisor:,.0f} bytes), without activations and gathered units:"
    return "\n".join([title, note, "", *lines])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")  # one line: the usage would bury it


def _count(text: str) -> int:
    """Read a count from 1 to 10^18 as people write it: 64, 7.5e9, 7.5B, 350M."""
    exponent = {"K": "e3", "M": "e6", "B": "e9", "T": "e12"}.get(text[-1:].upper())
    try:
        value = Decimal(text[:-1] + exponent if exponent else text)
    except InvalidOperation:
        value = Decimal("nan")
    if not (value.is_finite() and 1 <= value <= 10**18 and value == int(value)):
        # argparse puts the option's name before this
        raise argparse.ArgumentTypeError(f"not a whole number from 1 to 10^18, such as 64, 7.5e9 or 7.5B: {text!r}")
    return int(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print `table` for the command line's `--params`, `--ranks` and `--precision`; a bad value exits with 2."""
    parser = _Parser("python -m minizero.memory", description="Bytes of model states per rank, for ZeRO stages 0 to 3.")
    parser.add_argument("--params", type=_count, required=True, help="parameters: 7.5e9, 7.5B, 350M")
    parser.add_argument("--ranks", type=_count, required=True, help="data-parallel ranks")
    parser.add_argument("--precision", choices=PRECISIONS, default="mixed", help="default: mixed")
    options = parser.parse_args(arguments)
    print(table(options.params, options.ranks, options.precision))


if __name__ == "__main__":
    main()
