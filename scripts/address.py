"""The public address of the repository, `repository.url` in _config.yml, in the notebooks: Colab's first cell.

Colab opens a notebook alone. When the address is set, the first cell of every notebook fetches the rest and installs
what is missing; anywhere else it does nothing. As long as the address is empty, no notebook has such a cell.

    python scripts/address.py            # put the cell into all notebooks, or take it out
    python scripts/address.py --check    # list the notebooks that need it; exit code 1 if there is one
    python scripts/address.py --print    # the address
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
# Colab opens notebooks of GitHub's only, and the workflows in .github are GitHub's too
ADDRESS = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+(?<!\.git)")
ID = "colab"
SOURCE = '''# Colab opens this notebook alone: here it gets what belongs to it. Elsewhere this cell does nothing.
import os

if not os.path.exists("../scripts/train.py"):
    if not os.path.exists("{name}"):
        !git clone --quiet --depth 1 {address}
    %cd -q {name}/book
    %pip install --quiet "..[notebook,others]"'''


def read(config: Path) -> str:
    """The address, or "" as long as there is none."""
    address: str = yaml.safe_load(config.read_text(encoding="utf-8"))["repository"]["url"]
    if address and not ADDRESS.fullmatch(address):
        raise ValueError(f'_config.yml, repository.url: https://github.com/OWNER/NAME or "", got {address!r}')
    return address


def cell(address: str) -> dict[str, Any]:
    source = SOURCE.format(address=address, name=address.rsplit("/", 1)[1])
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": ID,
        "metadata": {"tags": ["remove-cell"]},
        "outputs": [],
        "source": source.splitlines(keepends=True),
    }


def place(file: Path, address: str, check: bool) -> bool:
    """Make the notebook's first cell what the address asks for (not with `check`); returns whether it was not."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    others = [one for one in notebook["cells"] if one["id"] != ID]
    wanted = [cell(address), *others] if address else others
    if wanted == notebook["cells"]:
        return False
    if not check:
        notebook["cells"] = wanted
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Put Colab's first cell into the notebooks, or take it out.")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a notebook differs")
    group.add_argument("--print", action="store_true", help="the address, and nothing else")
    options = parser.parse_args(arguments)
    try:
        address = read(root / "_config.yml")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.print:
        print(address)
        return 0
    differing = [file for file in sorted((root / "book").glob("*.ipynb")) if place(file, address, options.check)]
    for file in differing:
        print(f"{'not as' if options.check else 'made as'} repository.url in _config.yml asks: {file.name}, cell {ID}")
    if options.check and differing:
        print("run `make sync`", file=sys.stderr)
    return int(options.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
