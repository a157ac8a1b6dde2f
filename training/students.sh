#!/usr/bin/env bash
# Distils emoji-xl-turbo, the student of few steps, of emoji-xl on one H200-class GPU in about 8 minutes. Runs on the GPU
# machine. (The tiny codec is trained by scenes.sh.)
#
# Before, beside the repository's code (neither folder is committed): models/emoji-xl and the data set's emoji/ and coco/
# in .carry/, and in .whl/ the wheels that scenes.sh names. Then, on the GPU machine, in the
# repository's root, with OUT set to where answers are taken from:
#   training/students.sh
# What came back is unpacked with: cat students.tar.part-* | tar -x -C models/
#
# Minutes:      0       0.4                 2.7                     8.2
#   lane 1      adopt | teacher's pairs   | turbo 4                 | export
#   lane 2            | rehearsal
# The rehearsal takes three steps of every stage: it fills the compiler's cache, and what would fail late fails early.
set -euo pipefail

CARRIED=${CARRIED:-.carry}
WORK=${WORK:-/tmp/students}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/students-out}
SITE=${SITE:-/tmp/site}
PAIRS_MIN=${PAIRS_MIN:-1.5} TURBO_MIN=${TURBO_MIN:-4.1}
export PYTHONPATH=$PWD:$SITE:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor
read -ra MORE <<<"${EXTRA:-}"
COMMON=(--data "$CARRIED" --work "$WORK" --models "$CARRIED" --checkpoint-s 120 --variants 24 "${MORE[@]}")

# Says when it did what: a lane's log tells where the minutes went.
said() { echo "$(date +%T) $*" && "$@"; }

rehearse() {
    local short=("${COMMON[@]}" --work "$WORK/rehearsal" --variants 1)
    mkdir -p "$WORK/rehearsal/tokens"
    cp -r "$WORK/unet" "$WORK/latents" "$WORK/rehearsal/"
    cp -r "$WORK/tokens"/clip* "$WORK/rehearsal/tokens/"
    said "$PYTHON" -m training.teacher "${short[@]}" --iterations 1 --compile off
    said "$PYTHON" -m training.turbo "${short[@]}" --iterations 3
    rm -rf "$WORK/rehearsal"
}

mkdir -p "$WORK" "$OUT"
[ ! -d .whl ] || [ -d "$SITE/diffusers" ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile \
    --no-cache-dir --upgrade --target "$SITE" .whl/*.whl
said "$PYTHON" -m training.adopt "${COMMON[@]}"
rehearse >"$WORK/rehearsal.log" 2>&1 &
rehearsal=$!
said "$PYTHON" -m training.teacher "${COMMON[@]}" --minutes "$PAIRS_MIN" # the compiler's time is in the minutes
wait $rehearsal || { tail -30 "$WORK/rehearsal.log"; exit 1; }
said "$PYTHON" -m training.turbo "${COMMON[@]}" --minutes "$TURBO_MIN" || echo "turbo failed"
mkdir -p "$WORK/models/emoji-xl"
cp "$CARRIED/emoji-xl/model_index.json" "$WORK/models/emoji-xl/"
said "$PYTHON" -m training.export "${COMMON[@]}" --models "$WORK/models" --only emoji-xl-turbo
tar -C "$WORK/models" -cf - emoji-xl-turbo | split -b 15M -d - "$OUT/students.tar.part-"
(cd "$WORK" && tar -czf "$OUT/curves.tgz" ./*/curve.jsonl ./*.log)
ls -lR "$OUT"
