"""The list of machines: CONTRIBUTING names each, and each is set up or skipped by name, never passed without proof."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import personalities
import pytest
import yaml
from personalities import PERSONALITIES, Personality, run_as, two
from repository import ROOT


def test_contributing_lists_every_personality() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [p.name for p in PERSONALITIES if f"`{p.name}`" not in text] == []


def test_every_night_runs_all() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    assert jobs["other-machines"]["strategy"]["matrix"]["machine"] == [p.name for p in PERSONALITIES]


def test_what_is_to_be_run_exists() -> None:
    notebooks = [ROOT / "book" / f"{name}.ipynb" for name in personalities.NOTEBOOKS]
    assert [file.name for file in notebooks if not file.exists()] == []
    for file, _, function in (name.partition("::") for name in personalities.TESTS):
        assert f"def {function}" in (ROOT / "tests" / file).read_text()


def test_two_are_chosen_by_the_text_and_all_have_their_turn() -> None:
    assert two("a commit") == two("a commit")
    assert {p.name for number in range(200) for p in two(str(number))} == {p.name for p in PERSONALITIES}
    assert all(one != other for one, other in map(two, "abcdefgh"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """`make`, and what it was called with: a stand-in that runs nothing and fails where the tests are asked for."""
    calls: list[list[str]] = []
    run = subprocess.run

    def instead(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        if "make" not in command:
            return run(command, **options)
        calls.append(command[command.index("make") :])
        code = int("test-code" in command)
        if code:
            options["stdout"].write(b"FAILED tests/test_x.py::test_y - assert 0\n")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", instead)
    return calls


def test_a_personality_that_is_not_what_it_says_is_skipped(made: list[list[str]], tmp_path: Path) -> None:
    liar = Personality("all-cores", "", "False")
    assert run_as(liar, True, tmp_path / "log") == "skipped: this machine cannot be made so"
    assert made == []


def test_what_failed_is_said(made: list[list[str]], tmp_path: Path) -> None:
    told = run_as(Personality("all-cores", "", "True"), True, tmp_path / "log")
    assert told == "FAILED:\n    FAILED tests/test_x.py::test_y - assert 0"
    assert ["test-notebooks" in call for call in made] == [True, False]


@pytest.mark.parametrize("personality", PERSONALITIES, ids=lambda p: p.name)
def test_each_is_set_up_or_says_why_not(personality: Personality, made: list[list[str]], tmp_path: Path) -> None:
    outcome = run_as(personality, True, tmp_path / "log")
    assert outcome.startswith("FAILED") if made else re.match(r"skipped: \w", outcome), outcome
