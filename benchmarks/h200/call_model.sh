#!/bin/bash
# Measures the whole model on a GPU, each part in a process of its own with a time limit. Run it in the repository's root;
# results and logs go to OUT (default: build/h200). The wheels in .whl are installed first, if there are any (wheels.sh).
OUT=${OUT:-build/h200}; mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=build/triton TORCHINDUCTOR_CACHE_DIR=build/inductor HF_HUB_OFFLINE=1
if [ -d .whl ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$PWD/build/site" .whl/*.whl || exit
  export PYTHONPATH=$PWD/build/site
fi
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu --format=csv,noheader
stage() { local limit=$1; shift; local start=$SECONDS; timeout -k 5 "$limit" python3 -m benchmarks.h200.$MODULE "$@" --out "$OUT" 2>&1 | tee -a "$OUT/log.txt" | grep -v Warning | tail -"${LINES_SHOWN:-75}"; echo "== $MODULE $* took $((SECONDS - start)) s"; }
[ -n "$SKIP_COMPILE" ] || timeout 90 python3 -m benchmarks.h200.kernels compile
for what in ${STAGES:-numerics engine cohost fused vae stock encoders compiled}; do
  case $what in numerics|engine|cohost|plans) MODULE=$what; what=;; *) MODULE=forwards;; esac
  stage "${LIMIT:-300}" $what ${OPTIONS:-}
done
nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader
