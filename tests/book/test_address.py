"""The public address, one line of _config.yml: what is there when it is set, and that nothing is when it is not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import address
import nbformat
import pytest
import yaml
from IPython.core.interactiveshell import InteractiveShell
from repository import ROOT

SOMEWHERE = "https://github.com/somebody/a.book"


def with_address(target: Path, url: str) -> Path:
    """The book's settings with another address, for a book of two pages, one of them a notebook."""
    config, count = re.subn(r'^  url: ".*"$', f'  url: "{url}"', (ROOT / "_config.yml").read_text(), flags=re.MULTILINE)
    assert count == 1
    (target / "_config.yml").write_text(config)
    (target / "_toc.yml").write_text("format: jb-book\nroot: book/intro\nchapters:\n  - file: book/chapter\n")
    shutil.copytree(ROOT / "book" / "_ext", target / "book" / "_ext", ignore=shutil.ignore_patterns("__pycache__"))
    (target / "book" / "_static").mkdir()
    (target / "book" / "references.bib").touch()
    (target / "book" / "intro.md").write_text("# A book\n\nText.\n")
    cells = [nbformat.v4.new_markdown_cell("# A chapter"), nbformat.v4.new_code_cell("1 + 1")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), target / "book" / "chapter.ipynb")
    return target


def site(book: Path) -> dict[str, list[str]]:
    """Build the book; for each page the addresses that its links and buttons lead to."""
    address.main([], book)
    command = [Path(sys.executable).with_name("jupyter-book"), "build", book, "-W", "--keep-going"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page: (book / "_build" / "html" / "book" / f"{page}.html").read_text() for page in ("intro", "chapter")}
    return {page: re.findall(r'href="(https?://[^"]*)"', text) for page, text in pages.items()}


def leads_to(links: list[str], *hosts: str) -> list[str]:
    return sorted({link for link in links if re.match(rf"https?://({'|'.join(map(re.escape, hosts))})/", link)})


def test_without_an_address_no_page_leads_to_a_repository_or_a_launcher(tmp_path: Path) -> None:
    for links in site(with_address(tmp_path, "")).values():
        assert leads_to(links, "github.com", "mybinder.org", "colab.research.google.com") == []


def test_with_an_address_pages_lead_to_it_and_notebooks_to_binder_and_colab(tmp_path: Path) -> None:
    links = site(with_address(tmp_path, SOMEWHERE))
    launchers = ("mybinder.org", "colab.research.google.com")
    assert leads_to(links["intro"], "github.com") == leads_to(links["chapter"], "github.com") == [SOMEWHERE]
    assert leads_to(links["intro"], *launchers) == []
    assert leads_to(links["chapter"], *launchers) == [
        "https://colab.research.google.com/github/somebody/a.book/blob/main/book/chapter.ipynb",
        "https://mybinder.org/v2/gh/somebody/a.book/main?urlpath=lab/tree/book/chapter.ipynb",
    ]
    assert "git clone" not in (tmp_path / "_build" / "html" / "book" / "chapter.html").read_text()


@pytest.mark.parametrize("url", ["github.com/a/b", "https://github.com/a", f"{SOMEWHERE}/", f"{SOMEWHERE}.git"])
def test_an_address_of_another_form_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert address.main([], with_address(tmp_path, url)) == 2
    assert "_config.yml, repository.url: https://github.com/OWNER/NAME" in capsys.readouterr().err


# ---- Colab's first cell


def test_the_notebooks_are_as_the_address_asks() -> None:
    assert address.main(["--check"]) == 0


def test_the_cell_comes_with_the_address_and_goes_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = with_address(tmp_path, SOMEWHERE) / "book" / "chapter.ipynb"
    before = json.loads(file.read_text())
    assert address.main(["--check"], tmp_path) == 1
    assert "chapter.ipynb" in capsys.readouterr().out
    assert json.loads(file.read_text()) == before
    for _ in range(2):
        assert address.main([], tmp_path) == 0
    assert address.main(["--check"], tmp_path) == 0
    nbformat.validate(json.loads(file.read_text()))
    first, *others = json.loads(file.read_text())["cells"]
    assert (first["id"], others) == ("colab", before["cells"])
    assert f"!git clone --quiet --depth 1 {SOMEWHERE}\n" in "".join(first["source"])
    config = tmp_path / "_config.yml"
    config.write_text(config.read_text().replace(SOMEWHERE, ""))
    assert address.main([], tmp_path) == 0
    assert json.loads(file.read_text()) == before


def test_the_cell_fetches_the_repository_and_installs_it_where_a_notebook_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, elsewhere = tmp_path / "origin" / "a.book", tmp_path / "content"
    for name in ("scripts/train.py", "book/chapter.ipynb"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).touch()
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@localhost"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *command], check=True)
    shell, installed = InteractiveShell(), []
    shell.register_magic_function(installed.append, "line", "pip")
    source = "".join(address.cell(f"file://{repository}")["source"])

    def run_in(folder: Path) -> Path:
        monkeypatch.chdir(folder)
        shell.run_cell(source).raise_error()
        return Path.cwd()

    elsewhere.mkdir()
    for _ in range(2):  # the second time in a kernel that was started anew
        assert run_in(elsewhere) == elsewhere / "a.book" / "book"
        assert installed.pop() == 'install --quiet "..[notebook,others]"'
        assert run_in(Path.cwd()) == elsewhere / "a.book" / "book"
        assert installed == []


def test_what_the_notebooks_import_is_in_what_the_cell_installs() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r'"([\w-]+)', text[text.index("dependencies =") : text.index("[tool.setuptools.pack")]))
    imported = set()
    for file in (ROOT / "book").glob("*.ipynb"):
        code = ["".join(c["source"]) for c in json.loads(file.read_text())["cells"] if c["cell_type"] == "code"]
        imported |= set(re.findall(r"^\s*(?:import|from) ([a-z]\w*)", "\n".join(code), re.MULTILINE))
    missing = imported - set(sys.stdlib_module_names) - {"minizero"} - {name.replace("-", "_") for name in named}
    assert missing - {"IPython"} == set()  # which every kernel has


# ---- nothing leads elsewhere


def test_no_file_names_an_address_of_this_repository_but_the_setting() -> None:
    url = address.read(ROOT / "_config.yml")
    mentions = re.compile(r"(?:github\.com|ghcr\.io|github\.io|gitlab\.com)/[\w.-]+/minizero\b|\.github\.io/minizero")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [name for name in listed if Path(name).suffix in {".md", ".ipynb", ".yml", ".yaml", ".toml", ".cff", ".py"}]
    found = {name: set(mentions.findall((ROOT / name).read_text())) for name in texts if (ROOT / name).is_file()}
    allowed = set(mentions.findall(url))
    assert {name: names - allowed for name, names in found.items() if names - allowed} == {}


# ---- workflows


@pytest.mark.parametrize("file", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.stem)
def test_a_workflow_pins_its_actions_and_bounds_its_jobs(file: Path) -> None:
    """What the linters of `make lint` do not ask for: full versions, a limit of time for each job."""
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {}
    assert "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
        assert set(job["permissions"]) <= {"contents", "packages", "pages", "id-token"}
        assert job["permissions"].get("contents", "read") == "read"
        actions = [step["uses"] for step in job["steps"] if "uses" in step]
        assert [action for action in actions if not re.fullmatch(r"[\w./-]+@v\d+\.\d+\.\d+", action)] == []
