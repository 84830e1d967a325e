"""Run the book as if on other machines: another CPU, one core, no privileges, no IPv6, and so on.

python scripts/personalities.py                      # every notebook and a selection of tests, as every machine
python scripts/personalities.py --quick one-core     # three notebooks and the tests, as one machine
python scripts/personalities.py --quick --two TEXT   # as two machines; which two, TEXT decides (a commit, a date)
python scripts/personalities.py --list

Each personality works in its own copy of the checkout, which shares the virtual environment. Before it runs, it proves
that it is what it says; where that cannot be set up it is skipped by name, and a skipped one has not passed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from compare.launch import enter_empty_network

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ("00_ranks", "26_config", "34_claims")  # with --quick: ranks, and what DeepSpeed says of this machine
TESTS = (
    *("modules/test_collectives.py", "modules/test_config.py", "modules/test_models.py"),
    "faults/test_faults_checkpoint.py",
    "machines/test_scripts.py::test_parity_table_and_json",  # every method against one process
    "machines/test_machines.py::test_two_torchruns_are_two_nodes_of_one_run",
)
NOBODY = 65534
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "_build", "_executed", "text", "runs", ".*_cache", "__pycache__", "*.egg-info"
)
CANNOT = 75  # exit code: this machine cannot be set up here
_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


class Personality(NamedTuple):
    """A machine. `proof` is a Python expression that is true on it; `enter` makes this process one that lives there."""

    name: str
    says: str
    proof: str
    environment: Mapping[str, str] = MappingProxyType({})  # "{scratch}" stands for its own folder
    enter: Callable[[Path], None] | None = None
    checkout: str = "checkout"


# ---- what a process has to do to live there --------------------------------------------------------------------------


def _done(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    _done(_libc.mount(words[0], words[1], words[2], flags, words[3]))


def _own_mounts() -> None:
    """What this process mounts from now on, only it and its children see."""
    _done(_libc.unshare(_CLONE_NEWNS))
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def one_core(scratch: Path) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def small_shm(scratch: Path) -> None:
    _own_mounts()
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64m")


def only_ipv4(scratch: Path) -> None:
    reason = enter_empty_network()
    if reason:
        raise OSError(reason)
    switch = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if switch.exists():
        switch.write_text("1")


def no_privileges(scratch: Path) -> None:
    """Become nobody, who owns the copy and nothing else; what lies in closed folders is put where he can see it."""
    if os.getuid() != 0:
        raise OSError("only root can become another user")
    _own_mounts()
    for folder, _, files in os.walk(scratch):
        for name in [folder, *(os.path.join(folder, file) for file in files)]:
            os.chown(name, NOBODY, NOBODY, follow_symlinks=False)
    home = scratch / "home"
    os.chown(home, 0, 0)
    home.chmod(0o555)
    places = [Path(place).resolve() for place in {sys.base_prefix, sys.prefix, str(ROOT)}]
    closed = {place: next((p for p in reversed(place.parents) if not p.stat().st_mode & 1), None) for place in places}
    hidden = {place: parent for place, parent in closed.items() if parent}
    kept = {place: tempfile.mkdtemp(dir=scratch) for place in hidden}
    for place, folder in kept.items():
        _mount(str(place), folder, None, _MS_BIND | _MS_REC)
    for parent in set(hidden.values()):
        _mount("tmpfs", str(parent), "tmpfs", 0, "mode=755")
    for place, folder in kept.items():
        place.mkdir(parents=True, exist_ok=True)
        _mount(folder, str(place), None, _MS_BIND | _MS_REC)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def temporary_folder(scratch: Path) -> None:
    Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)


def told(answer: bool) -> Callable[[Path], None]:
    """Python's start-up file for a machine on which PyTorch gives this answer to DeepSpeed's question about fp16."""

    def enter(scratch: Path) -> None:
        folder = scratch / "told"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(_TOLD.format(answer=answer))

    return enter


_TOLD = """\
import importlib.util, sys
class Answer:
    def __init__(self, asked):
        self.asked = asked
    def __call__(self):
        return {answer}
    def __getattr__(self, name):
        return getattr(self.asked, name)
class Told:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.ops.mkldnn._is_mkldnn_fp16_supported = Answer(module.ops.mkldnn._is_mkldnn_fp16_supported)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Told)
"""

_FP16 = "torch.ops.mkldnn._is_mkldnn_fp16_supported()"
_CAPABILITY = "torch.backends.cpu.get_cpu_capability()"
PERSONALITIES = (
    Personality(
        "all-cores", "this machine as it is, with all its cores", "len(os.sched_getaffinity(0)) == os.cpu_count()"
    ),
    Personality("one-core", "one core", "len(os.sched_getaffinity(0)) == 1", {}, one_core),
    Personality("onednn-avx2", "oneDNN's kernels for AVX2", f"not {_FP16}", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Personality(
        "onednn-highest",
        "oneDNN's kernels for all that this CPU can do",
        "os.environ['ONEDNN_MAX_CPU_ISA'] == 'DEFAULT'",
        {"ONEDNN_MAX_CPU_ISA": "DEFAULT"},
    ),
    Personality(
        "aten-default",
        "PyTorch's kernels for any CPU",
        f"{_CAPABILITY} == 'DEFAULT'",
        {"ATEN_CPU_CAPABILITY": "default"},
    ),
    Personality("aten-avx2", "PyTorch's kernels for AVX2", f"{_CAPABILITY} == 'AVX2'", {"ATEN_CPU_CAPABILITY": "avx2"}),
    Personality(
        "fp16-yes", "DeepSpeed is told that fp16 works", f"{_FP16}", {"PYTHONPATH": "{scratch}/told"}, told(True)
    ),
    Personality(
        "fp16-no", "DeepSpeed is told that it does not", f"not {_FP16}", {"PYTHONPATH": "{scratch}/told"}, told(False)
    ),
    Personality(
        "path",
        "a path with spaces and letters beyond ASCII, also that of the environment",
        "' ' in sys.prefix and not sys.prefix.isascii()",
        {"HOME": "{scratch}/für später"},
        checkout="für später/zwei Wörter",
    ),
    Personality(
        "user",
        "a user without privileges, whose HOME cannot be written",
        "os.getuid() != 0 and not os.access(os.environ['HOME'], os.W_OK)",
        {"HOME": "{scratch}/home"},
        no_privileges,
    ),
    Personality(
        "tmpdir",
        "TMPDIR elsewhere: in memory, under a name with a space",
        "tempfile.gettempdir().startswith('/dev/shm') and shutil.disk_usage('/dev/shm').free > 2**30",
        {"TMPDIR": "/dev/shm/{name} of ours"},
        temporary_folder,
    ),
    Personality(
        "locale",
        "LC_ALL=C, a time zone with quarters of an hour, a terminal that can do nothing",
        "time.localtime().tm_gmtoff % 3600 == 2700 and locale.setlocale(locale.LC_CTYPE, '') == 'C'",
        {"LANG": "C", "LC_ALL": "C", "TZ": "Asia/Kathmandu", "TERM": "dumb", "COLUMNS": "40", "NO_COLOR": "1"},
    ),
    Personality("ipv4", "no IPv6, and no network but its own loopback", "not ipv6()", {}, only_ipv4),
    Personality("small-shm", "64 MB of /dev/shm", "shutil.disk_usage('/dev/shm').total == 64 * 2**20", {}, small_shm),
)
_PROVE = """\
import locale, os, shutil, socket, sys, tempfile, time
def ipv6():
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
        return True
    except OSError:
        return False
if {asks_torch}:
    import torch
sys.exit(not ({proof}))
"""


# ---- a copy of the checkout for each ---------------------------------------------------------------------------------


def settle(personality: Personality, scratch: Path) -> tuple[Path, dict[str, str]]:
    """Its copy of the checkout, which shares our virtual environment, and its environment variables."""
    checkout = scratch / personality.checkout
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=LEFT_OUT)
    (checkout / ".venv").symlink_to(sys.prefix)
    (scratch / "home").mkdir()
    unwanted = {
        "PYTHONPATH",
        "MAKEFLAGS",
        "MAKELEVEL",
        "MFLAGS",
        "VIRTUAL_ENV",
        "ONEDNN_MAX_CPU_ISA",
        "ATEN_CPU_CAPABILITY",
    }
    values = {name: value.format(scratch=scratch, name=scratch.name) for name, value in personality.environment.items()}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted} | values
    environment["PYTHONPATH"] = os.pathsep.join([str(checkout / "src"), *values.get("PYTHONPATH", "").split()])
    return checkout, environment


def live_as(personality: Personality, scratch: Path, command: list[str]) -> int:
    """Become a process of that machine, then `command`. Returns only if that cannot be done here."""
    try:
        if personality.enter:
            personality.enter(scratch)
    except OSError as error:
        print(error, file=sys.stderr)
        return CANNOT
    os.execvp(command[0], command)


Call = Callable[[list[str]], tuple[int, str]]  # runs a command on that machine: exit code, and what it wrote


def why_not(personality: Personality, call: Call) -> str:
    """Empty, or the reason why this machine cannot be had here."""
    program = _PROVE.format(proof=personality.proof, asks_torch="torch" in personality.proof)
    code, words = call([".venv/bin/python", "-c", program])
    return (words.splitlines() or ["this machine cannot be made so"])[-1] if code != 0 else ""


def failures(personality: Personality, call: Call, quick: bool) -> list[str]:
    """Run the notebooks and the tests; pytest's lines about those that failed."""
    failed = []
    # by another name the environment is another one to DeepSpeed, which then compiles anew, for minutes
    environment = ".venv" if personality.checkout != Personality._field_defaults["checkout"] else sys.prefix
    notebooks = " ".join(f"book/{name}.ipynb" for name in NOTEBOOKS)
    tests = " ".join(f"tests/{name}" for name in TESTS)
    for target in (["test-notebooks", *([f"NOTEBOOKS={notebooks}"] if quick else [])], ["test-code", f"TESTS={tests}"]):
        # old-file: the environment is there, whatever the dates of the copied files say
        options = ["--no-print-directory", f"--old-file={environment}/.package-installed", f"VENV={environment}"]
        code, words = call(["make", *options, *target])
        if code != 0:
            lines = [line for line in words.splitlines() if line.startswith(("FAILED", "ERROR"))]
            failed += lines or [f"make {target[0]}: exit code {code}"]
    return failed


def run_as(personality: Personality, quick: bool, log: Path) -> str:
    """Run it; returns "passed", "FAILED: ..." or "skipped: ...". `log` gets all output."""
    with tempfile.TemporaryDirectory(prefix=f"{personality.name}-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        scratch.chmod(0o755)
        checkout, environment = settle(personality, scratch)
        enter = [sys.executable, str(Path(__file__).resolve()), "--as", personality.name, "--scratch", folder, "--"]
        log.write_bytes(b"")

        def call(command: list[str]) -> tuple[int, str]:
            begin = log.stat().st_size
            with log.open("ab") as out:
                done = subprocess.run([*enter, *command], cwd=checkout, env=environment, stdout=out, stderr=out)
            return done.returncode, log.read_bytes()[begin:].decode(errors="replace").strip()

        try:
            reason = why_not(personality, call)
            if reason:
                return f"skipped: {reason}"
            failed = failures(personality, call, quick)
            return "\n    ".join(["FAILED:", *failed]) if failed else "passed"
        finally:
            if "TMPDIR" in personality.environment:
                shutil.rmtree(environment["TMPDIR"], ignore_errors=True)


def two(text: str) -> list[Personality]:
    """Two neighbours in the list; all have their turn as `text`, such as a commit, changes."""
    first = int(hashlib.sha256(text.encode()).hexdigest(), 16) % len(PERSONALITIES)
    return [PERSONALITIES[first], PERSONALITIES[(first + 1) % len(PERSONALITIES)]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the book as if on other machines.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="personalities; default: all")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--quick", action="store_true", help=f"of the notebooks only {', '.join(NOTEBOOKS)}")
    parser.add_argument("--two", metavar="TEXT", help="two personalities, which TEXT chooses")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time, default 1")
    parser.add_argument("--logs", type=Path, default=ROOT / "_build" / "personalities", metavar="DIR")
    options = parser.parse_args()
    by_name = {personality.name: personality for personality in PERSONALITIES}
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    unknown = [name for name in options.names if name not in by_name]
    if unknown:
        parser.error(f"no personality {', '.join(unknown)}; there are {', '.join(by_name)}")
    chosen = two(options.two) if options.two else [by_name[name] for name in options.names or by_name]
    if options.list:
        print(*(f"{p.name:15} {p.says}" for p in chosen), sep="\n")
        return 0
    options.logs.mkdir(parents=True, exist_ok=True)

    def run(personality: Personality) -> str:
        begin, log = time.monotonic(), options.logs / f"{personality.name}.log"
        outcome = run_as(personality, options.quick, log)
        took = f"{time.monotonic() - begin:.0f} s, {log}"
        print(f"{personality.name}: {personality.says}\n    {outcome} ({took})", flush=True)
        return outcome

    print(f"{len(chosen)} machines: {', '.join(p.name for p in chosen)}", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = dict(zip((p.name for p in chosen), pool.map(run, chosen), strict=True))
    words = [outcome.partition(":")[0] for outcome in outcomes.values()]
    print(f"{words.count('passed')} passed, {words.count('FAILED')} failed, {words.count('skipped')} skipped")
    for word in ("FAILED", "skipped"):
        names = [name for name, outcome in outcomes.items() if outcome.startswith(word)]
        if names:
            print(f"{word}: {', '.join(names)}")
    if "FAILED" in words:
        return 1
    return CANNOT if options.names and "passed" not in words else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        _, _, name, _, scratch, _, *command = sys.argv
        sys.exit(live_as(next(p for p in PERSONALITIES if p.name == name), Path(scratch), command))
    sys.exit(main())
