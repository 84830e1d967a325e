"""Text and batches: what ranks share, and what they must not."""

import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minizero.data import CORPUS, Batches, decode, encode, load_corpus

pytestmark = pytest.mark.ch31
sizes = st.integers(1, 5)


def ranks_of(length: int, context: int, batch: int, world: int, seed: int = 0) -> list[Batches]:
    """All ranks' batches of the stream 0, 1, 2, ..., whose tokens are their own positions."""
    tokens = torch.arange(length)
    return [Batches(tokens, context, batch, rank=rank, world=world, seed=seed) for rank in range(world)]


def epoch_of(batches: Batches, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batches.at(epoch * len(batches) + step) for step in range(len(batches))]


@settings(deadline=None, max_examples=100)
@given(context=sizes, batch=sizes, world=sizes, more=st.integers(0, 40), seed=st.integers(0, 2**40), epoch=sizes)
def test_f40_f32_one_epoch_visits_each_window_once(
    context: int, batch: int, world: int, more: int, seed: int, epoch: int
) -> None:
    length = world * batch * context + 1 + more
    ranks = ranks_of(length, context, batch, world, seed)
    everything = [epoch_of(rank, epoch) for rank in ranks]
    assert len({len(batches) for batches in everything}) == 1, "ranks with different numbers of batches"
    starts = []
    for batches in everything:
        assert len(batches) == len(ranks[0]) >= 1
        for inputs, targets in batches:
            assert inputs.shape == targets.shape == (batch, context)
            assert inputs.dtype == targets.dtype == torch.int64
            assert torch.equal(targets, inputs + 1)
            assert torch.equal(inputs, inputs[:, :1] + torch.arange(context))
            starts += inputs[:, 0].tolist()
    windows = (length - 1) // context
    assert len(set(starts)) == len(starts), "a sample was seen twice"
    assert set(starts) <= {window * context for window in range(windows)}
    assert 0 <= windows - len(starts) < world * batch, "more dropped than one incomplete global batch"


@settings(deadline=None, max_examples=50)
@given(context=sizes, share=sizes, world=sizes, more=st.integers(0, 40), step=st.integers(0, 30))
def test_a_global_batch_does_not_depend_on_how_many_ranks_share_it(
    context: int, share: int, world: int, more: int, step: int
) -> None:
    length = world * share * context + 1 + more
    alone = Batches(torch.arange(length), context, world * share)
    shares = [rank.at(step) for rank in ranks_of(length, context, share, world)]
    for which, whole in enumerate(alone.at(step)):
        assert torch.equal(whole, torch.cat([part[which] for part in shares]))


def test_f40_order_differs_between_epochs_and_seeds_and_not_between_ranks() -> None:
    first, second = ranks_of(201, 2, 3, 2)
    assert torch.equal(first.order(3), second.order(3))
    orders = {
        tuple(ranks_of(201, 2, 3, 1, seed)[0].order(epoch).tolist())
        for seed in (0, 1, 2**32, 2**32 + 1)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 12
    for order in orders:
        assert sorted(order) == list(range(100))
    assert tuple(range(100)) not in orders


def test_f32_seven_samples_on_two_ranks() -> None:
    first, second = ranks_of(8, 1, 2, 2)
    assert len(first) == len(second) == 1
    seen = torch.cat([rank.at(0)[0].flatten() for rank in (first, second)])
    assert len(seen.unique()) == 4
    dropped = {tuple(sorted(set(range(7)) - set(first.order(epoch)[:4].tolist()))) for epoch in range(20)}
    assert len(dropped) > 1  # not the same three each time


def test_steps_run_on_from_epoch_to_epoch() -> None:
    batches = ranks_of(61, 2, 4, 1)[0]
    assert len(batches) == 7
    expected = [start for epoch in (0, 1) for start in (2 * batches.order(epoch)[: 7 * 4]).view(7, 4)]
    for step in (13, 0, 7, 6):  # in any order
        inputs, targets = batches.at(step)
        assert torch.equal(inputs[:, 0], expected[step])
        assert inputs.is_contiguous()
        assert targets.is_contiguous()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world": 0}, "world must be a positive integer, got 0"),
        ({"rank": 2, "world": 2}, "rank must be an integer from 0 to world - 1 = 1, got 2"),
        ({"rank": -1}, "rank must be an integer from 0"),
        ({"batch": 0}, "batch must be a positive integer, got 0"),
        ({"batch": 2.0}, "batch must be a positive integer, got 2.0"),
        ({"context": 0}, "context must be a positive integer, got 0"),
        ({"batch": 3, "world": 4}, "20 tokens give 9 sequences of context 2.*needs 12: 4 ranks with batch 3"),
        ({"tokens": torch.zeros(4, 5, dtype=torch.int64)}, r"one sequence of integers, got torch.int64 \(4, 5\)"),
        ({"tokens": torch.zeros(20)}, "got torch.float32"),
        ({"tokens": torch.zeros(0, dtype=torch.uint8)}, "0 tokens give 0 sequences"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(**{"tokens": torch.arange(20), "context": 2, "batch": 1, **arguments})
    with pytest.raises(ValueError, match="step must not be negative"):
        ranks_of(20, 2, 1, 1)[0].at(-1)


def test_the_text_of_the_package_is_the_same_on_every_machine() -> None:
    """Figures in README and chapters are of this text and of this cut; whoever changes it measures them again."""
    corpus = load_corpus(context=64)
    assert corpus.name == "corpus.txt"
    assert corpus.training.dtype == corpus.held_out.dtype == torch.uint8
    assert (len(corpus.training), len(corpus.held_out)) == (505_476, 56_164)
    assert corpus.fingerprint == "169754a7ccf24322912306604a8d03bebba92110f2cc6f183f11a56d572d17cf"
    text = bytes(torch.cat([corpus.training, corpus.held_out]).numpy())
    assert text == CORPUS.read_bytes()
    assert text.isascii()  # so that a sample cut anywhere is text
    licence = CORPUS.with_name("corpus.LICENSE").read_text()
    modules = licence[licence.index("    calendar.py") : licence.index("Copyright (c)")].replace("\n", " ").split(", ")
    assert len(modules) == 23


def test_what_is_not_python_comes_with_the_installed_package() -> None:
    package = CORPUS.parent
    files = {path.name for path in package.iterdir() if path.is_file() and path.suffix != ".py"}
    project = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())
    assert set(project["tool"]["setuptools"]["package-data"]["minizero"]) == files


def test_held_out_windows_share_nothing_with_training_windows(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    corpus = load_corpus(path, context=4, held_out=0.2)

    def seen(tokens: torch.Tensor) -> set[int]:
        batches = epoch_of(Batches(tokens, 4, 1), 0)
        return {token for inputs, targets in batches for token in torch.cat([inputs, targets]).flatten().tolist()}

    assert seen(corpus.training) == set(range(77))  # 19 windows of 4, and the target of the last
    assert seen(corpus.held_out) == set(range(80, 97))


def test_a_corpus_can_be_read_from_any_file(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("blåbærsyltetøy\r\n".encode("latin-1") * 40)
    corpus = load_corpus(str(path), context=8, held_out=0.5)
    assert corpus.name == str(path)
    assert bytes(corpus.training.numpy()) + bytes(corpus.held_out.numpy()) == path.read_bytes()
    inputs, _ = Batches(corpus.training, 8, 1).at(0)
    assert 0 <= int(inputs.min()) <= int(inputs.max()) < 256


def test_fingerprint_depends_on_text_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcdefgh" * 20)
    prints = {load_corpus(path, context=2, held_out=h).fingerprint for h in (0.1, 0.2, 0.1)}
    for other in (b"Abcdefgh" + b"abcdefgh" * 19, b"abcdefgh" * 19 + b"abcdefgH"):
        path.write_bytes(other)
        prints.add(load_corpus(path, context=2, held_out=0.1).fingerprint)
    assert len(prints) == 4


def test_bad_files_are_refused_by_path_and_numbers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        load_corpus(tmp_path / "missing.txt", context=4)
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        load_corpus(tmp_path, context=4)
    path = tmp_path / "small.txt"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"small\.txt is empty"):
        load_corpus(path, context=4)
    path.write_bytes(b"x" * 49)
    with pytest.raises(
        ValueError, match=r"small\.txt .* 49 bytes, 45 are for training and 4 held out.* 5 for one .* 4"
    ):
        load_corpus(path, context=4)
    path.write_bytes(b"x" * 50)
    assert len(Batches(load_corpus(path, context=4).held_out, 4, 1)) == 1  # the shortest that will do
    for held_out in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="held_out must lie between 0 and 1"):
            load_corpus(path, context=4, held_out=held_out)
    with pytest.raises(ValueError, match="context must be a positive integer, got 0"):
        load_corpus(path, context=0)


@settings(deadline=None, max_examples=30)
@given(st.text(max_size=20))
def test_text_survives_encoding(text: str) -> None:
    tokens = encode(text)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == list(text.encode())
    assert decode(tokens) == text


def test_bytes_that_are_not_text_are_shown_as_replacement_characters() -> None:
    assert decode(torch.tensor([104, 105, 0xFF, 33])) == "hi\ufffd!"
