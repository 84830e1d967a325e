"""The repository as a book: cells equal to the package, notebooks as they are committed, modules in reading order."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import draw_stages
import nbformat
import pytest
import sync

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "minizero"
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))
OF_SCRIPTS = {file.stem for file in (ROOT / "scripts").rglob("*.py")} - {"__init__"}
MODULES = {file.stem: file for file in sorted(PACKAGE.glob("*.py")) if file.stem != "__init__"}
# A model, a text, arithmetic and rank cells are of use without the rest; the helpers of `ranks` are chapter 00 with it.
ALONE = {"models", "data", "memory", "meter", "ranks", "figures"}


def imports(module: str) -> set[str]:
    """Names of the minizero modules that `module` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{module} imports relatively"
    named = {name.removeprefix("minizero.") for name in found if name.startswith("minizero.")}
    return named & set(MODULES)


def chapter(module: str) -> int:
    """The chapter in which the module is built, from the first paragraph of its docstring."""
    docstring = ast.get_docstring(ast.parse(MODULES[module].read_text())) or ""
    number = re.search(r"[Cc]hapters? (\d+)", docstring.split("\n\n")[0])
    assert number, f"{module}: the first paragraph of the docstring names no chapter, as in 'Chapter 11, sharding: …'"
    return int(number[1])


# ---- modules


@pytest.mark.parametrize("module", MODULES)
def test_a_module_names_its_chapter_and_imports_only_from_it_or_earlier_ones(module: str) -> None:
    own = chapter(module)
    assert {name: chapter(name) for name in imports(module) if chapter(name) > own} == {}


def test_the_import_rule_sees_every_way_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gather.py").write_text(
        "import torch\nfrom minizero import zero\nimport minizero.reduce\ndef f():\n  from minizero.models import GPT\n"
    )
    monkeypatch.setitem(MODULES, "gather", tmp_path / "gather.py")
    assert imports("gather") == {"zero", "reduce", "models"}


def test_modules_of_one_chapter_do_not_import_each_other_in_a_circle() -> None:
    order: list[str] = []
    while len(order) < len(MODULES):
        ready = [name for name in MODULES if name not in order and imports(name) <= set(order)]
        assert ready, f"a circle of imports among {sorted(set(MODULES) - set(order))}"
        order += ready


@pytest.mark.parametrize("module", sorted(ALONE))
def test_a_module_that_is_of_use_alone_imports_nothing_of_ours(module: str) -> None:
    assert {name for name in imports(module) if not name.startswith("rank")} == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_short_enough_to_read(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= 250


def test_the_reference_lists_every_module_in_the_order_of_chapters() -> None:
    listed = re.findall(r"automodule:: minizero\.(\w+)", (ROOT / "book" / "api.md").read_text())
    assert sorted(listed) == sorted(MODULES)
    assert [chapter(module) for module in listed] == sorted(chapter(module) for module in listed)


def test_readme_and_intro_name_every_chapter_and_the_readme_every_module() -> None:
    readme, intro = (ROOT / "README.md").read_text(), (ROOT / "book" / "intro.md").read_text()
    assert [file.stem for file in NOTEBOOKS if f"book/{file.stem}.ipynb" not in readme] == []
    assert [file.stem for file in NOTEBOOKS if f"{{doc}}`{file.stem}`" not in intro] == []
    assert [module for module in MODULES if f"`{module}.py`" not in readme] == []


def test_every_question_is_answered_somewhere_and_listed() -> None:
    sources = [file.read_text() for file in sorted((ROOT / "book").glob("*.md"))]
    sources += [
        "\n".join("".join(cell["source"]) for cell in json.loads(file.read_text())["cells"]) for file in NOTEBOOKS
    ]
    answered = sorted(int(number) for text in sources for number in re.findall(r"^\(q(\d+)\)=$", text, re.MULTILINE))
    listed = re.findall(r"\{ref\}`q(\d+)`", (ROOT / "book" / "questions.md").read_text())
    assert answered == sorted(map(int, listed)) == list(range(1, 24))


# ---- notebooks


def test_every_file_of_the_toc_exists_and_every_notebook_is_in_it() -> None:
    listed = re.findall(r"\bbook/\w+", (ROOT / "_toc.yml").read_text())
    assert len(listed) == len(set(listed))
    assert [name for name in listed if not list(ROOT.glob(f"{name}.*"))] == []
    assert [file.stem for file in NOTEBOOKS if f"book/{file.stem}" not in listed] == []


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_committed_without_outputs_and_with_an_id_for_every_cell(file: Path) -> None:
    raw = json.loads(file.read_text())
    nbformat.validate(raw)
    assert (raw["nbformat"], raw["nbformat_minor"]) >= (4, 5)
    ids = [cell["id"] for cell in raw["cells"]]
    assert len(ids) == len(set(ids))
    code = [cell for cell in raw["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    assert "widgets" not in raw["metadata"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_imports_from_packages_alone(file: Path) -> None:
    """What a reader imports is installed, wherever the notebook lies: no cell looks for modules in a folder."""
    code = "\n".join(cell.source for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code")
    assert re.findall(r".*sys\.path.*|.*PYTHONPATH.*", code) == []
    assert re.findall(rf"^\s*(?:from|import) (?:{'|'.join(OF_SCRIPTS)})\b.*", code, re.MULTILINE) == []


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_title_begins_with_the_number_of_its_file(file: Path) -> None:
    titles = [cell.source for cell in nbformat.read(file, as_version=4).cells if cell.source.startswith("# ")]
    assert [title[:7] for title in titles if title[2:7] != f"{file.stem[:2]} · "] == []


def test_every_label_is_given_once() -> None:
    texts = [file.read_text() for file in sorted((ROOT / "book").glob("*.*")) if file.suffix in (".ipynb", ".md")]
    labels = [label for text in texts for label in re.findall(r":label: ([\w-]+)", text)]
    assert len(labels) > 50
    assert sorted(label for label in set(labels) if labels.count(label) > 1) == []


def test_every_cell_that_shows_the_package_shows_it_as_it_is() -> None:
    assert sync.main(["--check"]) == 0


def test_the_picture_is_what_its_script_draws() -> None:
    assert (ROOT / "book" / "_static" / "stages.svg").read_text() == draw_stages.figure() + "\n"


# ---- scripts/sync.py

MODULE = '''"""Chapter 99, a module."""

import functools

SIZES: dict[str, int] = {
    "one": 1,
}


class Layout:
    """Says where things lie."""

    @functools.cached_property
    def numel(self) -> int:
        """How many."""
        return 3


@functools.cache
def double(x: int) -> int:
    return 2 * x
'''
SOURCES = {
    "chapter.SIZES": 'SIZES: dict[str, int] = {\n    "one": 1,\n}',
    "chapter.Layout": MODULE[MODULE.index("class") : MODULE.index("\n\n\n@functools.cache\n")],
    "chapter.Layout.numel": '@functools.cached_property\ndef numel(self) -> int:\n    """How many."""\n    return 3',
    "chapter.double": "@functools.cache\ndef double(x: int) -> int:\n    return 2 * x",
}


class Scratch:
    """A package of one module and a notebook, with `sync` to run on them."""

    def __init__(self, folder: Path, *cells: tuple[str, str]) -> None:
        self.package, self.notebook = folder / "package", folder / "99_scratch.ipynb"
        self.package.mkdir()
        (self.package / "chapter.py").write_text(MODULE)
        made = [
            nbformat.v4.new_code_cell(text, metadata={"tags": ["other", f"minizero: {path}"]}) for path, text in cells
        ]
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("Ψ"), *made]), self.notebook)

    def sync(self, *options: str) -> int:
        return sync.main([*options, "--package", str(self.package), str(self.notebook)])

    def cells(self) -> list[dict[str, Any]]:
        return [{**cell, "source": "".join(cell["source"])} for cell in json.loads(self.notebook.read_text())["cells"]]


def test_sync_fills_cells_with_the_source_of_classes_functions_methods_and_constants(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, *((path, "old = 1\n") for path in SOURCES))
    before = scratch.cells()
    assert scratch.sync() == 0
    after = scratch.cells()
    assert [cell["source"] for cell in after] == ["Ψ", *SOURCES.values()]
    assert [{**cell, "source": ""} for cell in after] == [{**cell, "source": ""} for cell in before]


def test_sync_writes_nothing_when_nothing_differs(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, *SOURCES.items())
    compact = json.dumps(json.loads(scratch.notebook.read_text()))  # a layout that sync itself would not write
    scratch.notebook.write_text(compact)
    assert scratch.sync() == 0
    assert scratch.notebook.read_text() == compact


def test_check_lists_the_cell_that_differs_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = Scratch(tmp_path, *SOURCES.items())
    assert scratch.sync("--check") == 0
    (scratch.package / "chapter.py").write_text(MODULE.replace("2 * x", "x + x"))
    before = scratch.notebook.read_text()
    capsys.readouterr()
    assert scratch.sync("--check") == 1
    shown = capsys.readouterr().out
    assert "99_scratch.ipynb" in shown
    assert scratch.cells()[4]["id"] in shown
    assert "chapter.double" in shown
    assert "chapter.Layout" not in shown
    assert scratch.notebook.read_text() == before


def test_check_finds_a_changed_cell_of_the_book(tmp_path: Path) -> None:
    """On a copy of the real notebooks: one letter more in any cell that shows the package is found."""
    for file in NOTEBOOKS:
        notebook = json.loads(file.read_text())
        for cell, _ in sync.tagged_cells(notebook):
            original, cell["source"] = cell["source"], [*cell["source"], "#"]
            (tmp_path / file.name).write_text(json.dumps(notebook))
            assert sync.main(["--check", str(tmp_path / file.name)]) == 1
            cell["source"] = original


def test_sync_keeps_a_cell_magic_on_the_first_line(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, ("chapter.double", "%%ranks --local\nold = 1"))
    assert scratch.sync() == 0
    assert scratch.cells()[1]["source"] == "%%ranks --local\n" + SOURCES["chapter.double"]


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("chapter.Lay", "chapter.py defines no Lay"),
        ("chapter.Layout.shape", "chapter.py defines no Layout.shape"),
        ("chapters.Layout", "there is no module chapters.py"),
        ("chapter", "write module.Object"),
    ],
)
def test_an_unknown_object_is_an_error_that_names_notebook_and_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, complaint: str
) -> None:
    scratch = Scratch(tmp_path, (path, ""))
    assert scratch.sync() == 2
    shown = capsys.readouterr().err
    assert f"99_scratch.ipynb, cell {scratch.cells()[1]['id']}, tag 'minizero: {path}'" in shown
    assert complaint in shown
