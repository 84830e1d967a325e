"""Memory arithmetic: the published numbers, and the bytes of real tensors."""

import math
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minizero import memory
from minizero.memory import (
    PRECISIONS,
    Precision,
    block_activation_bytes,
    gathered_bytes,
    model_states,
    padding,
    paper_activation_bytes,
    shard_elements,
    traffic,
)
from minizero.models import GPT, Block, GPTConfig

pytestmark = [pytest.mark.ch01, pytest.mark.ch03]


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    ("params", "ranks", "gigabytes"),
    [
        # figure 1 and table 1 of the ZeRO paper: no stage (16 bytes per parameter), then stages 1, 2, 3
        (7_500_000_000, 64, "120 31.4 16.6 1.88"),
        (7_500_000_000, 4, "120 52.5 41.3 30"),
        (7_500_000_000, 1024, "120 30.1 15.1 0.12"),
        (128_000_000_000, 256, "2048 518 263 8"),
    ],
)
def test_published_tables(params: int, ranks: int, gigabytes: str) -> None:
    for stage, printed in enumerate(gigabytes.split()):
        rounding = 0.5 * 10.0 ** -len(printed.partition(".")[2])
        assert model_states(params, ranks, stage).total / 1e9 == pytest.approx(float(printed), abs=rounding), stage


def test_bytes_per_parameter_people_argue_about() -> None:
    assert {name: precision.total for name, precision in PRECISIONS.items()} == {
        "fp32": 16,
        "mixed": 16,
        "mixed-fp32-gradients": 18,
        "mixed-gradient-copy": 20,
    }
    # Megatron's table for its distributed optimizer (stage 1), d = 8: 4 + 16/d, 6 + 12/d, 8 + 8/d
    stage1 = {name: Fraction(model_states(8000, 8, 1, name).total, 8000) for name in PRECISIONS}
    assert stage1["mixed-gradient-copy"] == 4 + Fraction(16, 8)
    assert stage1["mixed-fp32-gradients"] == 6 + Fraction(12, 8)
    assert stage1["fp32"] == 8 + Fraction(8, 8)
    assert model_states(1000, 4, 3, Precision(1, 2, 7)) == memory.ModelStates(250, 500, 1750)


@given(params=st.integers(1, 10**15), ranks=st.integers(1, 5000), precision=st.sampled_from(list(PRECISIONS)))
def test_shards_hold_whole_elements(params: int, ranks: int, precision: str) -> None:
    shard = shard_elements(params, ranks)
    assert (shard - 1) * ranks < params <= shard * ranks
    sizes = PRECISIONS[precision]
    for stage in range(4):
        states = model_states(params, ranks, stage, precision)
        assert states.optimizer == sizes.optimizer * (shard if stage > 0 else params)
        assert states.gradients == sizes.gradients * (shard if stage > 1 else params)
        assert states.parameters == sizes.parameters * (shard if stage > 2 else params)


@given(units=st.lists(st.integers(1, 10**9), min_size=1, max_size=8), ranks=st.integers(1, 100))
def test_padding_makes_every_unit_divide(units: list[int], ranks: int) -> None:
    chunks = [math.ceil(Fraction(unit, ranks)) for unit in units]
    assert sum(units) + padding(units, ranks) == ranks * sum(chunks)
    assert 0 <= padding(units, ranks) < len(units) * ranks


def test_padding_and_gathered_bytes_by_hand() -> None:
    units = [10, 7, 13, 4]
    assert padding(units, 4) == 2 + 1 + 3 + 0
    assert gathered_bytes(units, 4, bytes_per_element=2, prefetch=0) == 2 * 16
    assert gathered_bytes(units, 4, bytes_per_element=2) == 2 * (8 + 16)  # 7 and 13, padded
    assert gathered_bytes(units, 4, bytes_per_element=2, prefetch=9) == 2 * (12 + 8 + 16 + 4)
    assert gathered_bytes([10, 1, 9], 1, bytes_per_element=4) == 4 * 11  # neighbours, not the two largest


def test_traffic() -> None:
    assert [traffic(1000, 4, stage, bytes_per_element=2) for stage in range(4)] == [3000, 3000, 3000, 4500]
    assert [traffic(1000, 1, stage, bytes_per_element=2) for stage in range(4)] == [0, 0, 0, 0]
    assert traffic(10, 4, 3, bytes_per_element=4) == 3 * 3 * 3 * 4  # three shards of 3, thrice


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_real_tensors_of_a_training_step_have_the_bytes_of_stage_0(precision: str) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = GPT(GPTConfig(vocab_size=16, context=8, layers=2, width=16, heads=2)).to(dtype)
    params = list(model.parameters())
    masters = params if precision == "fp32" else [p.detach().float() for p in params]
    adam = torch.optim.AdamW(masters, foreach=False)
    accumulators: dict[Tensor, Tensor] = {}

    def accumulate(parameter: Tensor) -> None:  # what Megatron calls main_grad
        accumulators[parameter] = parameter.grad.float()
        parameter.grad = None

    if precision == "mixed-fp32-gradients":
        for parameter in params:
            parameter.register_post_accumulate_grad_hook(accumulate)
    tokens = torch.arange(16).view(2, 8)
    model(tokens, tokens).backward()
    if precision != "fp32":
        for parameter, master in zip(params, masters, strict=True):
            master.grad = accumulators[parameter] if accumulators else parameter.grad.float()
    adam.step()

    state = [value for slot in adam.state.values() for key, value in slot.items() if key != "step"]
    gradients = list(accumulators.values()) or [p.grad for p in params]
    optimizer = state if precision == "fp32" else state + masters
    if precision == "mixed-gradient-copy":
        optimizer = optimizer + [master.grad for master in masters]
    measured = memory.ModelStates(storage_bytes(params), storage_bytes(gradients), storage_bytes(optimizer))
    assert measured == model_states(sum(p.numel() for p in params), ranks=1, stage=0, precision=precision)


def saved_bytes(block: Block, x: Tensor) -> int:
    """Bytes of all storages that autograd keeps for the block's backward, its weights apart."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(x)
    assert output.requires_grad
    return storage_bytes(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("batch", "sequence", "width", "heads"), [(2, 8, 16, 4), (3, 5, 24, 2), (1, 32, 8, 1)])
def test_activations_of_a_real_block(dtype: torch.dtype, batch: int, sequence: int, width: int, heads: int) -> None:
    block = Block(GPTConfig(context=sequence, width=width, heads=heads)).to(dtype)
    x = torch.randn(batch, sequence, width, dtype=dtype, requires_grad=True)
    assert saved_bytes(block, x) == block_activation_bytes(batch, sequence, width, heads, dtype.itemsize)
    with torch.no_grad():
        assert not block(x).requires_grad


def test_activations_beside_the_papers_formula() -> None:
    b, s, h, a = 4, 2048, 4096, 32
    assert paper_activation_bytes(b, s, h, a) == s * b * h * (34 + 5 * a * s // h)
    assert paper_activation_bytes(b, s, h, a, keep="no-scores") == 34 * s * b * h
    assert paper_activation_bytes(b, s, h, a, keep="input") == 2 * s * b * h
    # Exactly the difference: the paper has two dropout masks; ours has norm statistics and log-sum-exps.
    ours = block_activation_bytes(b, s, h, a, bytes_per_element=2)
    assert paper_activation_bytes(b, s, h, a, keep="no-scores") - ours == s * b * (2 * h - 4 * 2 - 4 * a)
    # GPT-3 in the paper, 96 blocks, b = 1: full checkpointing and selective recomputation against everything kept
    gpt3 = {keep: paper_activation_bytes(1, 2048, 12288, 96, keep) for keep in ("all", "no-scores", "input")}
    assert 1 - gpt3["no-scores"] / gpt3["all"] == pytest.approx(0.70, abs=0.005)  # their section 5: 70 % saved
    assert gpt3["all"] / gpt3["input"] == 57


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model_states(0, 2, 1), "params must be a positive integer, got 0"),
        (lambda: model_states(7.5e9, 2, 1), "params must be a positive integer, got 7500000000.0"),
        (lambda: model_states(10, 0, 1), "ranks must be a positive integer, got 0"),
        (lambda: model_states(10, 2, 4), "stage must be 0, 1, 2 or 3, got 4"),
        (lambda: model_states(10, 2, True), "stage must be 0, 1, 2 or 3, got True"),
        (lambda: model_states(10, 2, 1, "fp8"), "precision must be one of fp32, mixed, .*got 'fp8'"),
        (lambda: traffic(10, 2, -1, 4), "stage must be"),
        (lambda: traffic(10, 2, 1, 0), "bytes_per_element must be a positive integer"),
        (lambda: padding([3, 0], 2), "elements must be a positive integer, got 0"),
        (lambda: gathered_bytes([], 2, 4), "units must be a positive integer, got 0"),
        (lambda: gathered_bytes([3], 2, 4, prefetch=-1), "prefetch must be an integer of 0 or more, got -1"),
        (lambda: paper_activation_bytes(1, 2, 3, 1, keep="none"), "keep must be one of all, no-scores, input"),
        (lambda: paper_activation_bytes(1, 2, 3, 0), "heads must be"),
        (lambda: block_activation_bytes(1, -2, 3, 1), "sequence must be a positive integer, got -2"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def rows(output: str) -> list[list[str]]:
    """The cells of the table's rows, after checking that its columns are aligned."""
    lines = output.split("\n\n")[1].splitlines()
    assert len({len(line) for line in lines}) == 1
    return [line.split() for line in lines]


def test_command_line_prints_the_papers_numbers() -> None:
    command = [sys.executable, "-m", "minizero.memory", "--params", "7.5e9", "--ranks", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done.stdout) == [
        ["stage", "parameters", "gradients", "optimizer", "total", "saved"],
        ["0", "15.0", "15.0", "90.0", "120.0", "1.0x"],
        ["1", "15.0", "15.0", "1.4", "31.4", "3.8x"],
        ["2", "15.0", "0.2", "1.4", "16.6", "7.2x"],
        ["3", "0.2", "0.2", "1.4", "1.9", "64.0x"],
    ]
    assert "2 + 2 + 12 = 16 bytes per parameter" in done.stdout


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("7.5e9", 7_500_000_000),
        ("7.5B", 7_500_000_000),
        ("10.87m", 10_870_000),
        ("1T", 10**12),
        ("3k", 3000),
        ("64", 64),
    ],
)
def test_command_line_reads_counts_exactly(text: str, params: int, capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(["--params", text, "--ranks", "1e3", "--precision", "mixed-gradient-copy"])
    output = capsys.readouterr().out
    assert output.startswith(f"{params:,} parameters on 1,000 ranks, Adam, mixed-gradient-copy: 2 + 2 + 16 = 20 ")
    unit, divisor = ("GB", 1e9) if 20 * params >= 1e9 else ("MB", 1e6)
    assert f" in {unit} " in output
    assert float(rows(output)[1][4]) == pytest.approx(20 * params / divisor, rel=0.06)


@pytest.mark.parametrize("option", ["--params", "--ranks"])
@pytest.mark.parametrize(
    "value",
    ["1.5", "0", "-5", "-7.5e9", "nan", "sNaN", "inf", "-inf", "1e999999999", "1e99999999999999999999", "1e-9", "0.1",
     "2e18", "B", "", "1.0000000000000000000000000000000000001B", "7.5e9B", "seven", "7 B"],
)  # fmt: skip
def test_bad_counts_end_with_one_line_naming_the_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"--params": "7.5e9", "--ranks": "64", option: value}
    with pytest.raises(SystemExit) as exit_:
        memory.main([f"{name}={text}" for name, text in good.items()])
    assert exit_.value.code == 2
    output = capsys.readouterr()
    expected = f"error: argument {option}: not a whole number from 1 to 10^18, such as 64, 7.5e9 or 7.5B: {value!r}\n"
    assert output.err == f"python -m minizero.memory: {expected}"
    assert output.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "7B"], "--ranks"),
        (["--params", "-inf", "--ranks", "2"], "--params"),
        (["--params", "7B", "--ranks", "2", "--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
    ],
)
def test_bad_options_end_with_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        memory.main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
