#!/usr/bin/env bash
# Trains emoji-z on one H200-class GPU in about 12 minutes; its autoencoder begins as that of MODELS/emoji-xl. gpu.sh says how to
# call it. `watch` leaves the exported model in OUT/models, and what the judge says of it in WORK/judge.
#
# Minutes:      0     0.5            2.7                 10.2
#               setup | zimage_vae 2 | zimage 7.5          |
#                     | rehearsal: three steps of everything, which fill the compiler's cache
set -euo pipefail

VAE_MIN=${VAE_MIN:-2} MODEL_MIN=${MODEL_MIN:-7.5} REHEARSED=${REHEARSED:-17}
. "$(dirname "$0")/gpu.sh"

setup() {
    mkdir -p "$WORK/models/emoji-xl"
    [ -e "$WORK/models/emoji-xl/vae" ] || cp -r "$MODELS/emoji-xl/vae" "$WORK/models/emoji-xl/"
    [ -d "$WORK/zimage_tokens" ] || said "$PYTHON" -m training.zimage_tokens "${COMMON[@]}"
}

rehearse() {
    local short=(--work "$WORK/rehearsal" --models "$WORK/models")
    mkdir -p "$WORK/rehearsal" &&
        ln -sfn ../zimage_tokens "$WORK/rehearsal/zimage_tokens" &&
        LOG=rehearsal stage zimage_vae 0 "${short[@]}" --iterations 1 --compile off --batch 8 &&
        LOG=rehearsal stage zimage 0 "${short[@]}" --iterations "$REHEARSED" &&
        rm -rf "$WORK/rehearsal"
}

train() {
    local rehearsal
    rehearse & rehearsal=$!
    stage zimage_vae 0 --minutes "$VAE_MIN" || return 1
    wait $rehearsal || true # two at once would compile the same
    stage zimage 0 --minutes "$MODEL_MIN"
}

collect() {
    [ -f "$WORK/zimage/state.pt" ] || { echo "nothing is trained yet" && return; }
    mkdir -p "$OUT/models"
    said "$PYTHON" -m training.export "${COMMON[@]}" --only emoji-z
    cp -a "$WORK/models/emoji-z" "$OUT/models/"
    said "$PYTHON" -m training.judge "${COMMON[@]}" --only emoji-z || echo "the judge failed"
}

plan "$@"
