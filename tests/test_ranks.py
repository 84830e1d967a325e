"""Rank cells, driven as a reader drives them: real notebook kernels that start real ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from minizero import rank_group
from minizero.rank_kernel import Failure
from minizero.rank_output import Output

ENDS_WITHIN = 10.0  # seconds in which no process of a notebook that has ended may be left
FAR_FROM_GLOO = 60.0  # seconds; the process groups below wait for 600
START = "%load_ext minizero.ranks\n%ranks 2"
JOIN = """%%ranks
import os, time
from datetime import timedelta
import torch
import torch.distributed as dist

if not dist.is_initialized():
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
rank = dist.get_rank()
x = torch.full((3,), 1.0 + rank)
"""


class Cell:
    """What a cell has left in the notebook: outputs as they stand at the end, and the error."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []  # a stream's text, or a bundle of MIME types
        self.error: dict[str, Any] = {}
        self.failed = False
        self._places: dict[str, int] = {}

    def take(self, kind: str, content: dict[str, Any]) -> None:
        key = content.get("transient", {}).get("display_id")
        if kind == "stream":
            self.outputs.append(content["text"])
        elif kind == "update_display_data":
            self.outputs[self._places[key]] = content["data"]
        elif kind in ("display_data", "execute_result"):
            self._places[key] = len(self.outputs)
            self.outputs.append(content["data"])
        elif kind == "error":
            self.error = content

    @property
    def text(self) -> str:
        (output,) = self.outputs
        assert set(output) == {"text/plain"}
        return str(output["text/plain"])

    @property
    def message(self) -> str:
        assert self.error["ename"] == "RankError", self.error
        return str(self.error["evalue"])

    @property
    def shown_error(self) -> str:
        return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(self.error["traceback"]))


class Notebook:
    """A notebook kernel in its own process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.manager = KernelManager(transport="ipc", connection_file=str(folder / "kernel.json"))
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.process.pid)

    def run(self, code: str, during: Callable[[Cell], None] = lambda cell: None, fails: bool = False) -> Cell:
        """Run a cell; `during` is called with what is there after each message."""
        cell = Cell()

        def take(message: dict[str, Any]) -> None:
            cell.take(message["header"]["msg_type"], message["content"])
            during(cell)

        reply = self.client.execute_interactive(code, output_hook=take, timeout=110)
        cell.failed = reply["content"]["status"] == "error"
        assert cell.failed == fails, cell.shown_error if cell.error else cell.outputs
        return cell

    def shutdown(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path_factory.mktemp("notebook"))
    yield notebook
    notebook.shutdown()


@pytest.fixture
def ranks(notebook: Notebook) -> Notebook:
    """The notebook with two healthy ranks in a process group."""
    notebook.run(START)
    notebook.run(JOIN)
    return notebook


def left(pids: list[int], within: float = ENDS_WITHIN) -> list[int]:
    """Those of the processes that are still running after a while."""
    until = time.monotonic() + within
    while (there := [pid for pid in pids if runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return there


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- output


def test_output_stands_in_rank_order_whatever_the_order_it_came_in(ranks: Notebook) -> None:
    cell = ranks.run("%%ranks\ntime.sleep(0.5 * (1 - rank))\nprint('a')\nprint('b\\n\\nc')\nx.tolist()")
    assert cell.text == "[0] a\n[0] b\n[0]\n[0] c\n[0] [1.0, 1.0, 1.0]\n[1] a\n[1] b\n[1]\n[1] c\n[1] [2.0, 2.0, 2.0]"


def test_output_is_shown_while_the_cell_runs(ranks: Notebook, tmp_path: Path) -> None:
    """The ranks go on only after the test has seen what they said before."""
    sign = tmp_path / "seen"

    def during(cell: Cell) -> None:
        if cell.outputs and cell.text == "[0] first\n[1] first":
            sign.touch()

    code = f"%%ranks\nprint('first')\nwhile not os.path.exists({str(sign)!r}): time.sleep(0.02)\nprint('then')"
    assert ranks.run(code, during).text == "[0] first\n[0] then\n[1] first\n[1] then"


def test_a_cell_without_output_leaves_none(ranks: Notebook) -> None:
    assert ranks.run("%%ranks\ny = 1").outputs == []


def test_rich_output_is_labelled_with_its_rank(ranks: Notebook) -> None:
    code = "%%ranks\nfrom IPython.display import HTML\nprint('text')\ndisplay(HTML(f'<b>{rank}</b>'))"
    text, *rich = ranks.run(code).outputs
    assert text == {"text/plain": "[0] text\n[1] text"}
    assert [bundle.get("text/html", bundle["text/plain"]) for bundle in rich] == [
        "rank 0:",
        "<b>0</b>",
        "rank 1:",
        "<b>1</b>",
    ]


def test_text_is_what_a_terminal_would_show() -> None:
    output = Output()
    output.take("stream", {"text": " 0%|  |\r 50%|# |"})
    output.take("stream", {"text": "\r100%|##|\nend\r\n"})
    output.take("display_data", {"data": {"text/plain": "old"}, "transient": {"display_id": "7"}})
    output.take("update_display_data", {"data": {"text/plain": "new"}, "transient": {"display_id": "7"}})
    assert output.lines == ["100%|##|", "end", "new"]
    output.take("clear_output", {"wait": True})
    assert output.lines == ["100%|##|", "end", "new"]
    output.take("stream", {"text": "next"})
    assert output.lines == ["next"]


def test_a_widget_that_no_browser_can_reach_is_shown_as_text() -> None:
    output = Output()
    bundle = {"text/plain": "IntSlider()", "application/vnd.jupyter.widget-view+json": {}}
    output.take("display_data", {"data": bundle, "transient": {}})
    assert (output.lines, output.rich) == (["IntSlider()"], [])


# ---- the ranks themselves


def test_the_environment_is_torchruns(ranks: Notebook) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    assert ranks.run(f"%%ranks\n' '.join(os.environ[name] for name in {names})").text == (
        "[0] '0 0 2 2 127.0.0.1 1'\n[1] '1 1 2 2 127.0.0.1 1'"
    )


def test_all_ranks_are_told_one_port_and_another_one_in_the_next_cell(ranks: Notebook) -> None:
    first, second = (ranks.run("%%ranks\nprint(os.environ['MASTER_PORT'])").text for _ in range(2))
    assert first != second
    for text in (first, second):
        assert text.split()[1::2] == [text.split()[1]] * 2


def test_the_same_number_again_keeps_the_ranks_and_another_one_makes_new_ones(ranks: Notebook) -> None:
    pids = ranks.run("%%ranks\nkept = True\nos.getpid()").text
    ranks.run("%ranks 2")
    assert ranks.run("%%ranks\ndist.barrier()\nassert kept\nos.getpid()").text == pids
    ranks.run("%ranks 1")
    assert left([int(pid) for pid in pids.split()[1::2]]) == []
    assert ranks.run("%%ranks\nprint('kept' in globals())").text == "[0] False"
    ranks.run("%ranks restart")
    assert ranks.run("%%ranks\nprint('kept' in globals())").text == "[0] False"


def test_a_cell_runs_on_chosen_ranks_and_in_the_notebook(ranks: Notebook) -> None:
    ranks.run("%%ranks --local\nimport os\ndef here():\n    return int(os.environ.get('RANK', -1))")
    assert ranks.run("%%ranks [1]\nprint(here())").text == "[1] 1"
    assert ranks.run("here()").text == "-1"
    error = ranks.run("%%ranks --local\nassert here() >= 0", fails=True).error
    assert error["ename"] == "AssertionError"  # the notebook comes first, and its error is its own


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("%ranks many", "%ranks takes a number of ranks, `stop` or `restart`, not 'many'"),
        ("%ranks 0", "%ranks takes a number of ranks"),
        ("%%ranks [2]\n1", "there is no rank 2: the ranks are 0 to 1"),
        ("%%ranks [a]\n1", "ranks are listed as in [0,2], not [a]"),
        ("%%ranks []\n1", "ranks are listed as in [0,2], not []"),
        ("%%ranks --timeout soon\n1", "invalid float value: 'soon'"),
        ("%%ranks 0,1\n1", "unrecognized arguments: 0,1"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(ranks: Notebook, code: str, complaint: str) -> None:
    assert complaint in "".join(ranks.run(code, fails=True).outputs)


def test_without_ranks_a_cell_says_how_to_start_them(notebook: Notebook) -> None:
    notebook.run(START)
    notebook.run("%ranks stop")
    for code in ("%%ranks\n1", "%ranks restart", "from minizero.ranks import pull\npull('x')"):
        assert "no ranks are running; `%ranks 4` starts four" in "".join(notebook.run(code, fails=True).outputs)


# ---- pull


def test_pull_brings_values_in_rank_order(ranks: Notebook) -> None:
    ranks.run("from minizero.ranks import pull")
    ranks.run("%%ranks\nlog = {'rank': rank, 'shard': x[:1], 'losses': [0.5, None, ('a', True)]}")
    code = (
        "values = pull('log')\n[(v['rank'], v['shard'].tolist(), v['losses']) for v in values], pull('rank + 1', [1])"
    )
    losses = "[0.5, None, ('a', True)]"
    assert " ".join(ranks.run(code).text.split()) == f"([(0, [1.0], {losses}), (1, [2.0], {losses})], [2])"


def test_pull_copies_the_part_of_a_storage_that_is_asked_for(ranks: Notebook) -> None:
    ranks.run("%%ranks\nflat = torch.arange(1000.0)")
    code = "from minizero.ranks import pull\n[(t.tolist(), t.untyped_storage().nbytes()) for t in pull('flat[3:5]')]"
    assert ranks.run(code).text == "[([3.0, 4.0], 8), ([3.0, 4.0], 8)]"


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("1 // (1 - rank)", "cannot pull '1 // (1 - rank)' from rank 1: ZeroDivisionError"),
        ("timedelta(1)", "from rank 0: TypeError: only tensors, numbers, strings, and lists, tuples and dicts of them"),
        ("dist", "from rank 0: TypeError"),
    ],
)
def test_what_cannot_be_pulled_is_an_error_that_leaves_the_group_alone(
    ranks: Notebook, expression: str, complaint: str
) -> None:
    cell = ranks.run(f"from minizero.ranks import pull\npull({expression!r})", fails=True)
    assert complaint in cell.message
    assert ranks.run("%%ranks\ndist.all_reduce(x)\nprint(x[0].item())").text == "[0] 3.0\n[1] 3.0"


# ---- failures


def check_that_all_goes_on(notebook: Notebook) -> None:
    """After a failure: variables are there, the old group is gone, a new one works."""
    assert notebook.run("%%ranks\nprint(x.tolist(), dist.is_initialized())").text == (
        "[0] [1.0, 1.0, 1.0] False\n[1] [2.0, 2.0, 2.0] False"
    )
    notebook.run(JOIN)
    assert notebook.run("%%ranks\ndist.all_reduce(x)\nprint(x.tolist())").text == (
        "[0] [3.0, 3.0, 3.0]\n[1] [3.0, 3.0, 3.0]"
    )


def test_F31_a_failing_rank_is_named_at_once_though_its_peer_waits_in_a_collective(ranks: Notebook) -> None:
    code = "%%ranks\nz = x.clone()\nif rank == 1:\n    raise ValueError('rank 1 stumbled')\ndist.all_reduce(z)"
    began = time.monotonic()
    cell = ranks.run(code, fails=True)
    assert time.monotonic() - began < FAR_FROM_GLOO
    assert cell.message.splitlines() == [
        "rank 1: ValueError: rank 1 stumbled",
        "rank 0 was stopped at line 4: dist.all_reduce(z)",
        "Variables are kept; process groups have been closed.",
    ]
    assert "Cell on rank 1, line 3\n" in cell.shown_error
    assert re.search(r"^-+> 3 +raise ValueError\('rank 1 stumbled'\)$", cell.shown_error, re.MULTILINE)
    check_that_all_goes_on(ranks)


def test_F31_the_rank_that_failed_first_is_the_cause_not_those_that_failed_for_it(ranks: Notebook) -> None:
    """Rank 1 leaves the group before it raises, so that rank 0 knows of it, and fails, earlier."""
    code = "%%ranks\nif rank == 1:\n    dist.destroy_process_group()\n    time.sleep(0.4)\n    1 / 0\ndist.barrier()"
    cell = ranks.run(code, fails=True)
    assert cell.message.splitlines()[:2] == [
        "rank 1: ZeroDivisionError: division by zero",
        "rank 0 was stopped at line 5: dist.barrier()",
    ]


@pytest.mark.parametrize("failing", [0, 1])
def test_F31_a_rank_that_fails_before_the_group_is_made_does_not_keep_the_others_waiting(
    ranks: Notebook, failing: int
) -> None:
    ranks.run("%%ranks\ndist.destroy_process_group()")
    code = f"%%ranks\nif rank == {failing}:\n    raise ValueError('not me')\ndist.init_process_group('gloo')"
    began = time.monotonic()
    cell = ranks.run(code, fails=True)
    assert time.monotonic() - began < FAR_FROM_GLOO
    assert cell.message.splitlines()[:2] == [
        f"rank {failing}: ValueError: not me",
        f"rank {1 - failing} was stopped at line 3: dist.init_process_group('gloo')",
    ]
    check_that_all_goes_on(ranks)


def test_F31_the_error_shows_the_readers_files_and_not_the_libraries(ranks: Notebook, tmp_path: Path) -> None:
    (tmp_path / "readers_module.py").write_text("import torch\n\ndef work(x):\n    return torch.nn.Linear(2, 2)(x)\n")
    cell = ranks.run(
        f"%%ranks\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport readers_module\nreaders_module.work(x)",
        fails=True,
    )
    assert cell.message.startswith("every rank: RuntimeError: mat1 and mat2")
    assert re.search(r"-+> 4 readers_module\.work\(x\)", cell.shown_error)
    assert "readers_module.py:4, in work(x)" in cell.shown_error
    assert "site-packages" not in cell.shown_error


def test_a_peer_that_computes_is_stopped(ranks: Notebook) -> None:
    cell = ranks.run("%%ranks\nif rank == 0:\n    while True: time.sleep(0.01)\nraise KeyError('k')", fails=True)
    assert cell.message.splitlines()[:2] == [
        "rank 1: KeyError: 'k'",
        "rank 0 was stopped at line 2: while True: time.sleep(0.01)",
    ]


def test_the_error_tells_the_cause_the_places_and_what_to_do() -> None:
    """Failures in the order of their rank; `when` is the order in time."""

    def error(*failures: Failure | None, busy: tuple[int, ...] = (), reason: str = "") -> list[str]:
        ranks = [
            SimpleNamespace(rank=rank, failure=failure, busy=rank in busy, command=lambda word: None)
            for rank, failure in enumerate(failures)
        ]
        for rank in ranks:
            rank.alive = rank.failure is None or rank.failure.name != "Died"
        stop = rank_group._Stop([rank for rank in ranks if rank.busy], reason)  # type: ignore[misc]
        return str(stop.error(ranks)).splitlines()  # type: ignore[arg-type]

    gone = "Connection closed by peer"
    place = ["      1 import x", "----> 2 dist.barrier()"]
    kept, anew = "Variables are kept; process groups have been closed.", "`%ranks restart` starts all ranks anew."
    assert error(
        Failure(0, "KeyError", "'a'", [], 3.0),
        Failure(1, "RuntimeError", gone, place, 1.0),
        Failure(2, "ValueError", "b", [], 2.0),
        None,
    ) == ["rank 2: ValueError: b", "also rank 0: KeyError: 'a'", "rank 1 was stopped at line 2: dist.barrier()", kept]
    assert error(Failure(0, "ValueError", "b", [], 1.0), Failure(1, "Died", "the process ended", [], 2.0)) == [
        "rank 1: Died: the process ended",
        "also rank 0: ValueError: b",
        anew,
    ]
    assert error(*(Failure(rank, "KeyError", "'a'", [], -rank) for rank in range(3))) == [
        "every rank: KeyError: 'a'",
        kept,
    ]
    assert error(None, Failure(1, "RuntimeError", gone, [], 1.0)) == [f"rank 1: RuntimeError: {gone}", kept]
    assert error(None, None, None, busy=(0, 2), reason="interrupted") == [
        "interrupted: rank 0, 2",
        "rank 0 did not stop",
        "rank 2 did not stop",
        anew,
    ]


@pytest.mark.parametrize(
    ("end", "how"),
    [("os._exit(7)", "ended with exit code 7"), ("os.kill(os.getpid(), 9)", "was killed by SIGKILL")],
)
def test_a_rank_that_dies_is_reported_and_can_be_replaced(ranks: Notebook, end: str, how: str) -> None:
    cell = ranks.run(f"%%ranks\nif rank == 1:\n    {end}\ndist.barrier()", fails=True)
    assert cell.message.splitlines() == [
        f"rank 1: Died: the process {how}",
        "rank 0 was stopped at line 3: dist.barrier()",
        "`%ranks restart` starts all ranks anew.",
    ]
    assert "rank 1 has ended; `%ranks restart`" in "".join(ranks.run("%%ranks\n1", fails=True).outputs)
    assert ranks.run("%%ranks [0]\nprint(x.tolist())").text == "[0] [1.0, 1.0, 1.0]"
    ranks.run("%ranks 2")
    assert ranks.run("%%ranks\nprint('x' in globals())").text == "[0] False\n[1] False"


def test_F54_an_interrupt_reaches_ranks_that_compute_and_ranks_in_a_collective(ranks: Notebook) -> None:
    interrupted = []

    def during(cell: Cell) -> None:
        if cell.outputs and cell.text == "[0] go\n[1] go" and not interrupted:
            interrupted.append(True)
            ranks.manager.interrupt_kernel()

    began = time.monotonic()
    code = "%%ranks\nprint('go')\nif rank == 0:\n    dist.barrier()\nwhile True:\n    pass"
    cell = ranks.run(code, during, fails=True)
    assert time.monotonic() - began < FAR_FROM_GLOO
    lines = cell.message.splitlines()
    assert lines[:2] == ["interrupted: rank 0, 1", "rank 0 was stopped at line 3: dist.barrier()"]
    assert re.fullmatch(r"rank 1 was stopped at line [45]: (while True:|pass)", lines[2])
    check_that_all_goes_on(ranks)


def test_F55_a_timeout_names_the_ranks_that_did_not_answer(ranks: Notebook) -> None:
    cell = ranks.run("%%ranks --timeout 3\nif rank == 1:\n    while True: time.sleep(0.01)", fails=True)
    assert cell.message.splitlines() == [
        "no answer within 3 s: rank 1",
        "rank 1 was stopped at line 2: while True: time.sleep(0.01)",
        "Variables are kept; process groups have been closed.",
    ]
    check_that_all_goes_on(ranks)


def test_F55_the_default_timeout_ends_a_cell_before_the_tools_do() -> None:
    assert rank_group.TIMEOUT + rank_group._PATIENCE < 120


def test_a_rank_that_cannot_be_stopped_is_told_and_replaced(ranks: Notebook) -> None:
    ranks.run("import minizero.rank_group as group\npatience, group._PATIENCE = group._PATIENCE, 1.0")
    deaf = (
        "import signal\nif rank == 1:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True: time.sleep(1)"
    )
    cell = ranks.run(f"%%ranks --timeout 3\n{deaf}", fails=True)
    ranks.run("group._PATIENCE = patience")
    assert cell.message.splitlines() == [
        "no answer within 3 s: rank 1",
        "rank 1 did not stop",
        "`%ranks restart` starts all ranks anew.",
    ]
    assert "rank 1 is still busy with an earlier cell" in "".join(ranks.run("%%ranks\n1", fails=True).outputs)
    ranks.run("%ranks 2")
    assert ranks.run("%%ranks\nprint(1)").text == "[0] 1\n[1] 1"


def test_what_follows_from_a_failure_is_told_from_its_cause() -> None:
    def failure(name: str, message: str) -> Failure:
        return Failure(0, name, message, [], 0.0)

    assert failure("RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1").follows
    assert failure("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed.").follows
    assert failure("KeyboardInterrupt", "").follows
    assert not failure("RuntimeError", "mat1 and mat2 shapes cannot be multiplied").follows


# ---- processes and notebooks


SAY_PIDS = "%%ranks\nimport os, subprocess\nchild = subprocess.Popen(['sleep', '1000'])\nprint(os.getpid(), child.pid)"


def pids_in(text: str) -> list[int]:
    return [int(word) for line in text.splitlines() for word in line.split()[1:]]


def test_F54_stop_and_shutdown_leave_no_process(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    try:
        notebook.run(START)
        pids = pids_in(notebook.run(SAY_PIDS).text)
        assert len(pids) == 4
        assert all(runs(pid) for pid in pids)
        notebook.run("%ranks stop")
        assert left(pids) == []  # a rank goes with what it has started
        notebook.run("%ranks 2")
        pids = pids_in(notebook.run(SAY_PIDS).text)
        notebook.run("%%ranks\n1 / 0", fails=True)
    finally:
        notebook.shutdown()
    assert left(pids) == []


@pytest.mark.parametrize("busy", ["while True: pass", "__import__('re').match('(a|a)*b', 'a' * 40)"])
def test_F54_a_killed_kernel_leaves_no_rank(tmp_path: Path, busy: str) -> None:
    """The second one never leaves C code, so that no thread of the rank can act."""
    notebook = Notebook(tmp_path)
    try:
        notebook.run(START)
        pids = [int(pid) for pid in notebook.run("%%ranks\nimport os\nos.getpid()").text.split()[1::2]]
        notebook.client.execute(f"%%ranks\n{busy}")
        time.sleep(0.5)
        assert len([pid for pid in pids if runs(pid)]) == 2
        psutil.Process(notebook.pid).kill()
        assert left(pids) == []
    finally:
        notebook.shutdown()


def execute(folder: Path, *cells: str) -> None:
    """Execute a notebook as the tools do, with a short timeout for cells that sleep."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(folder)}}

    def timeout(cell: nbformat.NotebookNode) -> int:
        return 3 if "sleep" in cell.source else 100

    NotebookClient(notebook, resources=resources, kernel_name="python3", timeout_func=timeout).execute()


WRITE_PID = "%%ranks\nimport os, pathlib\n_ = pathlib.Path(f'{os.environ[\"RANK\"]}.pid').write_text(str(os.getpid()))"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("cell", "error", "words"),
    [
        ("%%ranks\n1 / int(os.environ['RANK'])", CellExecutionError, "RankError: rank 0: ZeroDivisionError"),
        ("%%ranks\nimport time\ntime.sleep(1000)", CellTimeoutError, "timed out"),
    ],
    ids=["raises", "times out"],
)
def test_F54_F56_a_notebook_that_fails_says_so_and_leaves_no_rank(
    tmp_path: Path, cell: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        execute(tmp_path, START, WRITE_PID, cell)
    assert words in re.sub(r"\x1b\[[\d;]*m", "", str(caught.value))
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert left(pids) == []


def test_F53_two_notebooks_at_once_and_cells_run_again_give_the_same(tmp_path: Path) -> None:
    """Functions made in cells, a process group made anew each time, all on one machine at the same time."""
    first, second = (Notebook(tmp_path / name) for name in ("first", "second"))
    add = "%%ranks\ndef add(value):\n    t = torch.tensor([value])\n    dist.all_reduce(t)\n    return t.item()"
    use = "%%ranks\nprint(add(10.0 + rank))"
    cells = [START, JOIN, add, use, "%%ranks\ndist.destroy_process_group()", START, JOIN, JOIN, add, use, use]
    try:
        shown: dict[Notebook, list[str]] = {first: [], second: []}
        for cell in cells:
            requests = {notebook: notebook.client.execute(cell) for notebook in shown}
            for notebook, request in requests.items():
                outputs = Cell()
                while True:
                    message = notebook.client.get_iopub_msg(timeout=60)
                    if message["parent_header"].get("msg_id") == request:
                        outputs.take(message["header"]["msg_type"], message["content"])
                        if message["content"].get("execution_state") == "idle":
                            break
                assert outputs.error == {}
                shown[notebook] += [outputs.text] if cell == use else []
    finally:
        first.shutdown()
        second.shutdown()
    assert list(shown.values()) == [["[0] 21.0\n[1] 21.0"] * 3] * 2
