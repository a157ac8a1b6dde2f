# The commands to learn. `.venv` is made when first needed, and again when what it holds changes.
PYTHON ?= python3
# One test process more than cores (each runs torch on one thread, and waits for what it started as often as it
# computes), within what memory allows.
JOBS   ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); test $$n -gt 7 && echo 8 || echo $$((n + 1)))

# A file's tests share what its fixtures started, so a file stays whole. The dearest come first (tests/costs.json).
SPREAD := -n $(JOBS) --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
COMPOSE := $(shell command -v docker-compose || echo docker compose)

TOOLS := build/tools

.PHONY: costs coverage docs rooms pins sbom audit results figures serve test test-cpus test-gpu check fix bench eval chaos scenarios mutants train up down test-compose
.DEFAULT_GOAL := serve

serve: .venv/.installed  ## PORT=8080 for another port than 8000; ARGS="--model path/to/sdxl" for another option
	$(BIN)/diptych serve $(if $(PORT),--port $(PORT)) $(ARGS)

test: .venv/.installed  ## everything, on all cores; ARGS="-k floors -x" is handed to pytest
	$(BIN)/pytest $(SPREAD) $(ARGS)

costs: .venv/.installed  ## what tests cost, the dearest first, in CPU seconds; ARGS="tests/api" for some, "--write" for the order
	$(BIN)/python -m tests.costs $(SPREAD) $(ARGS)

# On a CUDA device: what only it shows, and tests that run on one where there is one. What torch, Triton or a driver of
# another version than CI's warns of is shown, and is no failure.
GPU_TESTS := tests/gpu tests/pipeline/test_fused.py tests/unet_opt/fused tests/core/quant/kernels/test_cuda_kernels.py \
    tests/llm/test_fused.py tests/llm/test_decode_kernel.py tests/llm/test_execution.py

test-gpu: .venv/.installed  ## the GPU's part of the tests, on one; elsewhere what needs it is skipped and says so
	$(BIN)/pytest -W default $(GPU_TESTS) $(ARGS)

test-cpus: .venv/.installed  ## rooms that compute (core/quant, unet_opt, pipeline, llm …) as on other processors; ARGS="avx2 -- -x"
	$(BIN)/python -m tests.cpus --jobs $(JOBS) $(ARGS)

check: .venv/.installed  ## style and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: .venv/.installed  ## what ruff can put right by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.installed  ## BENCH=arrivals or BENCH=serve for another one
	$(BIN)/diptych bench $(or $(BENCH),ladder) $(ARGS)

eval: .venv/.installed  ## draws PROMPTS=captions.tsv into OUT=out/evaluation and scores it; ARGS="--precision int8 --against real"
	$(BIN)/diptych evaluate --prompts $(or $(PROMPTS),$(error PROMPTS= is needed: a .tsv with id and caption)) \
	    --out $(or $(OUT),out/evaluation) $(ARGS)

results: .venv/.installed  ## what docs cite, measured again: DATA=folder with emoji/, ARGS="--only simulate"; hours, nothing else may run
	$(BIN)/python -m benchmarks.results $(if $(DATA),--data $(DATA)) $(ARGS)

figures: .venv/.installed  ## writes the figures of README.md and docs/ from the JSON files under benchmarks/
	$(BIN)/python -m benchmarks.figures

chaos: .venv/.installed  ## random faults under random clients, judged by a checker; ARGS="--faults 500 --seed 7"; resumes
	$(BIN)/python -m tests.faults.histories $(ARGS)

scenarios: .venv/.installed  ## each way to break a running service, many times, and what was lost; ARGS="--only poison"
	$(BIN)/python -m tests.faults.chaos $(ARGS)

mutants: .venv/.installed  ## changes ROOM=core/jobs/keyring.py in small ways and says what no test notices; ARGS="--sample 60"
	$(BIN)/python -m tests.mutants $(ROOM) $(ARGS)

coverage: .venv/.installed  ## lines and branches that tests run, into docs/coverage.md; ROOMS="api core/jobs", all otherwise
	$(BIN)/python -m tests.coverage $(ROOMS)

rooms: .venv/.installed  ## docs/rooms.svg, docs/rooms.md and docs/life.svg, drawn anew from the code
	$(BIN)/python -m tests.drawings

docs: .venv/.docs  ## the pages and the reference as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

.venv/.docs: .venv/.installed
	$(PYTHON) install.py .venv --set docs
	touch $@

# With a password for their Redis, made once.
up:  ## the whole service in containers, on http://127.0.0.1:8000; PORT=8080 for another port
	@test -n "$$REDIS_PASSWORD" || grep -qs '^REDIS_PASSWORD=.' .env || (umask 077; \
	    $(PYTHON) -c "import secrets; print(f'REDIS_PASSWORD={secrets.token_hex(24)}')" >> .env)
	PORT=$(or $(PORT),8000) $(COMPOSE) up --detach --build

down:  ## what `make up` started; volumes, and so jobs and pictures, are kept
	$(COMPOSE) down

test-compose: .venv/.installed  ## builds the images and breaks what runs in them; needs a Docker engine
	TEST_COMPOSE=1 $(BIN)/pytest tests/compose $(ARGS)

train: .venv/.installed  ## the embedded models anew: DATA=folder with emoji/ and coco/, MORE="--minutes 24"; resumes
	$(BIN)/python -m training.all --data $(or $(DATA),$(error DATA= is needed: a folder with emoji/ and coco/)) \
	    --work $(or $(WORK),build/training) --models $(or $(MODELS),models) $(MORE)

pins: $(TOOLS)/.installed  ## constraints.txt with hashes, and base images by digest; ARGS="--upgrade", ARGS="packages"
	$(TOOLS)/bin/python -m deployment.pins --uv $(TOOLS)/bin/uv $(ARGS)

sbom: .venv/.installed $(TOOLS)/.installed  ## build/sbom.cdx.json: what is installed in .venv, as CycloneDX lists it
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-format JSON \
	    --output-file build/sbom.cdx.json $(BIN)/python

audit: $(TOOLS)/.installed  ## known vulnerabilities of what constraints.txt pins; ends with 2 where nobody answers
	$(TOOLS)/bin/python -m deployment.audit $(ARGS)

$(TOOLS)/.installed: constraints.txt install.py
	$(PYTHON) install.py $(TOOLS) --set tools
	touch $@

.venv/.installed: pyproject.toml constraints.txt install.py
	$(PYTHON) install.py .venv
