"""config/ and its table: what each key is, held against the installed DeepSpeed itself."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import BaseModel
from repository import ROOT

import minizero
from minizero import config
from minizero.config import BF16, Batch, Config, ConfigError, load_config, optimizer_class
from minizero.config.keys import DEEPSPEED, KEYS
from minizero.engine import Engine
from minizero.optimizer import Adam, AdamW

pytestmark = pytest.mark.ch26
CONFIGS = ROOT / "configs"
ARTICLE = CONFIGS / "article.json"
SIZE = {"train_batch_size": 8}

# DeepSpeed reads a file through `param_dict.get(...)` and through pydantic models. The first is recorded by a dict that
# remembers what it was asked for, the second is read off the models.
DEEPSPEED_KEYS = """
import inspect
import json
import sys

import deepspeed
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

asked = set()


class Spy(dict):
    def __init__(self, path, content=()):
        super().__init__(content)
        self.path = path

    def note(self, name):
        asked.add(self.path + name)

    def get(self, name, default=None):
        self.note(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.note(name)
        return super().__getitem__(name)

    def __contains__(self, name):
        self.note(name)
        return super().__contains__(name)

    def keys(self):
        return self

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self


blocks = "activation_checkpointing flops_profiler aio checkpoint data_types optimizer scheduler torch_autocast".split()
spies = {block: Spy(block + ".", {}) for block in blocks}
spies["optimizer"]["type"] = spies["scheduler"]["type"] = "a name"
DeepSpeedConfig(Spy("", {"train_batch_size": 1, **spies}))
models = {
    "fp16.": DeepSpeedFP16Config,
    "bf16.": DeepSpeedBF16Config,
    "comms_logger.": CommsLoggerConfig,
    "zero_optimization.": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer.": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param.": DeepSpeedZeroOffloadParamConfig,
}
for path, model in models.items():
    for name, field in model.model_fields.items():
        asked |= {path + name, path + (field.alias or name)}
defaults = {
    path + (field.alias or name): field.default
    for path, model in models.items()
    for name, field in model.model_fields.items()
    if isinstance(field.default, (bool, int, float, str))
}
engine = deepspeed.DeepSpeedEngine
functions = {"initialize": deepspeed.initialize, "step": engine.step}  # backward hides its own behind a wrapper
functions |= {"save_checkpoint": engine.save_checkpoint, "load_checkpoint": engine.load_checkpoint}
signatures = {name: list(inspect.signature(function).parameters) for name, function in functions.items()}
json.dump([deepspeed.__version__, sorted(asked), defaults, signatures], open(sys.argv[1], "w"), default=str)
"""


class Installed(NamedTuple):
    version: str
    keys: set[str]
    defaults: dict[str, Any]
    signatures: dict[str, list[str]]


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Version, keys and defaults of the installed DeepSpeed; it is not imported into the process of the tests."""
    out = tmp_path_factory.mktemp("keys") / "keys.json"
    environment = {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "error", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", DEEPSPEED_KEYS, str(out)], check=True, env=environment, capture_output=True)
    version, keys, defaults, signatures = json.loads(out.read_text())
    return Installed(version, set(keys), defaults, signatures)


def test_the_table_knows_every_key_of_the_installed_deepspeed_and_invents_none(
    deepspeed: Installed,
) -> None:
    version, theirs = deepspeed.version, deepspeed.keys
    assert version == DEEPSPEED
    assert theirs - KEYS.keys() == set()
    # read elsewhere than in the classes above: by initialize(), or named there only to say that they are gone
    elsewhere = {"sequence_parallel_size", "data_parallel_size", "zero_optimization.mics_shard_size"}
    elsewhere |= {"zero_optimization.mics_hierarchical_params_gather", "zero_optimization.zeropp_loco_param"}
    assert {path for path, key in KEYS.items() if path not in theirs and key.kind != "block"} == elsewhere


def test_what_a_stage_of_deepspeed_reads_is_what_the_table_says() -> None:
    """A stage reads a key of zero_optimization if the name stands in that stage's files, bar a few read elsewhere."""
    runtime = Path(torch.__file__).parent.parent / "deepspeed" / "runtime"  # not imported: that takes seconds
    files = ("stage3", "parameter_offload", "partition_parameters", "partitioned_param_coordinator", "utils")
    third = [runtime / "zero" / f"{name}.py" for name in files] + list((runtime / "swap_tensor").glob("*.py"))
    text = {
        frozenset({1, 2}): (runtime / "zero" / "stage_1_and_2.py").read_text(),
        frozenset({3}): "".join(file.read_text() for file in third),
    }
    engine = (runtime / "engine.py").read_text()
    different = set()
    for path, key in KEYS.items():
        name = path.rpartition(".")[2].removeprefix("stage3_")
        if path.startswith("zero_optimization.") and key.kind != "block" and ".stage3_" + name not in key.why:
            found = {stage for stages, source in text.items() if name in source for stage in stages}
            different |= {path.removeprefix("zero_optimization.")} if found != key.stages - {0} else set()
    offload = {f"offload_optimizer.{name}" for name in ("ratio", "super_offload")}  # words of other things, too
    offload |= {f"offload_param.{name}" for name in ("device", "pin_memory")} | {"cpu_offload_param"}
    by_engine = {"stage3_gather_16bit_weights_on_model_save", "pipeline_loading_checkpoint", "zero_quantized_gradients"}
    assert different == offload | by_engine | {"elastic_checkpoint", "stage3_gather_fp16_weights_on_model_save"}
    assert [name for name in by_engine if f"zero_config.{name.removeprefix('stage3_')}" not in engine] == []
    assert engine.count("elastic_checkpoint=") == 1  # handed to stages 1 and 2 only


def test_each_used_key_has_a_field_and_each_field_is_used(deepspeed: Installed) -> None:
    def fields(model: type[BaseModel], path: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            inner = field.annotation
            found[path + name] = field.default
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found |= fields(inner, f"{path}{name}.")
        return found

    ours = fields(Config)
    used = {path for path, key in KEYS.items() if key.fate == "used"}
    assert used - ours.keys() == {
        f"{block}.{name}" for block in ("optimizer", "scheduler") for name in ("type", "params")
    }
    assert ours.keys() - used == set()
    defaults = deepspeed.defaults
    other = {path for path in ours.keys() & defaults.keys() if ours[path] != defaults[path]}
    assert other == {"zero_optimization.stage3_prefetch_bucket_size"}  # theirs is 5e7 elements, ours one unit


def test_initialize_and_the_engine_take_deepspeed_s_arguments_in_its_order(deepspeed: Installed) -> None:
    for name, theirs in deepspeed.signatures.items():
        ours = list(inspect.signature(getattr(Engine, name, minizero.initialize)).parameters)
        assert ours[: len(theirs)] == theirs, name
        assert ours[len(theirs) :] == (["units"] if name == "initialize" else []), name


def test_a_refused_key_may_have_the_value_that_deepspeed_starts_from(
    deepspeed: Installed,
) -> None:
    defaults = deepspeed.defaults
    refused = [path for path in defaults if KEYS[path].fate == "refused" and KEYS[path].off]
    assert len(refused) > 8
    for path in refused:
        block: Any = defaults[path]
        for name in reversed(path.split(".")):
            block = {name: block}
        load_config({**SIZE, **block}, 1)


def test_the_article_s_file_loads_and_says_what_is_ignored() -> None:
    loaded, ignored = load_config(ARTICLE, 4)
    assert loaded.batch(4) == Batch(32, 2, 4)
    assert (loaded.fp16.enabled, loaded.zero_optimization.stage) == (True, 3)
    assert loaded.zero_optimization.offload_optimizer.device == "cpu"
    names = ("allgather_partitions", "allgather_bucket_size", "reduce_scatter")
    assert ignored == tuple(f"zero_optimization.{name}" for name in names)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_every_file_in_configs_loads(file: Path) -> None:
    load_config(file, 2)


def test_the_resolved_configuration_can_be_printed_and_read_again() -> None:
    loaded, _ = load_config(ARTICLE, 4)
    text = loaded.model_dump_json()
    assert load_config(json.loads(text), 4)[0] == loaded
    assert '"initial_scale_power":16' in text


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        load_config(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"train_batch_size": 8,}')
    with pytest.raises(ConfigError, match=r"broken\.json: not JSON: .* line 1 column"):
        load_config(broken)
    broken.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold one object"):
        load_config(broken)


def test_all_that_is_wrong_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"train_batch_size": -1, "zero_optimization": {"stage": "3"}, "fp61": {}})
    assert str(error.value).splitlines() == [
        "config: ",
        "  train_batch_size: must be greater than 0, got -1",
        '  zero_optimization.stage: must be a number, got "3"',
        "  fp61: unknown key; did you mean fp16?",
    ]


def test_offload_needs_a_stage_and_files_need_a_folder() -> None:
    zero: dict[str, Any] = {"stage": 0, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ConfigError, match="zero_optimization: offload_optimizer needs stage 1, 2 or 3"):
        load_config({**SIZE, "zero_optimization": zero})
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    with pytest.raises(ConfigError, match=r"zero_optimization\.offload_optimizer: device \"nvme\" needs nvme_path"):
        load_config({**SIZE, "zero_optimization": zero})


def test_null_is_as_good_as_no_key_and_a_block_that_is_off_is_accepted() -> None:
    off = {"autotuning": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}, "bf16": None}
    loaded, ignored = load_config({**SIZE, **off}, 1)
    assert loaded.bf16 == BF16()
    assert ignored == ()
    with pytest.raises(ConfigError, match=r'autotuning: \{"enabled": true\} is not supported: not built'):
        load_config({**SIZE, "autotuning": {"enabled": True}})


def test_optimizers_by_name_take_the_options_of_their_constructor() -> None:
    def build(kind: str, **params: Any) -> tuple[type, dict[str, Any]]:
        loaded, _ = load_config({**SIZE, "optimizer": {"type": kind, "params": params}})
        assert loaded.optimizer is not None
        return optimizer_class(loaded.optimizer)

    assert build("Adam", lr=0.1) == (AdamW, {"lr": 0.1, "weight_decay": 0.0})
    assert build("Adam", adam_w_mode=False, betas=[0.9, 0.95]) == (Adam, {"betas": [0.9, 0.95], "weight_decay": 0.0})
    assert build("AdamW", adam_w_mode=False, torch_adam=True)[0] is AdamW
    assert build("SGD", lr=0.1, momentum=0.9)[1] == {"lr": 0.1, "momentum": 0.9}
    for kind, params, complaint in (
        ("Lamb", {}, r"optimizer\.type: 'Lamb' is none of ASGD"),
        ("AdamW", {"learning_rate": 1}, r"optimizer\.params\.learning_rate: AdamW takes lr, betas"),
        ("AdamW", {"lr": "1e-3"}, r"optimizer\.params\.lr: must be a number, got '1e-3'"),
        ("AdamW", {"max_grad_norm": 1}, r"optimizer\.params\.max_grad_norm: write gradient_clipping"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            build(kind, **params)


def test_a_scheduler_by_name_is_deepspeed_s_or_torch_s() -> None:
    for kind, params in (("WarmupLR", {"warmup_num_steps": 5}), ("StepLR", {"step_size": 3})):
        load_config({**SIZE, "scheduler": {"type": kind, "params": params}})
    with pytest.raises(ConfigError, match=r"scheduler\.type: 'OneCycle' is none of WarmupLR"):
        load_config({**SIZE, "scheduler": {"type": "OneCycle"}})
    with pytest.raises(ConfigError, match=r"scheduler\.params\.warmup_steps: WarmupLR takes warmup_min_lr"):
        load_config({**SIZE, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}})


def test_a_file_is_explained_key_by_key(capsys: pytest.CaptureFixture[str]) -> None:
    config.main([str(ARTICLE), "--params", "1.3B", "--ranks", "4"])
    lines = capsys.readouterr().out.splitlines()
    told = {line.split("  ")[0]: line for line in lines}
    assert "used      reads it" in told["fp16.enabled"]
    assert "ignored   ignores it" in told["zero_optimization.allgather_bucket_size"]
    assert "ignored   reads it" in told["zero_optimization.reduce_scatter"]
    assert f"DeepSpeed {DEEPSPEED}, stage 3" in told["key"]
    assert "4 ranks, Batch(train=32, micro=2, steps=4)" in lines


def test_to_explain_a_file_loads_nothing_that_trains() -> None:
    loaded = "print(*(name for name in sys.modules if name.startswith('minizero.')))"
    code = f"import sys\nfrom minizero.config import main\nmain(sys.argv[1:])\n{loaded}"
    command = [sys.executable, "-c", code, str(ARTICLE), "--params", "1.3B"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    rooms = {name.split(".")[1] for name in done.stdout.splitlines()[-1].split()}
    assert rooms == {"_face", "collectives", "config", "memory", "offload", "optimizer", "sharding"}
    assert "minizero.offload.step" not in done.stdout


def test_a_file_that_is_refused_is_explained_too_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "zero_quantized_weights": true}, "x": 1}'
    )
    with pytest.raises(SystemExit) as end:
        config.main([str(file)])
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert "zero_optimization.zero_quantized_weights  true   refused   reads it" in shown.out
    assert "zero_quantized_weights: true is not supported: ZeRO++ is not built" in shown.err
    assert "x: unknown key" in shown.err
