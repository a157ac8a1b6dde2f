#!/bin/bash
# Measures each kind of GPU kernel in a process of its own with a time limit, so that one that hangs ends alone. Run it in
# the repository's root; results and logs go to OUT (default: build/h200). STAGES names the kinds.
OUT=${OUT:-build/h200}; mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=build/triton
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu --format=csv,noheader
stage() { local limit=$1; shift; local start=$SECONDS; timeout -k 5 "$limit" python3 -m benchmarks.h200.kernels "$@" --out "$OUT" 2>&1 | tee -a "$OUT/log.txt" | grep -v Warning | tail -"${LINES_SHOWN:-60}"; echo "== $* took $((SECONDS - start)) s"; }
for what in ${STAGES:-compile check memory attention linear conv}; do stage "${LIMIT:-130}" "$what"; done
if [ -n "$SUSTAINED" ]; then timeout -k 5 130 python3 -m benchmarks.h200.sustained --out "$OUT"; fi
nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader
