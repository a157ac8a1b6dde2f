#!/usr/bin/env bash
# Trains emoji-xl and emoji-clip on scenes, on one H200-class GPU, in commands of at most ten minutes that resume one
# another while the machine is held. Begins where the packed models ended, so that a later session resumes an earlier one.
# Does not know how to reach the machine: it runs on it.
#
# Before, on the machine with the models, beside the repository's code (neither folder is committed):
#   mkdir -p .carry/emoji && cp $DATA/emoji/* .carry/emoji/; cp -r $DATA/coco .carry/
#   python -m training.start --data $DATA --work /tmp/start --models models --pack .carry/start.pt      # 27 MiB
# and in .whl/ diffusers, importlib_metadata and lazy-importer as wheels (see h200.sh). Then, on the GPU machine, in the
# repository's root, with OUT set to where answers are taken from:
#   training/scenes.sh run       again and again, until it says that all is trained: each returns after SLICE_S seconds
#   training/scenes.sh collect   exports, judges, and brings back emoji-xl, emoji-clip and the figures
# What came back is unpacked with: cat xl.tar.part-* | tar -x -C models/, and tar -xzf report.tgz. Other stages take their
# minutes from VAE_MIN, CLIP_MIN and UNET_MIN. In the last session of several the learning rate falls to zero; sessions
# before it are ended early by `collect`, which exports the averaged weights as they are.
#
# Lanes:        setup, rehearsal | vae -> latents -> unet
#                                | clip (beside the vae)
set -euo pipefail

CARRIED=${CARRIED:-.carry}
WORK=${WORK:-/tmp/scenes}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/scenes-out}
SITE=${SITE:-/tmp/site}
VAE_MIN=${VAE_MIN:-5} CLIP_MIN=${CLIP_MIN:-5} UNET_MIN=${UNET_MIN:-14} SLICE_S=${SLICE_S:-525} COUNT=${COUNT:-300}
export PYTHONPATH=$PWD:$SITE:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
read -ra MORE <<<"${EXTRA:-}" # more options for every stage, for a rehearsal elsewhere: EXTRA="--shape smoke --size 32"
COMMON=(--data "$CARRIED" --work "$WORK" --models "$WORK/models" --checkpoint-s 60 --variants 24 "${MORE[@]}")

# Says when it did what: a lane's log tells where the minutes went.
said() { echo "$(date +%T) $*" && "$@"; }

# The seconds that this command still has, as minutes for --slice; a stage that has none is left to the next command.
left() { "$PYTHON" -c "print(max(0.0, ($SLICE_S - $SECONDS) / 60))"; }

setup() {
    mkdir -p "$WORK" "$OUT"
    [ ! -d .whl ] || [ -d "$SITE/diffusers" ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile \
        --no-cache-dir --upgrade --target "$SITE" .whl/*.whl
    [ -f "$WORK/tokens/lm/tokenizer.json" ] || said "$PYTHON" -m training.tokens "${COMMON[@]}"
    [ ! -f "$CARRIED/start.pt" ] || [ -f "$WORK/start/unet.pt" ] ||
        said "$PYTHON" -m training.start "${COMMON[@]}" --from "$CARRIED/start.pt"
}

# Three steps of every stage as it will run, but uncompiled: what would fail late fails early.
rehearse() {
    [ ! -f "$WORK/rehearsal.done" ] || return 0
    local short=("${COMMON[@]}" --work "$WORK/rehearsal" --iterations 3 --compile off)
    mkdir -p "$WORK/rehearsal"
    ln -sfn ../tokens "$WORK/rehearsal/tokens"
    ln -sfn ../start "$WORK/rehearsal/start"
    said "$PYTHON" -m training.vae "${short[@]}"
    said "$PYTHON" -m training.latents "${short[@]}"
    said "$PYTHON" -m training.clip "${short[@]}"
    said "$PYTHON" -m training.unet "${short[@]}"
    rm -rf "$WORK/rehearsal"
    touch "$WORK/rehearsal.done"
}

clip() { said "$PYTHON" -m training.clip "${COMMON[@]}" --minutes "$CLIP_MIN" --slice "$(left)"; }

# Trains what is left for as long as this command has.
train() {
    clip >>"$WORK/clip.log" 2>&1 &
    local beside=$! vae
    vae=$(said "$PYTHON" -m training.vae "${COMMON[@]}" --minutes "$VAE_MIN" --slice "$(left)" | tee -a "$WORK/lane.log")
    case "$vae" in *done=True*)
        [ -f "$WORK/latents/latents.pt" ] || said "$PYTHON" -m training.latents "${COMMON[@]}"
        # Without a start the towers are clip's.
        [ -f "$WORK/start/unet.pt" ] || wait $beside
        said "$PYTHON" -m training.unet "${COMMON[@]}" --minutes "$UNET_MIN" --slice "$(left)" | tee -a "$WORK/lane.log"
        ;;
    esac
    wait $beside || { echo "clip failed" && tail -20 "$WORK/clip.log"; }
    for curve in "$WORK"/*/curve.jsonl; do
        [ ! -f "$curve" ] || { echo "$curve" && tail -n 1 "$curve"; }
    done
    tail -n 1 "$WORK/clip.log" "$WORK/lane.log" | grep -q done=False || echo "all is trained"
}

collect() {
    said "$PYTHON" -m training.export "${COMMON[@]}" --only emoji-xl emoji-clip
    tar -C "$WORK/models" -cf - emoji-xl emoji-clip | split -b 15M -d - "$OUT/xl.tar.part-"
    said timeout "${JUDGE_S:-400}" "$PYTHON" -m training.judge_scenes "${COMMON[@]}" --count "$COUNT" || echo "judge: no end"
    (cd "$WORK" && tar -czf "$OUT/report.tgz" ./judge ./*/curve.jsonl ./*.log)
    ls -l "$OUT"
}

case "${1:-}" in
    run) setup; rehearse >>"$WORK/rehearsal.log" 2>&1 || { tail -30 "$WORK/rehearsal.log"; exit 1; }; train ;;
    collect) mkdir -p "$OUT"; collect ;;
    *) echo "usage: $0 run | collect" >&2; exit 2 ;;
esac
