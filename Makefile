# Every target sets up .venv by itself; the second call installs nothing.
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -P -m pytest
READY := $(VENV)/.package-installed
NOTEBOOKS = $(wildcard book/*.ipynb)
TWINS = $(wildcard text/*.md)
EXECUTED := _executed
SHELL_SCRIPTS = $(wildcard .ci/* docker/*.sh scripts/*.sh slurm/*)

# Jupyter, matplotlib and DeepSpeed's compiler write into HOME; where that cannot be, a folder of ours serves
ifneq ($(shell test -d "$$HOME" && test -w "$$HOME" && echo yes),yes)
export HOME := $(CURDIR)/_build/home
$(shell mkdir -p _build/home)
endif

# files of the book are UTF-8, whatever the terminal's locale says
export PYTHONUTF8 := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:  # two cores, and the site is built from what the tests executed
.PHONY: help setup book test test-code test-notebooks site lab sync twins push format lint exercises parity bench machines container strip clean distclean

help:             ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 24

$(VENV)/.requirements-installed: requirements.txt
	bash scripts/venv.sh $(VENV)

# PYTHON= asks for a version, and the environment has another: venv.sh makes it anew
version = $(shell "$(1)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifneq ($(PYTHON),)
ifneq ($(call version,$(PYTHON)),$(call version,$(BIN)/python))
.PHONY: $(VENV)/.requirements-installed
endif
endif

$(READY): pyproject.toml $(VENV)/.requirements-installed
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

setup: $(READY)   ## only what every target does first: .venv, requirements.txt, the package

book: $(READY)    ## execute the notebooks (through a cache) and build the site in _build/html
	$(BIN)/python scripts/book.py build

test: test-code test-notebooks site  ## unit, rank and fault tests, every notebook, the site in a browser

test-code: $(READY)
	$(PYTEST) -m "not site" $(TESTS)

test-notebooks: $(READY)  # executed in a copy, which keeps the outputs for `make site`
	$(BIN)/python scripts/book.py copy $(EXECUTED)
	$(PYTEST) -W default --nbmake --overwrite $(addprefix $(EXECUTED)/,$(NOTEBOOKS))

site: $(READY)    # built from the notebooks that test-notebooks executed
	$(BIN)/python scripts/book.py build --executed $(EXECUTED)
	$(PYTEST) -m site

lab: $(READY)     ## JupyterLab on the notebooks
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/book/00_ranks.ipynb

sync: $(READY)    ## copy pieces of src/minizero into the cells that show them, the public address into the notebooks
	$(BIN)/python scripts/sync.py
	$(BIN)/python scripts/address.py

twins: $(READY)   ## book/*.ipynb -> text/*.md, to edit a chapter as text (overwrites the twins)
	@mkdir -p text
	@for nb in $(NOTEBOOKS); do $(BIN)/jupytext -q --to md:myst -o text/$$(basename $$nb .ipynb).md $$nb || exit 1; done

push: $(READY)    ## text/*.md -> book/*.ipynb (keeps the cells' ids)
	@for md in $(TWINS); do $(BIN)/jupytext -q --update --to ipynb -o book/$$(basename $$md .md).ipynb $$md || exit 1; done

strip: $(READY)   ## take outputs and counts out of the notebooks, as they are committed
	$(BIN)/jupyter nbconvert --clear-output --inplace $(NOTEBOOKS)

format: $(READY)  ## ruff: format, then repair what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)    ## ruff, mypy --strict on src and scripts, notebook cells equal to the package, shell scripts, workflows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/sync.py --check
	$(BIN)/python scripts/address.py --check
	$(BIN)/shellcheck $(SHELL_SCRIPTS)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --quiet --offline .github

exercises: $(READY) ## grade your own solutions: the verdict of every exercise in book/
	$(BIN)/python scripts/grade.py

parity: $(READY)  ## compare with one process, DDP, FSDP2 and DeepSpeed on 2 and 4 ranks
	$(BIN)/python scripts/parity.py

bench: $(READY)   ## step times beside FSDP2, DeepSpeed and no communication at all
	$(BIN)/python scripts/bench.py

machines: $(READY) ## the book as if on other machines (hours): MACHINES="--quick one-core", MACHINES=--list
	$(BIN)/python scripts/personalities.py $(MACHINES)

# the GPU image where there is an NVIDIA driver; it writes into this checkout, so under your ids, and root's become 1000
PROFILE ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
container:        ## build the image and start JupyterLab in it (needs Docker); PROFILE=cuda or cpu
	MINIZERO_USER=$$(id -u | sed 's/^0$$/1000/'):$$(id -g | sed 's/^0$$/1000/') \
		docker compose --file docker/compose.yaml --profile $(PROFILE) up --build

clean:            ## remove what the other targets built
	rm -rf _build _executed build .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src scripts tests book -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## also remove the virtual environment
	rm -rf $(VENV) src/*.egg-info
