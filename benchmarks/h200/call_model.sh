#!/bin/bash
# On the device machine, with diffusers carried as wheels in .whl: the whole model, each part in a process of its own.
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor HF_HUB_OFFLINE=1
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
export PYTHONPATH=/tmp/site
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu --format=csv,noheader
stage() { local limit=$1; shift; local start=$SECONDS; timeout -k 5 "$limit" python3 -m benchmarks.h200.$MODULE "$@" --out "$OUT" 2>&1 | tee -a "$OUT/log.txt" | grep -v Warning | tail -"${LINES_SHOWN:-75}"; echo "== $MODULE $* took $((SECONDS - start)) s"; }
[ -n "$SKIP_COMPILE" ] || timeout 90 python3 -m benchmarks.h200.kernels compile
for what in ${STAGES:-numerics engine cohost fused vae stock encoders compiled}; do
  case $what in numerics|engine|cohost|plans) MODULE=$what; what=;; *) MODULE=forwards;; esac
  stage "${LIMIT:-300}" $what ${OPTIONS:-}
done
nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader
