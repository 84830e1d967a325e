"""Rank cells, driven as a reader drives them: real notebook kernels that start real ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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

import minizero
from minizero.ranks import group, stop
from minizero.ranks.kernel import Failure
from minizero.ranks.output import DISPLAYS, HEAD, TAIL, Output, Screen, Shown, spans, together

pytestmark = pytest.mark.ch00
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
        self.traffic = 0  # characters of all that was sent to the browser
        self._places: dict[str, int] = {}

    def take(self, kind: str, content: dict[str, Any]) -> None:
        key = content.get("transient", {}).get("display_id")
        self.traffic += len(json.dumps(content))
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

    def __init__(self, folder: Path, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.manager = KernelManager(transport="ipc", connection_file=str(folder / "kernel.json"))
        self.manager.start_kernel(env=os.environ | environment)
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
    assert ranks.run(code, during).text == "[0-1] first\n[0-1] then"


def test_a_cell_without_output_leaves_none(ranks: Notebook) -> None:
    assert ranks.run("%%ranks\ny = 1").outputs == []


def test_rich_output_is_labelled_with_its_rank(ranks: Notebook) -> None:
    code = "%%ranks\nfrom IPython.display import HTML\nprint('text')\ndisplay(HTML(f'<b>{rank}</b>'))"
    text, *rich = ranks.run(code).outputs
    assert text == {"text/plain": "[0-1] text"}
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
    assert output.shown.lines == ["100%|##|", "end", "new"]
    output.take("clear_output", {"wait": True})
    assert output.shown.lines == ["100%|##|", "end", "new"]
    output.take("stream", {"text": "next"})
    assert output.shown.lines == ["next"]


def test_bars_below_each_other_stay_in_their_lines() -> None:
    """What tqdm writes for a loop in a loop: down, back to the start, and up again."""
    screen = Screen("\router 0%")
    for part in ("\n\rinner 0%\x1b[A", "\n\rinner 50%\x1b[A", "\n\r         \r\x1b[A", "\router 100%", "\nend\n\n"):
        screen.write(part)
    assert screen.lines == ["outer 100%", "end", ""]


def test_a_widget_that_no_browser_can_reach_is_shown_as_text() -> None:
    output = Output()
    bundle = {"text/plain": "IntSlider()", "application/vnd.jupyter.widget-view+json": {}}
    output.take("display_data", {"data": bundle, "transient": {}})
    assert output.shown == Shown(["IntSlider()"], [])


def test_ranks_that_say_the_same_are_shown_once_in_the_order_of_the_lowest(ranks: Notebook) -> None:
    assert spans([0, 2, 3, 4, 7]) == "0,2-4,7"
    said = [(0, ["a", "b"]), (1, ["c"]), (2, []), (3, ["a", "b"]), (4, ["a", "b"])]
    assert together(said) == "[0,3-4] a\n[0,3-4] b\n[1]     c"
    assert together(said, live=True) == "[0] a\n[0] b\n[1] c\n[3] a\n[3] b\n[4] a\n[4] b"
    code = "%%ranks\nfrom IPython.display import HTML\nprint('text')\ndisplay(HTML('<b>same</b>'))"
    text, label, rich = ranks.run(code).outputs
    assert (text, label) == ({"text/plain": "[0-1] text"}, {"text/plain": "ranks 0-1:"})
    assert rich["text/html"] == "<b>same</b>"


def test_F91_a_rank_shows_the_beginning_and_the_end_of_much() -> None:
    screen = Screen()
    for number in range(100_000):
        screen.write(f"line {number}\n")
    lines = screen.lines
    assert sum(len(line) + 1 for line in lines) < HEAD + TAIL + 500
    assert lines[:2] == ["line 0", "line 1"]
    assert lines[-1] == "line 99999"
    (gap,) = [place for place, line in enumerate(lines) if line.startswith("…")]
    missing = int(lines[gap + 1].split()[1]) - int(lines[gap - 1].split()[1]) - 1
    assert lines[gap] == f"… {missing:,} lines left out: of much output, a rank shows the beginning and the end …"
    all_at_once = Screen("".join(f"line {number}\n" for number in range(100_000)))
    assert (all_at_once.lines[0], all_at_once.lines[-1], len(all_at_once.lines)) == ("line 0", "line 99999", len(lines))

    screen = Screen("\x00\x07\udc80 \x1b[2J\x1b[31mred\n")
    for _ in range(3):
        screen.write("x" * 1_000_000)  # one line without an end
    assert screen.lines[0] == "\ufffd\ufffd\ufffd \x1b[31mred\x1b[0m"
    assert screen.lines[1].endswith(" … 2,998,000 more characters")
    json.dumps(screen.lines).encode()

    output = Output()
    for _ in range(1000):
        output.take("display_data", {"data": {"text/plain": "<b>", "text/html": "<b>"}})
    assert len(output.shown.rich) == DISPLAYS
    assert output.shown.lines == ["… 980 more displays left out: a rank shows 20 of a cell"]
    large = {"text/plain": "table", "text/html": "x" * 10_000_000}
    output.take("clear_output", {})
    output.take("display_data", {"data": large})
    assert output.shown == Shown(["table", "… a display of 10,000,000 characters left out"])


@pytest.mark.parametrize(
    "endless",
    ["print('x' * 20, flush=rank == 1)", "print('x' * 1_000_000)", "os.write(1, b'yes' * 9)", "display(HTML('b'))"],
)
def test_F91_a_rank_that_prints_without_end_is_stopped_in_time_and_shows_a_bounded_text(
    ranks: Notebook, endless: str
) -> None:
    began = time.monotonic()
    code = f"%%ranks --timeout 2\nfrom IPython.display import HTML\nwhile True:\n    {endless}"
    cell = ranks.run(code, fails=True)
    assert time.monotonic() - began < 12  # on a busy machine; 2.7 s on an idle one
    assert cell.message.startswith("no answer within 2 s: ranks 0-1\nranks 0-1 were stopped at line 3")
    assert cell.traffic < 500_000
    assert any(words in str(cell.outputs) for words in ("left out", "more characters"))
    assert ranks.run("%%ranks\nprint(x.tolist()[0])").text == "[0] 1.0\n[1] 2.0"


def test_F91_a_log_is_sent_to_the_browser_about_once(ranks: Notebook) -> None:
    lines = "for i in range(400): print(f'[{rank}] step {i} {\"loss\":>30}'); time.sleep(0.005)"
    cell = ranks.run(f"%%ranks\n{lines}")
    assert len(cell.text.splitlines()) == 800
    assert cell.traffic < 3 * len(cell.text)


# ---- rich output and errors


def test_F92_progress_bars_move(ranks: Notebook) -> None:
    seen: set[str] = set()
    bars = "for _ in tqdm(range(20), desc='auto'): time.sleep(0.05)\nfor _ in trange(3, desc='widget'): pass"
    code = f"%%ranks\nfrom tqdm.auto import tqdm\nfrom tqdm.notebook import trange\n{bars}"
    cell = ranks.run(code, lambda cell: seen.update(re.findall(r"auto: +(\d+)%", str(cell.outputs))))
    assert len(seen) > 3
    for rank in "01":
        assert re.search(rf"^\[{rank}\] auto: 100%.*\n\[{rank}\] widget: 100%\|.*\| 3/3 ", cell.text, re.MULTILINE)


RAISES = "%%ranks\nclass Value:\n    def {}(self):\n        {}\n\nvalue = Value()\n{}"


@pytest.mark.parametrize(
    ("method", "show"),
    [("__repr__", "value"), ("_repr_html_", "display(value)\nprint('never')"), ("__repr__", "print(value)")],
)
def test_F92_an_error_while_a_value_is_shown_is_the_cells_error(ranks: Notebook, method: str, show: str) -> None:
    cell = ranks.run(RAISES.format(method, "raise KeyError('inside')", show), fails=True)
    assert cell.message.startswith("every rank: KeyError: 'inside'\n")
    assert re.search(r"^-+> 6 ", cell.shown_error, re.MULTILINE)
    assert re.search(r"^-+> 3 +raise KeyError", cell.shown_error, re.MULTILINE)
    assert cell.shown_error.count("KeyError: 'inside'") == 1
    assert "never" not in str(cell.outputs)


def test_F92_a_value_that_cannot_be_shown_in_time_is_stopped(ranks: Notebook) -> None:
    cell = ranks.run(
        RAISES.format("__repr__", "while True: pass", "value").replace("ranks", "ranks --timeout 2"), fails=True
    )
    assert cell.message.startswith(
        "no answer within 2 s: ranks 0-1\nranks 0-1 were stopped at line 3: while True: pass"
    )


def test_F97_an_exception_that_cannot_tell_its_message_is_shown_and_so_are_later_ones(ranks: Notebook) -> None:
    code = "%%ranks\nclass Mute(Exception):\n    def __str__(self):\n        raise KeyError\n\nraise Mute"
    cell = ranks.run(code, fails=True)
    assert cell.message.startswith("every rank: Mute: (no message: its __str__ raised KeyError)")
    assert re.search(r"^-+> 5 raise Mute$", cell.shown_error, re.MULTILINE)
    hangs = code.replace("raise KeyError", "while True: pass").replace("ranks", "ranks --timeout 2", 1)
    assert ranks.run(hangs, fails=True).message.startswith("no answer within 2 s: ranks 0-1")
    cell = ranks.run("%%ranks\nimport json\njson.loads('{')", fails=True)
    assert cell.shown_error.count("json/decoder.py") == 1  # the last frame only


@pytest.mark.parametrize("ask", ["breakpoint()", "import pdb; pdb.set_trace()", "input('?')"])
def test_F97_what_asks_for_a_keyboard_says_that_there_is_none(ranks: Notebook, ask: str) -> None:
    assert "RuntimeError: a rank has no keyboard" in ranks.run(f"%%ranks\n{ask}\ny = 1", fails=True).message


def test_an_error_names_the_readers_line_and_shows_the_last_frame_of_the_package(ranks: Notebook) -> None:
    """Nothing of the machine's paths, nothing twice, and a long message in lines that fit a page."""
    cell = ranks.run("%%ranks\nimport minizero\n\nminizero.Zero(torch.nn.Linear(2, 2), stage=7)", fails=True)
    assert re.search(r"^-+> 3 minizero\.Zero", cell.shown_error, re.MULTILINE)
    assert re.search(r"^minizero/zero/stages\.py:\d+, in Zero\.__init__", cell.shown_error, re.MULTILINE)
    assert str(Path(minizero.__file__).parent) not in cell.shown_error
    raises = "raise RuntimeError(f'rank {rank} has {e}') from e"
    code = f"%%ranks\ndef f():\n    try:\n        1 / 0\n    except Exception as e:\n        {raises}\n\nf()"
    cell = ranks.run(code, fails=True)
    assert cell.message.startswith("every rank: RuntimeError: has division by zero\n")
    headers = re.findall(r"^Cell on rank 0, (.*)$", cell.shown_error, re.MULTILINE)
    assert headers == ["line 3, in f", "line 7", "line 5, in f"]
    assert cell.shown_error.count("ZeroDivisionError: division by zero\n\nafter which:\n") == 1
    cell = ranks.run("%%ranks\nif rank == 1:\n    raise ValueError('long ' * 100)\nwhile True: pass", fails=True)
    assert max(map(len, cell.shown_error.splitlines())) <= 100
    assert cell.shown_error.count("ValueError: long") == 1
    assert "rank 0 was stopped at line 3" in cell.message
    cell = ranks.run("%%ranks --local\nimport json\njson.loads('{')", fails=True)
    assert cell.shown_error.startswith(
        "Cell in the notebook, line 2\n      1 import json\n----> 2 json.loads('{')\n\njson/dec"
    )


def test_sys_exit_ends_the_cell_without_a_hint_that_does_not_apply(ranks: Notebook) -> None:
    cell = ranks.run("%%ranks\nimport sys\nsys.exit(3)", fails=True)
    assert cell.outputs == []
    assert cell.message.startswith("every rank: SystemExit: 3\n")


def test_what_programs_and_c_code_print_stands_where_it_was_printed(ranks: Notebook) -> None:
    code = (
        "print('a')\nsubprocess.run(['echo', 'b'])\nos.write(2, b'c\\n')\nprint('d', file=sys.stderr)\nforked.start()\n"
    )
    make = "forked = multiprocessing.get_context('fork').Process(target=print, args=('e',))\n"
    code = f"%%ranks\nimport ctypes, multiprocessing, subprocess, sys\n{make}{code}forked.join()\nprint('f')\n"
    code += "_ = ctypes.CDLL(None).puts(b'g')"
    assert [line[-1] for line in ranks.run(code).text.splitlines()] == list("abcdefg")


# ---- the ranks themselves


def test_the_environment_is_torchruns(ranks: Notebook) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    assert ranks.run(f"%%ranks\n' '.join(os.environ[name] for name in {names})").text == (
        "[0] '0 0 2 2 127.0.0.1 1'\n[1] '1 1 2 2 127.0.0.1 1'"
    )


def test_all_ranks_are_told_one_port_and_another_one_in_the_next_cell(ranks: Notebook) -> None:
    first, second = (ranks.run("%%ranks\nprint(os.environ['MASTER_PORT'])").text for _ in range(2))
    assert first != second
    assert re.fullmatch(r"\[0-1\] \d+", first)


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
    assert ranks.run("%%ranks\ndist.all_reduce(x)\nprint(x[0].item())").text == "[0-1] 3.0"


def test_pull_takes_numpy_numbers_and_says_what_it_wants(ranks: Notebook) -> None:
    ranks.run("import numpy as np\nfrom minizero.ranks import pull, push")
    ranks.run("%%ranks\nimport numpy as np\nvalue = {'loss': np.float32(0.5), 'step': [np.int64(3)]}")
    assert ranks.run("pull('value', [np.int64(1)])").text == "[{'loss': 0.5, 'step': [3]}]"
    assert ranks.run("pull('rank', np.arange(2))").text == "[0, 1]"
    for wrong in ("pull('x', 1)", "pull('x', [0.5])", "push('x', 1, 1)"):
        assert "ranks are a list of their numbers, as in [0, 2], not" in "".join(ranks.run(wrong, fails=True).outputs)
    assert "there is no rank 2" in "".join(ranks.run("pull('x', [np.int64(2)])", fails=True).outputs)
    message = ranks.run("pull('only_here')", fails=True).message
    assert message.startswith("cannot pull 'only_here' from rank 0: NameError: name 'only_here' is not defined\n")
    assert "`%%ranks --local`" in message


# ---- push


def test_push_gives_ranks_a_copy_of_what_pull_would_bring(ranks: Notebook) -> None:
    ranks.run("import torch\nfrom minizero.ranks import pull, push\nflat = torch.arange(1000.0)")
    ranks.run("push('given', {'part': flat[3:5], 'rate': 0.1, 'names': ('a', None)})\npush('x', 7, [1])")
    show = "given['part'].tolist(), given['part'].untyped_storage().nbytes(), given['rate'], given['names'], x"
    same = "[3.0, 4.0] 8 0.1 ('a', None)"
    assert ranks.run(f"%%ranks\nprint({show})").text == f"[0] {same} tensor([1., 1., 1.])\n[1] {same} 7"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("'x', print", "only tensors, numbers"),
        ("'x y', 1", "no name"),
        ("'if', 1", "no name"),
        ("'x', 1, [2]", "rank 2"),
    ],
)
def test_what_cannot_be_pushed_changes_nothing(ranks: Notebook, arguments: str, complaint: str) -> None:
    cell = ranks.run(f"from minizero.ranks import push\npush({arguments})", fails=True)
    assert complaint in str(cell.error) + str(cell.outputs)
    assert ranks.run("%%ranks\nprint(x[0].item())").text == "[0] 1.0\n[1] 2.0"


# ---- failures


def check_that_all_goes_on(notebook: Notebook) -> None:
    """After a failure: variables are there, the old group is gone, a new one works."""
    assert notebook.run("%%ranks\nprint(x.tolist(), dist.is_initialized())").text == (
        "[0] [1.0, 1.0, 1.0] False\n[1] [2.0, 2.0, 2.0] False"
    )
    notebook.run(JOIN)
    assert notebook.run("%%ranks\ndist.all_reduce(x)\nprint(x.tolist())").text == "[0-1] [3.0, 3.0, 3.0]"


def test_F31_a_failing_rank_is_named_at_once_though_its_peer_waits_in_a_collective(ranks: Notebook) -> None:
    code = "%%ranks\nz = x.clone()\nif rank == 1:\n    raise ValueError('rank 1 stumbled')\ndist.all_reduce(z)"
    began = time.monotonic()
    cell = ranks.run(code, fails=True)
    assert time.monotonic() - began < FAR_FROM_GLOO
    assert cell.message.splitlines() == [
        "rank 1: ValueError: stumbled",
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
    assert "readers_module.py:4, in work\n" in cell.shown_error
    assert "torch/nn/modules/linear.py:" in cell.shown_error  # the last frame, and no other
    assert cell.shown_error.count("mat1 and mat2") == 1
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
        ended = stop.Stop([rank for rank in ranks if rank.busy], reason)  # type: ignore[misc]
        return str(ended.error(ranks)).splitlines()  # type: ignore[arg-type]

    gone = "Connection closed by peer"
    kept, anew = "Variables are kept; process groups have been closed.", "`%ranks restart` starts all ranks anew."
    assert error(
        Failure(0, "KeyError", "'a'", 3.0),
        Failure(1, "RuntimeError", gone, 1.0, "line 2: dist.barrier()"),
        Failure(2, "ValueError", "b", 2.0),
        None,
    ) == ["rank 2: ValueError: b", "also rank 0: KeyError: 'a'", "rank 1 was stopped at line 2: dist.barrier()", kept]
    assert error(Failure(0, "ValueError", "b", 1.0), Failure(1, "Died", "the process ended", 2.0)) == [
        "rank 1: Died: the process ended",
        "also rank 0: ValueError: b",
        anew,
    ]
    assert error(*(Failure(rank, "KeyError", "'a'", -rank) for rank in range(3))) == [
        "every rank: KeyError: 'a'",
        kept,
    ]
    assert error(None, Failure(1, "RuntimeError", gone, 1.0)) == [f"rank 1: RuntimeError: {gone}", kept]
    assert error(None, None, None, busy=(0, 2), reason="interrupted") == [
        "interrupted: ranks 0,2",
        "ranks 0,2 did not stop",
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
    assert ranks.run("%%ranks\nprint('x' in globals())").text == "[0-1] False"


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
    assert lines[:2] == ["interrupted: ranks 0-1", "rank 0 was stopped at line 3: dist.barrier()"]
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
    assert group.TIMEOUT + stop._PATIENCE < 120


def test_a_rank_that_cannot_be_stopped_is_told_and_replaced(ranks: Notebook) -> None:
    ranks.run("import minizero.ranks.stop as stop\npatience, stop._PATIENCE = stop._PATIENCE, 1.0")
    deaf = (
        "import signal\nif rank == 1:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True: time.sleep(1)"
    )
    cell = ranks.run(f"%%ranks --timeout 3\n{deaf}", fails=True)
    ranks.run("stop._PATIENCE = patience")
    assert cell.message.splitlines() == [
        "no answer within 3 s: rank 1",
        "rank 1 did not stop",
        "`%ranks restart` starts all ranks anew.",
    ]
    assert "rank 1 is still busy with an earlier cell" in "".join(ranks.run("%%ranks\n1", fails=True).outputs)
    ranks.run("%ranks 2")
    assert ranks.run("%%ranks\nprint(1)").text == "[0-1] 1"


def test_what_follows_from_a_failure_is_told_from_its_cause() -> None:
    def failure(name: str, message: str) -> Failure:
        return Failure(0, name, message, 0.0)

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
    temporary = tmp_path / "t"
    temporary.mkdir()
    notebook = Notebook(tmp_path, TMPDIR=str(temporary))
    try:
        notebook.run(START)
        pids = [int(pid) for pid in notebook.run("%%ranks\nimport os\nos.getpid()").text.split()[1::2]]
        notebook.client.execute(f"%%ranks\n{busy}")
        time.sleep(0.5)
        assert len([pid for pid in pids if runs(pid)]) == 2
        psutil.Process(notebook.pid).kill()
        assert left(pids) == []
        until = time.monotonic() + ENDS_WITHIN
        while list(temporary.iterdir()) and time.monotonic() < until:  # F97: the folder of the sockets
            time.sleep(0.05)
        assert [path.name for path in temporary.glob("ranks-*")] == []
    finally:
        notebook.shutdown()


def test_ranks_start_on_another_machine(tmp_path: Path) -> None:
    """A long TMPDIR with a blank and letters beyond ASCII, no HOME to write to, and no locale."""
    temporary = tmp_path / ("Größe und Länge " * 12)
    temporary.mkdir()
    nowhere = {"HOME": "/proc/nowhere", "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    notebook = Notebook(tmp_path / "kernel", TMPDIR=str(temporary), LC_ALL="C", **nowhere)
    try:
        notebook.run(START)
        notebook.run(JOIN)
        assert (
            notebook.run("%%ranks\ndist.all_reduce(x)\nprint('Größe', x.tolist())").text
            == "[0-1] Größe [3.0, 3.0, 3.0]"
        )
        notebook.run("%ranks stop")
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
    assert list(shown.values()) == [["[0-1] 21.0"] * 3] * 2


def test_what_starts_first_loads_nothing_that_takes_long() -> None:
    """A rank's kernel starts with the worker, a notebook with the face of the room, and neither waits for the rest."""
    heavy = ("torch", "IPython", "ipykernel", "jupyter_client", "zmq")
    for first in ("minizero", "minizero.ranks", "minizero.ranks.worker", "minizero.zero", "minizero.config"):
        code = f"import sys, {first}; dir({first}); print([name for name in {heavy} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "[]\n", first
