#!/bin/bash
# Runs the tests of LoRAs on a GPU, then measures what LoRAs cost beside a plain INT8 step of SDXL's shape, added by a kernel
# behind the products and in the products. Run it in the repository's root; results and logs go to OUT (default: build/h200).
# STAGES are layers:rows:LoRAs:rank; SKIP_TESTS leaves out the tests; BENCH has other options of `diptych bench loras`.
# The wheels in .whl are installed first, if there are any (wheels.sh).
OUT=${OUT:-build/h200}; mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=build/triton HF_HUB_OFFLINE=1
if [ -d .whl ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$PWD/build/site" .whl/*.whl || exit
  export PYTHONPATH=$PWD/build/site
fi
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu --format=csv,noheader
timed() { local limit=$1 name=$2; shift 2; local start=$SECONDS; timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$OUT/log.txt" | tail -"${LINES_SHOWN:-40}"; echo "== $name took $((SECONDS - start)) s"; }
[ -n "$SKIP_TESTS" ] || timed 240 kernels python3 -m pytest -q -p no:cacheprovider tests/core/kernels/cuda/test_low_rank.py
[ -n "$SKIP_TESTS" ] || timed 240 pictures python3 -m pytest -q -p no:cacheprovider tests/gpu/test_loras.py
for what in ${STAGES:-attention,linear,all:16:8:16 linear,all:16:8:64}; do
  IFS=: read -r layers rows loras rank <<< "$what"
  timed 200 "$what" python3 -m diptych bench loras ${BENCH:---sdxl} --layers "$layers" --rows "$rows" --loras "$loras" --rank "${rank:-16}" --rounds 10 --results "$OUT/$rows-$rank"
done
nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader
