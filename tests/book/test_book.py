"""The repository as a book: cells equal to the package, notebooks as they are committed, modules in reading order."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import draw_stages
import nbformat
import pytest
import sync
from repository import ROOT

import minizero

PACKAGE = ROOT / "src" / "minizero"
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))
OF_SCRIPTS = {file.stem for file in (ROOT / "scripts").rglob("*.py")} - {"__init__"}
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file
    for file in sorted(PACKAGE.rglob("*.py"))
    if not file.stem.startswith("_")
}
# a package of several files is one module to whoever is outside: its face, __init__.py, hands on the names of its files
FACES = {file.parent.name: file for file in sorted(PACKAGE.glob("*/__init__.py"))}
ROOMS = sorted({module.split(".")[0] for module in MODULES})
# A model, a text, arithmetic and rank cells are of use without the rest.
ALONE = {"models", "data", "memory", "meter", "ranks", "figures"}


def room(module: str) -> str:
    return module.split(".")[0]


def handed_on(face: Path) -> dict[str, str]:
    """The names that a face hands on, each with the file it is from: the second argument of its call of `face`."""
    calls = [node for node in ast.walk(ast.parse(face.read_text())) if isinstance(node, ast.Call)]
    (files,) = [
        ast.literal_eval(call.args[1]) for call in calls if isinstance(call.func, ast.Name) and call.func.id == "face"
    ]
    return {name: file for file, names in files.items() for name in names.split()}


def imports(module: str) -> set[str]:
    """Names of the minizero modules that `module` imports, anywhere in it; what a face hands on is from its file."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} - {f"minizero.{face}" for face in FACES}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{module} imports relatively"
    named = {name.removeprefix("minizero.") for name in found if name.startswith("minizero.")}
    for own, face in FACES.items():
        named |= {f"{own}.{file}" for name, file in handed_on(face).items() if {own, f"{own}.{name}"} & named}
    return named & set(MODULES)


def chapter(module: str) -> int:
    """The chapter in which the module is built, from the first paragraph of its docstring."""
    docstring = ast.get_docstring(ast.parse(MODULES.get(module, FACES.get(module)).read_text())) or ""
    number = re.search(r"[Cc]hapters? (\d+)", docstring.split("\n\n")[0])
    assert number, f"{module}: the first paragraph of the docstring names no chapter, as in 'Chapter 11, sharding: …'"
    return int(number[1])


# ---- modules


@pytest.mark.parametrize("module", MODULES)
def test_a_module_names_its_chapter_and_imports_only_from_it_or_earlier_ones(module: str) -> None:
    own = chapter(module)
    assert {name: chapter(name) for name in imports(module) if chapter(name) > own} == {}


def test_the_import_rule_sees_every_way_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom minizero import memory\nimport minizero.data\ndef f():\n  from minizero.models import GPT\n"
    )
    monkeypatch.setitem(MODULES, "mine", tmp_path / "mine.py")
    assert imports("mine") == {"memory", "data", "models"}


def test_the_import_rule_looks_behind_a_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").write_text('a, b, c = face(__name__, {"one": "Unit State", "two": "tensors_in"})')
    monkeypatch.setitem(FACES, "hall", tmp_path / "__init__.py")
    for file in ("one", "two", "three"):
        monkeypatch.setitem(MODULES, f"hall.{file}", tmp_path / f"{file}.py")
    for text, seen in {
        "from minizero.hall import State": {"hall.one"},
        "from minizero.hall import Unit, tensors_in": {"hall.one", "hall.two"},
        "from minizero.hall import three": {"hall.three"},
        "from minizero.hall.three import anything": {"hall.three"},
        "from minizero import hall": {"hall.one", "hall.two"},
        "import minizero.hall": {"hall.one", "hall.two"},
    }.items():
        (tmp_path / "mine.py").write_text(text)
        monkeypatch.setitem(MODULES, "mine", tmp_path / "mine.py")
        assert imports("mine") == seen, text


def in_order(arrows: dict[str, set[str]]) -> list[str]:
    """The keys of `arrows`, each after all that it points to."""
    order: list[str] = []
    while len(order) < len(arrows):
        ready = [name for name in arrows if name not in order and arrows[name] <= {*order}]
        assert ready, f"a circle of imports among {sorted(set(arrows) - set(order))}"
        order += ready
    return order


def test_neither_modules_nor_rooms_import_each_other_in_a_circle() -> None:
    in_order({name: imports(name) for name in MODULES})
    in_order({own: {room(name) for m in MODULES if room(m) == own for name in imports(m)} - {own} for own in ROOMS})


@pytest.mark.parametrize("own", sorted(ALONE))
def test_a_room_that_is_of_use_alone_imports_nothing_of_ours(own: str) -> None:
    assert {name for m in MODULES if room(m) == own for name in imports(m) if room(name) != own} == set()


@pytest.mark.parametrize("own", FACES)
def test_the_files_of_a_room_are_of_one_chapter_and_its_face_names_them(own: str) -> None:
    files = [module for module in MODULES if room(module) == own]
    assert {chapter(file) for file in files} == {chapter(own)}
    docstring = ast.get_docstring(ast.parse(FACES[own].read_text())) or ""
    assert [file for file in files if f"`{file.removeprefix(own + '.')}`" not in docstring] == []
    for file in files:  # what is inside does not come in by the front door
        for name in re.findall(rf"^ *from minizero\.{own} import (.+)$", MODULES[file].read_text(), re.MULTILINE):
            assert f"{own}.{name}" in files


@pytest.mark.parametrize("own", FACES)
def test_a_face_gives_the_names_of_its_files_and_no_file_has_the_name_of_one(own: str) -> None:
    module = importlib.import_module(f"minizero.{own}")
    for name, file in handed_on(FACES[own]).items():
        defining = importlib.import_module(f"minizero.{own}.{file}")
        assert getattr(module, name) is getattr(defining, name)
        assert name in dir(module)
        assert f"{own}.{name}" not in MODULES  # an import of that file would put the module in the name's place
    assert sorted(module.__all__) == sorted(handed_on(FACES[own]))
    with pytest.raises(AttributeError, match=f"module 'minizero.{own}' has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_short_enough_to_read(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= 250


def test_the_reference_lists_every_module_in_the_order_of_chapters() -> None:
    listed = re.findall(r"automodule:: minizero\.([\w.]+)", (ROOT / "book" / "api.md").read_text())
    assert sorted(listed) == sorted([*MODULES, *FACES])
    assert [chapter(module) for module in listed] == sorted(chapter(module) for module in listed)


def test_readme_and_intro_name_every_chapter() -> None:
    readme, intro = (ROOT / "README.md").read_text(), (ROOT / "book" / "intro.md").read_text()
    assert [file.stem for file in NOTEBOOKS if f"book/{file.stem}.ipynb" not in readme] == []
    assert [file.stem for file in NOTEBOOKS if f"{{doc}}`{file.stem}`" not in intro] == []


def test_the_map_has_every_room_in_its_chapter_and_the_readme_has_the_map() -> None:
    map_ = re.findall(r"^    (\d\d)  (\w.*?)  +(\S.*)$", minizero.__doc__ or "", re.MULTILINE)
    rooms = {number: names.split() for number, names, _ in map_}
    assert sorted({name for names in rooms.values() for name in names}) == ROOMS
    for number, names in rooms.items():
        assert {chapter(name) for name in names if name != "memory"} <= {int(number)}  # that one is of two chapters
    readme = (ROOT / "README.md").read_text()
    for number, names, idea in map_:
        shown = ", ".join(f"`{name}/`" if name in FACES else f"`{name}.py`" for name in names.split())
        assert re.search(
            rf"^\| \[{number}_\w+\.ipynb\]\([^)]*\) \| {re.escape(shown)}[^|]* \| {re.escape(idea)} \|$",
            readme,
            re.MULTILINE,
        )


def without_chapter(file: Path) -> list[str]:
    """The tests of a file that have no chapter's mark, neither of their own nor the file's."""

    def marked(nodes: list[ast.expr]) -> bool:
        return any(re.search(r"\bpytest\.mark\.ch\d\d\b", ast.unparse(node)) for node in nodes)

    tree = ast.parse(file.read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    if marked([node.value for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]):
        return []
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [f"{file.name}::{test.name}" for test in tests if not marked(test.decorator_list)]


def test_the_page_of_faults_lists_those_that_tests_repeat() -> None:
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    named = {int(number) for number in re.findall(r"def test_[fF](\d+)_", tests)}
    listed = re.findall(r"^F(\d+)\n: ", (ROOT / "book" / "faults.md").read_text(), re.MULTILINE)
    assert list(map(int, listed)) == sorted(named)


def test_every_test_of_a_module_or_a_fault_has_the_mark_of_a_chapter(pytestconfig: pytest.Config) -> None:
    files = [*(ROOT / "tests" / "modules").glob("test_*.py"), *(ROOT / "tests" / "faults").glob("test_*.py")]
    assert len(files) > 40
    assert [test for file in files for test in without_chapter(file)] == []
    map_ = re.findall(r"^\| \[(\d\d)_\w+\.ipynb\].* \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [number for number, _ in map_] == [file.stem[:2] for file in NOTEBOOKS]
    registered = [mark for mark in pytestconfig.getini("markers") if mark.startswith("ch")]
    assert registered == [f"ch{number}: {idea}" for number, idea in map_]


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

    def add_room(self) -> None:
        """A package of two files beside the module; both define SIZES."""
        head, rest = MODULE.split("@functools.cache\n")
        files = {"__init__": "", "first": head, "second": head[: head.index("class")] + "@functools.cache\n" + rest}
        for name, text in files.items():
            (self.package / "room").mkdir(exist_ok=True)
            (self.package / "room" / f"{name}.py").write_text(text)

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


def test_sync_finds_an_object_in_any_file_of_a_package(tmp_path: Path) -> None:
    paths = {"room.Layout.numel": "chapter.Layout.numel", "room.double": "chapter.double"}
    paths |= {"room.second.SIZES": "chapter.SIZES", "room.first.Layout": "chapter.Layout"}
    scratch = Scratch(tmp_path, *((path, "") for path in paths))
    scratch.add_room()
    assert scratch.sync() == 0
    assert [cell["source"] for cell in scratch.cells()] == ["Ψ", *(SOURCES[path] for path in paths.values())]


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("chapter.Lay", "chapter.py defines no Lay"),
        ("chapter.Layout.shape", "chapter.py defines no Layout.shape"),
        ("chapters.Layout", "there is no module chapters.py"),
        ("chapter", "write module.Object"),
        ("room", "write module.Object"),
        ("room.first", "write module.Object"),
        ("room.Lay", "room/ defines no Lay"),
        ("room.first.double", "first.py defines no double"),
        ("room.SIZES", "2 files of room/ define SIZES: write room.first.SIZES or room.second.SIZES"),
    ],
)
def test_an_unknown_object_is_an_error_that_names_notebook_and_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, complaint: str
) -> None:
    scratch = Scratch(tmp_path, (path, ""))
    scratch.add_room()
    assert scratch.sync() == 2
    shown = capsys.readouterr().err
    assert f"99_scratch.ipynb, cell {scratch.cells()[1]['id']}, tag 'minizero: {path}'" in shown
    assert complaint in shown
