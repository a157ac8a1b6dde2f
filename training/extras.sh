#!/usr/bin/env bash
# Trains what belongs to emoji-xl beside it, on one or two H100- or H200-class GPUs: the student emoji-xl-turbo, the edge
# ControlNet, the IP-Adapter and the LoRAs of training/styles.py. They belong to the denoiser and the emoji-clip that scenes.sh
# trained in WORK; in a fresh WORK to those of MODELS. gpu.sh says how to call it. `watch` leaves
# the folders of models/ in OUT/models, exported from averaged weights.
#
# Minutes:     0          1.5          3.3                         CONTROL_MIN
#   GPU 0     | control                                           | IP-Adapter | LoRAs that are left
#   GPU 1     | teacher's  | turbo                | LoRAs, one after another
#             | pairs      |
#             | rehearsal  |
# A lane that has ended trains the LoRAs that no other has begun. With one GPU the lanes share it. The rehearsal takes three
# steps of turbo and of a LoRA: it fills the compiler's cache, and what would fail late fails early.
set -euo pipefail

CONTROL_MIN=${CONTROL_MIN:-9} PROMPT_MIN=${PROMPT_MIN:-7}
PAIRS_MIN=${PAIRS_MIN:-1.5} TURBO_MIN=${TURBO_MIN:-5} LORA_MIN=${LORA_MIN:-2.5}
STYLES=(mosaic pencil)
. "$(dirname "$0")/gpu.sh"

setup() {
    [ -f "$WORK/unet/state.pt" ] || said "$PYTHON" -m training.adopt "${COMMON[@]}" --models "$MODELS"
    rm -rf "$WORK"/begun-*
    mkdir -p "$WORK/models"
    if [ -f "$WORK/clip/state.pt" ]; then
        CUDA_VISIBLE_DEVICES='' said "$PYTHON" -m training.export "${COMMON[@]}" --device cpu --only emoji-clip
    elif [ -d "$MODELS/emoji-clip" ]; then
        ln -sfn "$(realpath "$MODELS/emoji-clip")" "$WORK/models/emoji-clip"
    fi
}

# rehearse NAME GPU OPTION...: three steps of a stage.
rehearse() {
    local folder="$WORK/rehearsal-$1" name
    local short=(--work "$folder" --variants 1)
    mkdir -p "$folder" &&
        for name in unet latents tokens; do ln -sfn "../$name" "$folder/$name"; done &&
        { [ "$1" != turbo ] || LOG=rehearsal stage teacher "$2" "${short[@]}" --iterations 1 --compile off; } &&
        LOG=rehearsal stage "$1" "$2" "${short[@]}" --iterations 3 "${@:3}" &&
        rm -rf "$folder"
}

# loras GPU: those that no other lane has begun.
loras() {
    local style
    for style in "${STYLES[@]}"; do
        mkdir "$WORK/begun-$style" 2>/dev/null || continue
        LOG=lora-$style stage lora "$1" --style "$style" --minutes "$LORA_MIN" || true
    done
}

controls() {
    stage control "$1" --minutes "$CONTROL_MIN" || true
    stage ip_adapter "$1" --minutes "$PROMPT_MIN" --compile off || true
    loras "$1"
}

students() {
    local rehearsal
    rehearse turbo "$1" & rehearsal=$!
    rehearse lora "$1" --style "${STYLES[0]}" &
    if stage teacher "$1" --minutes "$PAIRS_MIN"; then # the compiler's time is in the minutes
        wait $rehearsal || true
        stage turbo "$1" --minutes "$TURBO_MIN" || true
    fi
    wait
    loras "$1"
}

train() {
    controls 0 &
    students $((GPUS > 1 ? 1 : 0)) &
    wait
}

# export_one NAME STAGE MODULE OPTION...: exports a stage that has a checkpoint, on the CPU.
export_one() {
    [ ! -f "$WORK/$2/state.pt" ] || CUDA_VISIBLE_DEVICES='' said "$PYTHON" -m "training.$3" "${COMMON[@]}" \
        --device cpu "${@:4}" >>"$WORK/export-$1.log" 2>&1 || { echo "$1 is not exported" && tail -n 5 "$WORK/export-$1.log"; }
}

# The turbo's folder has emoji-xl's index and links to its parts, which are exported for it alone and stay here.
collect() {
    local style made
    (export_one emoji-xl turbo export --only emoji-xl && export_one turbo turbo export --only emoji-xl-turbo) &
    export_one control control control --export &
    export_one ip-adapter ip_adapter ip_adapter --export &
    (for style in "${STYLES[@]}"; do export_one "lora-$style" "lora-$style" lora --style "$style" --export; done) &
    wait
    made=$(cd "$WORK/models" 2>/dev/null && ls -d emoji-xl-*) || { echo "nothing is trained yet" && return; }
    mkdir -p "$OUT/models"
    # shellcheck disable=SC2086 # names without blanks
    cp -a $(printf "$WORK/models/%s " $made) "$OUT/models/"
    ls -l "$OUT/models"
}

plan "$@"
