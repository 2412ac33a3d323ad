# make train        train the tiny FP8 MoE on this machine (CONFIG=configs/x.yaml NPROC=8 ARGS="optim.lr=3e-4" to change it)
# make test         the CPU tests        make test-slow   also the long ones
# make lint         ruff                 make clean       remove the virtual environment
#
# Each target first builds .venv from requirements.txt, once. To use an environment of your own: make train PY=python3

CONFIG ?= configs/tiny.yaml
NPROC  ?= 1
ARGS   ?=
VENV   := .venv
TRITON := triton==3.9.0

# On a busy machine idle OpenMP threads must sleep, not spin: with two of two cores taken by others, spinning made a step 30 times slower.
export OMP_WAIT_POLICY ?= passive

ifneq ($(origin PY), command line)
PY     := $(VENV)/bin/python
READY  := $(VENV)/.installed
endif

# The first interpreter that is a Python 3.11 or 3.12; to name one: make PYTHON=/path/to/python3.12
RIGHT_VERSION := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(firstword $(foreach p,python3 python3.12 python3.11,$(shell $(p) -c '$(RIGHT_VERSION)' 2>/dev/null && echo $(p))))

.PHONY: train test test-slow lint install clean

train: $(READY)
	$(PY) -m tools.train_tokenizer --config $(CONFIG) $(ARGS)
	$(PY) -m tools.prepare_data --config $(CONFIG) $(ARGS)
	$(PY) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) train.py --config $(CONFIG) $(ARGS)

test: $(READY)
	$(PY) -m pytest -q

test-slow: $(READY)
	$(PY) -m pytest -q -m "not gpu and not multi_gpu"

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

install: $(READY)

# The stamp is touched last, so that an interrupted installation is taken up again.
$(VENV)/.installed: requirements.txt
	@test -n "$(PYTHON)" || { echo "error: needs Python 3.11 or 3.12; found $$(python3 --version 2>&1)." \
		"Name one: make PYTHON=/path/to/python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@# torch's CUDA builds bring the triton they need; beside a CPU build it serves the interpreter tests.
	$(PY) -c 'import triton' 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check $(TRITON)
	@touch $@

clean:
	rm -rf $(VENV)
