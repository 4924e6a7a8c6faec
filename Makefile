# make        set up .venv, prepare Shakespeare's plays, train, sample, draw the attention page;
#             what is done is not done again
# make check  lint, format, types and the short tests
# make test   lint, format and all tests but the drill
# make drill  the long versions of tests and measurements
# make mutants  plant faults in a copy, one at a time, and see which test turns red (docs/mutants.md)
# make exercise  list the exercises of docs/exercises; make exercise N=3 checks what you wrote there
#
# A CPU-only machine with Linux: make TORCH_INDEX=https://download.pytorch.org/whl/cpu
# fetches PyTorch's small CPU build (0.2 GB, not 3 GB)

PYTHON ?= python3
TORCH_INDEX ?=
RUN := runs/shakespeare-char
DATA := data/prepared/shakespeare-char
BIN := .venv/bin

.PHONY: all check test drill mutants exercise clean
all: $(RUN)/attention.html
	@echo
	@echo "Trained, sampled and drawn. Look at:"
	@echo "  $(RUN)/attention.html    the attention page, in a browser"
	@echo "  $(RUN)/loss.png          the loss curve"
	@echo "  $(RUN)/sample.txt        a sample; more: $(BIN)/python sample.py $(RUN) --prompt 'ROMEO:'"

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements.txt
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements-dev.txt
	@touch $@

$(DATA)/dataset.json: | .venv/installed
	$(BIN)/python -m data.prepare shakespeare --tokenizer char

$(RUN)/trained: | $(DATA)/dataset.json
	$(BIN)/python train.py shakespeare-char --resume
	@touch $@

$(RUN)/sample.txt: $(RUN)/trained
	$(BIN)/python sample.py $(RUN) --prompt "ROMEO:" --max-new-tokens 400 | tee $@.partial
	@mv $@.partial $@

$(RUN)/attention.html: $(RUN)/sample.txt
	$(BIN)/python attention_map.py $(RUN) --out $@

check: .venv/installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -n 2 -m "not slow and not drill"

test: .venv/installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist worksteal

drill: .venv/installed-dev
	$(BIN)/python -m pytest -m drill

mutants: .venv/installed-dev
	$(BIN)/python tests/mutants.py

exercise: | .venv/installed
	@$(BIN)/python -m exercises.check $(N)

clean:
	rm -rf .venv runs data/prepared data/cache
