"""What a package shows of its files, without opening one: a name is looked up when it is first used.

So a kernel that starts with `minizero.ranks.worker` does not wait for IPython, and whoever explains a configuration
does not load what trains with it.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def face(package: str, files: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`; `files` are the names that each of its files gives."""
    home = {name: file for file, names in files.items() for name in names.split()}

    def look_up(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return look_up, lambda: sorted({*vars(sys.modules[package]), *home}), sorted(home)
