#!/bin/bash
# Runs questions on a GPU machine, each in a process of its own with a time limit, so that one that hangs ends alone. Run it
# in the repository's root: bash lab/bench/gpu.sh engine phases "kernels products" "kernels memory". A word with options is
# quoted. Results and logs go to OUT (default: build/h200), LIMIT is in seconds.
# The wheels in .whl are installed first, if there are any (wheels.sh).
OUT=${OUT:-build/h200}; mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=build/triton TORCHINDUCTOR_CACHE_DIR=build/inductor HF_HUB_OFFLINE=1
if [ -d .whl ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$PWD/build/site" .whl/*.whl || exit
  export PYTHONPATH=$PWD/build/site
fi
clocks() { nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu --format=csv,noheader; }
timed() { local start=$SECONDS; timeout -k 5 "${LIMIT:-600}" "$@" 2>&1 | tee -a "$OUT/log.txt" | tail -"${LINES_SHOWN:-60}"; echo "== $* took $((SECONDS - start)) s"; }
clocks
for question in "$@"; do
  read -ra words <<< "$question"
  timed python3 -m "lab.bench.${words[0]}" "${words[@]:1}" --results "$OUT"
done
clocks
