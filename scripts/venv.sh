#!/usr/bin/env bash
# venv.sh DIR: make the virtual environment DIR and install requirements.txt into it.
# Looks first for what a bare machine may lack, and names all of it at once.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: venv.sh DIR}

runs() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
headers() { "$1" -c 'import os, sysconfig; sys_include = sysconfig.get_path("include")
raise SystemExit(not os.path.exists(os.path.join(sys_include, "Python.h")))' 2>/dev/null; }

# PYTHON=... chooses; else the first suitable one, preferring one that can compile extensions.
python=
candidates=(python3 python3.13 python3.12 python3.11)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
for candidate in "${candidates[@]}"; do
    runs "$candidate" || continue
    python=${python:-$candidate}
    if headers "$candidate"; then python=$candidate; break; fi
done

missing=()
if [ -z "$python" ]; then
    found=$(python3 --version 2>/dev/null || echo "no python3")
    missing+=("Python 3.11, 3.12 or 3.13 (found: ${PYTHON:-$found}); set PYTHON=/path/to/python to choose one")
else
    headers "$python" || missing+=("the C headers of $python, Python.h (DeepSpeed compiles at run time): python3-dev on Debian and Ubuntu")
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("the venv module of $python: python3-venv on Debian and Ubuntu")
fi
command -v g++ >/dev/null || missing+=("g++ (DeepSpeed compiles at run time): the g++ package, or build-essential, on Debian and Ubuntu")
if [ ${#missing[@]} -gt 0 ]; then
    echo "This machine lacks:" >&2
    printf '  - %s\n' "${missing[@]}" >&2
    exit 1
fi

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# anew as well where PYTHON= asks for another version than this environment has
have=$(version "$venv/bin/python" || true)
if ! runs "$venv/bin/python" || { [ -n "${PYTHON:-}" ] && [ "$have" != "$(version "$python")" ]; }; then
    echo "Creating $venv with $("$python" --version)${have:+, in place of the one with Python $have}"
    "$python" -m venv --clear "$venv"
fi
echo "Installing requirements.txt into $venv: some minutes, once"
# -qq: errors alone. Each index of wheels that lacks a package is worth a warning to pip, and there are 200 packages.
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --requirement requirements.txt
touch "$venv/.requirements-installed"
