# Everything starts from here: `make pretrain` on a fresh clone trains a model, `make test` shows that it is right.
# ARGS="key=value ..." goes to the command: make pretrain ARGS="run.steps=50"
.PHONY: help install pretrain posttrain test test-slow lint bench gpu-check gpu-wheels clean

PYTEST = .venv/bin/python -m pytest
PUBLIC = k3 parallel optim data kernels recipes slurm

help:
	@echo "make posttrain  the whole way from text to a distilled model, in about a quarter of an hour; everything lies in runs/posttrain"
	@echo "make pretrain   install if needed, prepare the data, train the nano model; everything is written under runs/"
	@echo "make test       install if needed, run the tests that are not marked slow"
	@echo "make test-slow  the tests marked slow"
	@echo "make lint       style, format and types"
	@echo "make bench      measure this machine"
	@echo "make gpu-check  what must hold on a GPU, in one table; WHEELS=gpu-wheels where only torch is installed"
	@echo "make gpu-wheels the other packages that gpu-check needs, to carry to such a machine"
	@echo "make install    only make .venv"
	@echo "make clean      remove .venv and the caches, keep runs/"

install:
	@./install.sh

posttrain: install
	.venv/bin/k3 posttrain $(ARGS)

pretrain: install
	.venv/bin/k3 pretrain model=nano run.compare_dense=0.25 $(ARGS)

test: install
	$(PYTEST) -n 2 --dist loadfile -m "not slow" $(ARGS)

# pytest exits with 5 where nothing is selected
test-slow: install
	$(PYTEST) -n 2 --dist loadfile -m slow $(ARGS) || test $$? -eq 5

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy $(PUBLIC)

bench: install
	.venv/bin/k3 bench $(ARGS)

# Without .venv the machine's own python, which has torch and Triton: nothing is installed there.
GPU_PYTHON = $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

gpu-check:
	$(GPU_PYTHON) -m recipes.gpu.check $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

gpu-wheels: install
	.venv/bin/python -m pip wheel --no-deps --wheel-dir gpu-wheels $$(.venv/bin/python -m recipes.gpu.wheels)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
