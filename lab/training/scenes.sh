#!/usr/bin/env bash
# Trains emoji-xl and emoji-clip on scenes, on one or two H100- or H200-class GPUs, from the weights in MODELS; gpu.sh says
# how to call it: `TRAIN_S=1530 lab/training/scenes.sh begin` starts the training, which ends TRAIN_S seconds later. `watch` leaves
# averaged weights in OUT/kept. Laid over a WORK with tokens/, on any machine, they become models with:
#   python -m lab.training.export --data $DATA --work WORK --models models --only emoji-xl emoji-clip
# With DENOISER=yes codec and emoji-clip stay as they are, and all the time is the unet's.
#
# Seconds:    0      30                      270                                          TRAIN_S
#   GPU 0     setup | clip, rehearsal of unet |  unet, data-parallel                       |
#   GPU 1           | vae                     |  (first minutes beside it: tiny_vae)       |
# With one GPU all lanes share it. The rehearsal takes three steps of the unet: what would fail late fails early.
set -euo pipefail

VAE_MIN=${VAE_MIN:-3.8} CLIP_MIN=${CLIP_MIN:-3.8} TINY_MIN=${TINY_MIN:-1.8}
TRAIN_S=${TRAIN_S:-1530} ROWS=${ROWS:-1024}
. "$(dirname "$0")/gpu.sh"

setup() {
    [ -f "$WORK/tokens/lm/tokenizer.json" ] || said "$PYTHON" -m lab.training.tokens "${COMMON[@]}"
    [ -f "$WORK/start/unet.pt" ] || said "$PYTHON" -m lab.training.start "${COMMON[@]}" --models "$MODELS" ${DENOISER:+--denoiser}
}

# unet OPTION...: on all GPUs. A step of 384 rows keeps the host busy for 0.25 s, compiled or not (launches of 10 us each, a
# third of them Muon's), and a GPU for 0.06 s: many rows are free, and compiling, which takes two minutes a size, is not.
unet() {
    if [ "$GPUS" -gt 1 ]; then
        said "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" -m lab.training.unet \
            "${COMMON[@]}" --batch "$ROWS" --compile off "$@"
    else
        said "$PYTHON" -m lab.training.unet "${COMMON[@]}" --batch "$ROWS" --compile off "$@"
    fi
}

# Three steps of the unet as it will run, on the codec and the towers that training starts from. errexit is off in what is
# followed by ||: && ends it at the first failure.
rehearse() {
    local short=(--work "$WORK/rehearsal")
    mkdir -p "$WORK/rehearsal" &&
        ln -sfn ../tokens "$WORK/rehearsal/tokens" &&
        ln -sfn ../start "$WORK/rehearsal/start" &&
        said "$PYTHON" -m lab.training.vae "${COMMON[@]}" "${short[@]}" --iterations 1 --compile off &&
        said "$PYTHON" -m lab.training.latents "${COMMON[@]}" "${short[@]}" &&
        unet "${short[@]}" --iterations 3 &&
        rm -rf "$WORK/rehearsal"
}

# unet_until BEGUN: for all that is left of TRAIN_S.
unet_until() {
    unet --minutes "$(awk "BEGIN { print ($1 + $TRAIN_S - $(date +%s) - 15) / 60 }")" >>"$WORK/unet.log" 2>&1
}

denoise() {
    unet_until "$1" || { echo "unet failed, goes on with one GPU" && tail -n 30 "$WORK/unet.log" && GPUS=1 unet_until "$1"; }
}

# All lanes; `begun` is when this began, in seconds since the epoch.
train() {
    local last=$((GPUS > 1 ? 1 : 0)) begun=$1 clip rehearsal vae=0
    if [ -f "$WORK/latents/latents.pt" ]; then
        denoise "$begun"
        return
    fi
    stage clip 0 --minutes "$CLIP_MIN" & clip=$!
    rehearse >"$WORK/rehearsal.log" 2>&1 & rehearsal=$!
    stage vae $last --minutes "$VAE_MIN" || vae=1
    wait $clip || echo "emoji-clip stays as it was"
    wait $rehearsal || { echo "rehearsal failed" && tail -n 30 "$WORK/rehearsal.log"; }
    [ $vae = 0 ] || return 1
    said "$PYTHON" -m lab.training.latents "${COMMON[@]}" || return 1
    stage tiny_vae $last --minutes "$TINY_MIN" &
    denoise "$begun"
    wait
}

# The averaged weights.
collect() {
    mkdir -p "$OUT/kept"
    said "$PYTHON" -m lab.training.start "${COMMON[@]}" --keep "$OUT/kept"
}

plan "$@"
