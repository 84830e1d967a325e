"""Build the site with Jupyter Book, from a clean start and with every warning an error.

python scripts/book.py build                    # execute the notebooks, through a cache
python scripts/book.py copy DIR                 # a copy of the book in which notebooks can be executed and kept
python scripts/book.py build --executed DIR     # take the outputs from such a copy
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
# What a notebook can depend on besides its own cells.
CODE = ("src", "scripts", "configs", "requirements.txt")


def code_hash() -> str:
    """A fingerprint of all code and settings that cells import or start."""
    digest = hashlib.sha256()
    for name in CODE:
        files = [ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*.*"))
        for file in files:
            if file.is_file() and file.suffix in {".py", ".json", ".txt"} and ".egg-info" not in str(file):
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def drop_stale_cache() -> None:
    """Forget executed notebooks when the code changed: the cache compares nothing but the cells' own text."""
    stamp = BUILD / "code.sha256"
    now = code_hash()
    if not stamp.is_file() or stamp.read_text() != now:
        shutil.rmtree(BUILD / ".jupyter_cache", ignore_errors=True)
    BUILD.mkdir(exist_ok=True)
    stamp.write_text(now)


def copy_book(target: Path) -> None:
    """Copy the book to `target`, beside links to what its notebooks reach as ``../scripts`` and the like."""
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
    shutil.copytree(ROOT / "book", target / "book", ignore=ignored)
    shutil.copy(ROOT / "_toc.yml", target)
    for name in ("src", "scripts", "configs", "slurm"):
        (target / name).symlink_to(ROOT / name)
    config = (ROOT / "_config.yml").read_text(encoding="utf-8")
    executed = config.replace("execute_notebooks: cache", "execute_notebooks: 'off'")
    assert executed != config, "_config.yml no longer says `execute_notebooks: cache`"
    (target / "_config.yml").write_text(executed, encoding="utf-8")


def build(executed: Path | None) -> int:
    """Build into _build/html; returns Jupyter Book's exit code."""
    if executed is not None and not (executed / "_config.yml").is_file():
        print(f"error: {executed} holds no executed book; run `make test-notebooks` first", file=sys.stderr)
        return 2
    if executed is None:
        drop_stale_cache()
    for name in ("html", ".doctrees", "jupyter_execute"):
        shutil.rmtree(BUILD / name, ignore_errors=True)
    jupyter_book = Path(sys.executable).with_name("jupyter-book")
    # -W makes warnings errors, --keep-going lists them all, -n wants a target behind every reference
    options = ["--path-output", str(ROOT), "-W", "--keep-going", "-n"]
    code = subprocess.run([jupyter_book, "build", executed or ROOT, *options], check=False).returncode
    if code == 0:
        print(f"the book is in {BUILD / 'html' / 'index.html'}")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the book's site.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build").add_argument("--executed", type=Path, metavar="DIR")
    commands.add_parser("copy").add_argument("target", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.command == "copy":
        copy_book(options.target)
        return 0
    return build(options.executed)


if __name__ == "__main__":
    sys.exit(main())
