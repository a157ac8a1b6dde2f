#!/bin/bash
# On the device machine: each kind of kernel in a process of its own, so that one that hangs costs only its own time.
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu --format=csv,noheader
stage() { local limit=$1; shift; local start=$SECONDS; timeout -k 5 "$limit" python3 -m benchmarks.h200.kernels "$@" --out "$OUT" 2>&1 | tee -a "$OUT/log.txt" | grep -v Warning | tail -"${LINES_SHOWN:-60}"; echo "== $* took $((SECONDS - start)) s"; }
for what in ${STAGES:-compile check memory attention linear conv}; do stage "${LIMIT:-130}" "$what"; done
if [ -n "$SUSTAINED" ]; then timeout -k 5 130 python3 -m benchmarks.h200.sustained --out "$OUT"; fi
nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader
