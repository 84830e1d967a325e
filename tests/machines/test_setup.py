"""What `make` does first: an environment of the Python that is asked for, and a HOME that can be written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment, with this Python, is complete."""
    folder = tmp_path / "a checkout, größer"
    (folder / "scripts").mkdir(parents=True)
    for name in ("Makefile", "requirements.txt", "pyproject.toml", "scripts/venv.sh"):
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    for stamp in (".requirements-installed", ".package-installed"):
        (folder / ".venv" / stamp).touch()
    return folder


def call(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command as a reader types it: without PYTHON, and without what a `make` around these tests hands down."""
    handed_down = re.compile("PYTHON|M(AKE)?FLAGS|MAKE.*")
    environment = {name: value for name, value in os.environ.items() if not handed_down.fullmatch(name)} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8")


def impostor(folder: Path, version: tuple[int, int]) -> str:
    """A program that calls itself a Python of this version."""
    program = folder / "some python"
    program.write_text(
        f'#!/bin/sh\nshift\nexec "{sys.executable}" -c "import sys; sys.version_info = {(*version, 0)}; $1"\n'
    )
    program.chmod(0o755)
    return str(program)


def test_an_environment_that_is_complete_stays(checkout: Path) -> None:
    for variables in ({}, {"PYTHON": sys.executable}):
        assert "Nothing to be done" in call(checkout, "make", "setup", **variables).stdout


def test_another_python_makes_it_anew(checkout: Path) -> None:
    done = call(checkout, "make", "--dry-run", "setup", PYTHON=impostor(checkout, (3, 99)))
    assert "bash scripts/venv.sh .venv" in done.stdout


def test_a_python_that_does_not_fit_is_named(checkout: Path) -> None:
    done = call(checkout, "bash", "scripts/venv.sh", ".venv", PYTHON=impostor(checkout, (3, 10)))
    assert done.returncode == 1
    assert f"Python 3.11, 3.12 or 3.13 (found: {checkout}/some python)" in done.stderr


def test_where_home_cannot_be_written_a_folder_of_ours_serves(checkout: Path) -> None:
    def home(value: str) -> str:
        done = call(checkout, "make", "--eval", "home: ; @echo $$HOME", "home", HOME=value)
        return done.stdout.strip()

    assert home(str(checkout)) == str(checkout)
    for nowhere in ("/etc/passwd", "/nonexistent/home"):
        assert home(nowhere) == str(checkout / "_build/home")
        assert (checkout / "_build/home").is_dir()
