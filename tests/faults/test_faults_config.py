"""F50 to F52, F90, F93: keys that are unknown, twice there, wrong, refused or ignored; sizes; "auto"."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minizero import config
from minizero.config import Batch, ConfigError, load_config
from minizero.config.keys import KEYS

pytestmark = pytest.mark.ch26
SIZE = {"train_batch_size": 8}
NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def complaint(content: dict[str, Any], world: int | None = 2) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(content, world)
    return str(error.value)


def nest(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return SIZE | value  # type: ignore[no-any-return]


# ---- F50


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimization.reduce_bucket_sise", "zero_optimization.reduce_bucket_size"),
        ("zero_optimization.offload_optimizer.devise", "zero_optimization.offload_optimizer.device"),
        ("fp16.loss_scale_windows", "fp16.loss_scale_window"),
        ("stage", "zero_optimization.stage"),
    ],
)
def test_f50_an_unknown_key_is_an_error_with_the_nearest_known_name(path: str, meant: str) -> None:
    assert complaint(nest(path, {})) == f"config: {path}: unknown key; did you mean {meant}?"


def test_f50_the_old_name_of_bf16_is_read_unless_the_new_one_is_there_too() -> None:
    old = {"bfloat16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    assert load_config(SIZE | old, 2)[0].bf16.enabled
    said = "bfloat16: {} is not supported: the old name of bf16, which is there, too"
    assert said in complaint(SIZE | {"bfloat16": {}, "bf16": {}})


REFUSED = [path for path, key in KEYS.items() if key.fate == "refused" and key.kind != "block" and path != "bfloat16"]


@pytest.mark.parametrize("path", REFUSED)
def test_f50_a_key_that_would_change_the_training_is_refused_with_a_reason(path: str) -> None:
    found = complaint(nest(path, {"enabled": True}))
    assert f"{path}: " in found
    assert found.endswith(f"is not supported: {KEYS[path].why}")


def test_f50_a_key_that_changes_nothing_is_named_and_ignored() -> None:
    _, ignored = load_config(nest("zero_optimization.overlap_comm", False), 2)
    assert ignored == ("zero_optimization.overlap_comm",)


def test_f50_a_key_that_is_twice_in_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2, "stage": 3}, "train_batch_size": 8}')
    with pytest.raises(ConfigError) as error:
        load_config(file, 2)
    lines = str(error.value).splitlines()[1:]
    assert sorted(lines) == [
        "  train_batch_size: the key is there twice",
        "  zero_optimization.stage: the key is there twice",
    ]


def test_f50_numbers_such_as_5e8_are_whole_numbers() -> None:
    for path in ("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.reduce_bucket_size"):
        load_config(json.loads(json.dumps(nest(path, 5e8))), 2)
    loaded, _ = load_config(nest("fp16.loss_scale_window", 5e8), 2)
    assert loaded.fp16.loss_scale_window == 500_000_000
    assert type(loaded.fp16.loss_scale_window) is int


KINDS_OF_NUMBERS = [path for path, key in KEYS.items() if key.kind in ("count", "size") and key.fate == "used"]


@pytest.mark.parametrize("wrong", ["5e8", 5e8 + 0.5, -1, True, math.inf, [1]], ids=repr)
def test_f50_every_size_refuses_text_fractions_negatives_and_booleans_by_its_path(wrong: Any) -> None:
    assert len(KINDS_OF_NUMBERS) >= 8
    for path in KINDS_OF_NUMBERS:
        assert complaint(nest(path, wrong)).startswith(f"config: {path}: must be ")


@pytest.mark.parametrize("wrong", ["true", 1, 0.0, {}], ids=repr)
def test_f50_every_switch_takes_true_and_false_only(wrong: Any) -> None:
    for path in [path for path, key in KEYS.items() if key.kind == "flag" and key.fate == "used"]:
        assert f"config: {path}: must be a valid boolean" in complaint(nest(path, wrong))


@pytest.mark.parametrize("wrong", ["3", 4, -1, True, 2.5], ids=repr)
def test_f50_a_stage_is_a_number_from_0_to_3(wrong: Any) -> None:
    assert "config: zero_optimization.stage: must be" in complaint(nest("zero_optimization.stage", wrong))


@pytest.mark.parametrize("block", ["optimizer", "scheduler"])
def test_f50_a_key_that_its_block_needs_is_named(block: str) -> None:
    assert complaint(nest(block, {"params": {}})) == f"config: {block}.type: must be there"


def names_for(path: str) -> set[str]:
    """What may be named for the key at `path`: itself, its new name, or a key that has to be there when it is."""
    block = path.partition(".")[0]
    wants = {"bfloat16": "bf16", "fp16.enabled": "zero_optimization.stage", "bf16.enabled": "zero_optimization.stage"}
    return {path, *NAMES, f"{block}.type" if block in ("optimizer", "scheduler") else wants.get(path, path)}


@example(None)
@example(True)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_f50_whatever_a_file_holds_it_loads_or_a_key_of_it_is_named(value: Any) -> None:
    for path in KEYS:
        try:
            load_config(nest(path, value), 2)
        except ConfigError as error:
            said = str(error)
        else:
            continue
        assert any(name in said for name in names_for(path)), (path, said)


# ---- F51


@pytest.mark.parametrize(
    ("given_sizes", "resolved"),
    [
        ((8, 2, 2), Batch(8, 2, 2)),
        ((8, 2, None), Batch(8, 2, 2)),
        ((8, None, 2), Batch(8, 2, 2)),
        ((None, 2, 2), Batch(8, 2, 2)),
        ((8, None, None), Batch(8, 4, 1)),
        ((None, 4, None), Batch(8, 4, 1)),
        ((None, None, 2), "train_batch_size or train_micro_batch_size_per_gpu must be there"),
        ((None, None, None), "train_batch_size or train_micro_batch_size_per_gpu must be there"),
        ((8, 2, 1), "train_batch_size 8 is not train_micro_batch_size_per_gpu 2 * gradient_accumulation_steps 1 * 2"),
        ((7, None, None), "train_batch_size 7 is not train_micro_batch_size_per_gpu 3 * gradient_acc"),
        (
            (8, 3, None),
            "train_batch_size 8 is not train_micro_batch_size_per_gpu 3 * gradient_accumulation_steps 1 * 2",
        ),
        ((1, None, None), "train_batch_size 1 is not train_micro_batch_size_per_gpu 0"),
        ((0, None, None), "train_batch_size: must be greater than 0, got 0"),
        ((None, -2, None), "train_micro_batch_size_per_gpu: must be greater than 0, got -2"),
        ((8, 2, 0), "gradient_accumulation_steps: must be greater than 0, got 0"),
    ],
)
def test_f51_a_missing_batch_size_is_inferred_or_the_numbers_are_shown(given_sizes: Any, resolved: Any) -> None:
    content = {name: size for name, size in zip(NAMES, given_sizes, strict=True) if size is not None}
    if isinstance(resolved, str):
        assert resolved in complaint(content)
    else:
        loaded, _ = load_config(content, 2)
        assert loaded.batch(2) == resolved
        assert tuple(getattr(loaded, name) for name in NAMES) == resolved


def test_f51_any_two_or_one_of_the_sizes_lead_to_the_same_three() -> None:
    for micro, steps, world in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 4)):
        sizes = dict(zip(NAMES, (micro * steps * world, micro, steps), strict=True))
        for keep in itertools.combinations(NAMES, 2):
            loaded, _ = load_config({name: sizes[name] for name in keep}, world)
            assert loaded.batch(world) == tuple(sizes.values())


# ---- F52


AUTOS = [path for path, key in KEYS.items() if key.fate == "used" and key.kind not in ("block", "tree")]


@pytest.mark.parametrize(
    "path", [*AUTOS, "optimizer.params.lr", "optimizer.params.betas", "scheduler.params.total_num_steps"]
)
def test_f52_auto_is_an_error_with_the_path_of_its_key(path: str) -> None:
    assert f'config: {path}: "auto" is for the Trainer of transformers' in complaint(nest(path, "auto"))


def test_f52_auto_for_a_key_that_is_ignored_is_ignored() -> None:
    _, ignored = load_config(nest("zero_optimization.reduce_bucket_size", "auto"), 2)
    assert ignored == ("zero_optimization.reduce_bucket_size",)


def test_f52_fp16_and_bf16_together_are_an_error_and_one_of_them_off_is_not() -> None:
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    assert complaint(SIZE | both) == "config: fp16 and bf16 are both enabled: choose one"
    load_config(SIZE | both | {"fp16": {"enabled": False}}, 2)


@pytest.mark.parametrize(
    "name", ["loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"]
)
def test_f52_fields_of_the_loss_scale_have_no_place_under_bf16(name: str) -> None:
    found = complaint(SIZE | {"bf16": {"enabled": True, name: 0}})
    assert found == f"config: bf16.{name}: unknown key; did you mean fp16.{name}?"


# ---- F90, F93


def test_F93_the_value_of_a_key_that_is_ignored_never_matters() -> None:
    ignored = [path for path, key in KEYS.items() if key.fate == "ignored"]
    assert len(ignored) > 60
    for path in ignored:
        for value in (math.inf, math.nan, "text", -1, [1], {"deeper": {"still": None}}, "auto", True):
            content = nest(path, value)
            if "optimizer" in content:
                content["optimizer"]["type"] = "AdamW"
            _, named = load_config(content, 2)
            assert any(path == name or path.startswith(f"{name}.") for name in named), path
    load_config(SIZE | {"flops_profiler": {"a key of tomorrow": 1}}, 2)
    assert "checkpoint: 3 is not supported" in complaint(SIZE | {"checkpoint": 3})  # keys inside of it do matter
    assert complaint(SIZE | {"checkpoint": {"unknown": 1}}).startswith("config: checkpoint.unknown: unknown key")


def test_F93_comments_are_no_keys_wherever_they_stand() -> None:
    notes = {"_comment": ["why"], "$schema": "https://example.org", "#": None, "// lr": 1}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, **notes}, **notes}
    content = SIZE | notes | {"optimizer": optimizer, "zero_optimization": {"stage": 2, **notes}}
    loaded, ignored = load_config(content, 2)
    assert ignored == ()
    assert loaded.optimizer is not None
    assert loaded.optimizer.params == {"lr": 0.1}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"train_batch_size": 8, "zero_optimization": 3}', "zero_optimization: must be a block, {...}, got 3"),
        ('{"train_batch_size": 8, "zero_optimization": true}', "zero_optimization: must be a block, {...}, got true"),
        ('{"train_batch_size": 8, "zero_optimization": {"stage": [3]}}', "stage: must be a number, got [3]"),
        ('{"train_batch_size": 8, "zero_optimization": {"stage": {}}}', "zero_optimization.stage: must be a number"),
        ('{"train_batch_size": 8, "zero_optimization": null}', "zero_optimization.stage 0 is minizero.Replicated"),
        ('{"train_batch_size": 8}', "zero_optimization.stage 0 is minizero.Replicated"),
        ('{"train_batch_size": 1e999, "bf16": 1}', "train_batch_size: must be a number, got Infinity"),
        ('{"train_batch_size": 1' + 400 * "0" + "}", "train_batch_size: must be a number"),
        (100_000 * "[", "not JSON"),
        ("[1]", "must hold one object"),
        ("", "not JSON"),
        ("\x00\xff", "not JSON"),
        (None, "No such file"),
        ("a folder", "Is a directory"),
    ],
)
def test_F93_whatever_a_file_holds_the_explanation_ends_in_words(
    text: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds_config.json"
    if text == "a folder":
        file.mkdir()
    elif text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as end:
        config.main([str(file)])
    assert end.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "ReduceLROnPlateau"}, "scheduler.type: ReduceLROnPlateau needs metrics at each step: make it in the"),
        ({"type": "StepLR"}, "scheduler.params: StepLR needs step_size"),
        ({"type": "LambdaLR", "params": {"lr_lambda": "x"}}, "scheduler: LambdaLR cannot be stepped: TypeError"),
        ({"type": "ChainedScheduler", "params": {"schedulers": []}}, "scheduler"),
        ({"type": "LRScheduler"}, "scheduler: LRScheduler cannot be stepped: NotImplementedError"),
        ({"type": "StepLR", "params": {"step_size": "3"}}, "scheduler: StepLR cannot be stepped: TypeError"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "scheduler: WarmupLR cannot be stepped: ValueError"),
    ],
)
def test_F90_a_schedule_that_no_engine_could_step_is_refused_when_the_file_is_read(
    block: dict[str, Any], named: str
) -> None:
    assert named in complaint(SIZE | {"scheduler": block})


def said(content: dict[str, Any]) -> str:
    try:
        load_config(content, 2)
    except ConfigError as error:
        return str(error)
    return ""


def test_F90_every_schedule_of_torch_is_stepped_or_refused_and_so_is_an_optimizer() -> None:
    schedulers = [name for name in vars(torch.optim.lr_scheduler) if name.endswith(("LR", "Restarts", "Scheduler"))]
    taken = [name for name in schedulers if "scheduler" not in said(SIZE | {"scheduler": {"type": name}})]
    assert {"ConstantLR", "LinearLR", "PolynomialLR"} <= set(taken)
    load_config(SIZE | {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0.1, 0.2]}}}, 2)
    negative = {"optimizer": {"type": "AdamW", "params": {"lr": -1}}}
    assert "optimizer: AdamW cannot be stepped: ValueError: lr is out of range" in complaint(SIZE | negative)
