#!/usr/bin/env bash
# Trains the student emoji-xl-turbo on an H100- or H200-class GPU. It belongs to the denoiser that scenes.sh trained in WORK; in
# a fresh WORK to that of MODELS. gpu.sh says how to call it. `watch` leaves the folder of models/ in OUT/models, exported from
# averaged weights.
#
# Minutes:     0               1.5
#             | teacher's pairs | turbo
#             | rehearsal
# The rehearsal takes three steps of turbo: it fills the compiler's cache, and what would fail late fails early.
set -euo pipefail

PAIRS_MIN=${PAIRS_MIN:-1.5} TURBO_MIN=${TURBO_MIN:-5}
. "$(dirname "$0")/gpu.sh"

setup() {
    [ -f "$WORK/unet/state.pt" ] || said "$PYTHON" -m training.adopt "${COMMON[@]}" --models "$MODELS"
    mkdir -p "$WORK/models"
}

rehearse() {
    local folder="$WORK/rehearsal" name
    local short=(--work "$folder" --variants 1)
    mkdir -p "$folder" &&
        for name in unet latents tokens; do ln -sfn "../$name" "$folder/$name"; done &&
        LOG=rehearsal stage teacher 0 "${short[@]}" --iterations 1 --compile off &&
        LOG=rehearsal stage turbo 0 "${short[@]}" --iterations 3 &&
        rm -rf "$folder"
}

train() {
    local rehearsal
    rehearse & rehearsal=$!
    stage teacher 0 --minutes "$PAIRS_MIN" || return 1 # the compiler's time is in the minutes
    wait $rehearsal || true
    stage turbo 0 --minutes "$TURBO_MIN"
}

# The turbo's folder has emoji-xl's index and links to its parts, which are exported for it alone and stay here.
collect() {
    [ -f "$WORK/turbo/state.pt" ] || { echo "nothing is trained yet" && return; }
    CUDA_VISIBLE_DEVICES='' said "$PYTHON" -m training.export "${COMMON[@]}" --device cpu --only emoji-xl emoji-xl-turbo
    mkdir -p "$OUT/models"
    cp -a "$WORK/models/emoji-xl-turbo" "$OUT/models/"
}

plan "$@"
