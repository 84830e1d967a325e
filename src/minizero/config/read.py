"""Chapter 26, config: read a file strictly, and hold each of its keys against the table of keys.

All that is wrong with a file is reported at once, each with the path of its key. Nothing here needs a process group:
every rank reads the same file and comes to the same verdict before any collective.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, StrictStr, TypeAdapter, ValidationError

from minizero.config.keys import KEYS


class ConfigError(ValueError):
    """Keys of a configuration that cannot work; one line for each."""

    def __init__(self, source: str, problems: list[str]) -> None:
        lines = problems if len(problems) == 1 else ["", *(f"  {problem}" for problem in problems)]
        super().__init__(f"{source}: " + "\n".join(lines))


class _Pairs(list[Any]):
    """An object of a JSON file as it stands there, duplicate keys included."""


def read_json(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name for messages, content) of a file, or of a dict as it is. Raises ConfigError, or OSError naming the file."""
    if isinstance(config, Mapping):
        return "config", _renamed(dict(config))
    source = os.fspath(config)
    try:
        raw = json.loads(Path(source).read_text(encoding="utf-8-sig"), object_pairs_hook=_Pairs)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(source, [f"not JSON: {error}"]) from None
    problems: list[str] = []
    content = _to_dicts(raw, "", problems)
    if not isinstance(content, dict):
        problems.append(f"must hold one object, got {shorten(repr(content), 60)}")
    if problems:
        raise ConfigError(source, problems)
    return source, _renamed(content)


def _renamed(content: dict[str, Any]) -> dict[str, Any]:
    """With "bf16" for "bfloat16", its old name, which DeepSpeed reads as well; not if both are there."""
    return {"bf16" if name == "bfloat16" and "bf16" not in content else name: v for name, v in content.items()}


def _to_dicts(value: Any, path: str, problems: list[str]) -> Any:
    if isinstance(value, _Pairs):
        names = [name for name, _ in value]
        twice = {name for name in names if names.count(name) > 1}
        problems += [f"{path}{name}: the key is there twice" for name in sorted(twice)]
        return {name: _to_dicts(inner, f"{path}{name}.", problems) for name, inner in value}
    if isinstance(value, list):
        return [_to_dicts(inner, f"{path}{i}.", problems) for i, inner in enumerate(value)]
    return value


def _number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise ValueError("must be a number")
    return value


def _whole(value: Any) -> Any:
    if _number(value) != int(value):
        raise ValueError("must be a whole number")
    return int(value)  # 5e8 in a JSON file is a float


Real = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Size = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
KINDS: dict[str, TypeAdapter[Any]] = {
    "flag": TypeAdapter(StrictBool),
    "real": TypeAdapter(Real),
    "size": TypeAdapter(Size),
    "count": TypeAdapter(Count),
    "text": TypeAdapter(StrictStr),
    "block": TypeAdapter(dict[str, Any]),
    "tree": TypeAdapter(Any),
}


def complaints(error: ValidationError, path: str = "") -> Iterator[str]:
    """One line for each thing pydantic found wrong in the value at `path`."""
    for each in error.errors():
        where = ".".join([part for part in (path, *map(str, each["loc"])) if part])
        text = each["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        text = {"dict_type": "must be a block, {...}", "missing": "must be there"}.get(each["type"], text)
        found = "" if isinstance(each["input"], dict) else f", got {shown(each['input'])}"
        yield f"{where}: {text}{found}".removeprefix(": ")


def shown(value: Any, width: int = 200) -> str:
    """A value as JSON has it, whatever it is, and not too long."""
    return shorten(json.dumps(value, default=repr, skipkeys=True), width, placeholder=" ...")


def is_comment(name: Any) -> bool:
    """Whether a key is none of the configuration: a name that begins like a comment, or JSON's own `$schema`."""
    return str(name).startswith(("_", "$", "#", "//"))


def sift(block: Mapping[str, Any], path: str, problems: list[str], ignored: list[str]) -> dict[str, Any]:
    """The keys of `block`, the object at `path`, that minizero uses; `null` counts as not there.

    Adds a line to `problems` for each key that is unknown, wrong or refused, and the path of each that is ignored, with
    whatever value. Comments, keys such as "_comment" and "$schema", are left out.
    """
    used: dict[str, Any] = {}
    for name, value in block.items():
        key = KEYS.get(f"{path}{name}")
        if is_comment(name):
            continue
        if key is None:
            problems.append(f"{path}{name}: unknown key{_nearest(path, str(name))}")
        elif value is None:
            pass
        elif key.fate == "ignored":  # whatever the value is
            ignored.append(key.path)
        elif key.kind == "block" and isinstance(value, Mapping):
            inside = sift(value, f"{key.path}.", problems, ignored)
            used |= {name: inside} if key.fate == "used" else {}
        elif key.fate == "refused":
            if not key.is_off(value):
                problems.append(f"{key.path}: {shown(value)} is not supported: {key.why}")
        elif autos := list(_autos(value, key.path)):
            problems += [
                f'{auto}: "auto" is for the Trainer of transformers to fill in: give a value' for auto in autos
            ]
        else:
            try:
                checked = KINDS[key.kind].validate_python(value)
            except ValidationError as error:
                problems += complaints(error, key.path)
                continue
            is_block = isinstance(checked, dict)
            used[name] = {k: v for k, v in checked.items() if not is_comment(k)} if is_block else checked
    return used


def _autos(value: Any, path: str) -> Iterator[str]:
    if value == "auto":
        yield path
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _autos(inner, f"{path}.{name}")


def _nearest(path: str, name: str) -> str:
    """The end of a sentence: a key of the same block that is spelt nearly so, or else one of another."""
    here = {key.removeprefix(path): key for key in KEYS if key.startswith(path) and "." not in key[len(path) :]}
    anywhere = {key.rpartition(".")[2]: key for key in reversed(KEYS)}
    names = here if get_close_matches(name, here) else anywhere
    found = get_close_matches(name, names, n=1)
    return f"; did you mean {names[found[0]]}?" if found else ""
