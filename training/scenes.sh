#!/usr/bin/env bash
# Trains emoji-xl and emoji-clip on scenes, on one H200-class GPU, in commands of at most ten minutes that resume one
# another while the machine is held. Begins where the packed models ended, so that a later session resumes an earlier one.
# Does not know how to reach the machine: it runs on it.
#
# Before, on the machine with the models, beside the repository's code (neither folder is committed; 58 MB together):
#   mkdir -p .carry/emoji && cp $DATA/emoji/* .carry/emoji/; cp -r $DATA/coco .carry/
#   python -m training.start --data $DATA --work /tmp/start --models models --pack .carry/start.pt      # 27 MiB
#   pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl \
#       diffusers==0.42.1 importlib_metadata==10.2.0 lazy-importer==0.1.0 \
#       pydantic==2.14.3 pydantic_core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5
# Of the code contract/, core/, evaluation/, llm/, pipeline/, training/ and unet_opt/ are used, 2 MB, and no models/.
# Then, on the GPU machine, in the repository's root, with OUT set to where answers are taken from:
#   training/scenes.sh run       again and again, until it says that all is trained; each ends SLICE_S seconds after it
#                                began, or a minute later where that is in the middle of compiling: allow 600
#   training/scenes.sh collect   exports, judges, and brings back emoji-xl, emoji-clip and the figures: allow JUDGE_S + 120
# What came back is unpacked with: cat xl.tar.part-* | tar -x -C models/, and tar -xzf report.tgz. Every `run` also brings
# kept.tar.part-*: unpacked into a WORK with tokens it is exported there as after `collect`.
#
# Stages take VAE_MIN, CLIP_MIN and UNET_MIN minutes, compiling included. As set here a session is three `run`s and one
# `collect` and holds the machine for about 26 minutes: setup and rehearsal 3, vae 5, latents 0.5, unet 10, start-up of
# three commands 1.5, export 1, judge 4, fetching and spare 1. The learning rate falls to zero in a stage's last third: a
# session that was cut off before that is ended by `collect`, which exports the averaged weights as they are.
#
# Lanes:        setup, rehearsal | vae -> latents -> unet
#                                | clip (beside the vae)
set -euo pipefail

CARRIED=${CARRIED:-.carry}
WORK=${WORK:-/tmp/scenes}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/scenes-out}
SITE=${SITE:-/tmp/site}
VAE_MIN=${VAE_MIN:-5} CLIP_MIN=${CLIP_MIN:-5} UNET_MIN=${UNET_MIN:-10}
SLICE_S=${SLICE_S:-500} COUNT=${COUNT:-150} JUDGE_S=${JUDGE_S:-240}
UNTIL=$(($(date +%s) + SLICE_S))
export PYTHONPATH=$PWD:$SITE:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
read -ra MORE <<<"${EXTRA:-}" # more options for every stage, for a rehearsal elsewhere: EXTRA="--shape smoke --size 32"
COMMON=(--data "$CARRIED" --work "$WORK" --models "$WORK/models" --checkpoint-s 60 --variants 24 "${MORE[@]}")

# Says when it did what: a lane's log tells where the minutes went.
said() { echo "$(date +%T) $*" && "$@"; }

setup() {
    mkdir -p "$WORK" "$OUT"
    [ ! -d .whl ] || [ -d "$SITE/diffusers" ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile \
        --no-cache-dir --upgrade --target "$SITE" .whl/*.whl
    [ -f "$WORK/tokens/lm/tokenizer.json" ] || said "$PYTHON" -m training.tokens "${COMMON[@]}"
    [ ! -f "$CARRIED/start.pt" ] || [ -f "$WORK/start/unet.pt" ] ||
        said "$PYTHON" -m training.start "${COMMON[@]}" --from "$CARRIED/start.pt"
}

# Three steps of every stage as it will run, but uncompiled: what would fail late fails early. errexit is off in what is
# followed by ||, as this is: && ends it at the first failure.
rehearse() {
    [ ! -f "$WORK/rehearsal.done" ] || return 0
    local short=("${COMMON[@]}" --work "$WORK/rehearsal" --iterations 3 --compile off)
    mkdir -p "$WORK/rehearsal" &&
        ln -sfn ../tokens "$WORK/rehearsal/tokens" &&
        ln -sfn ../start "$WORK/rehearsal/start" &&
        said "$PYTHON" -m training.vae "${short[@]}" &&
        said "$PYTHON" -m training.latents "${short[@]}" &&
        said "$PYTHON" -m training.clip "${short[@]}" &&
        said "$PYTHON" -m training.unet "${short[@]}" &&
        rm -rf "$WORK/rehearsal" &&
        touch "$WORK/rehearsal.done"
}

# stage NAME MINUTES: trains it until its minutes or this command's time are over. What is trained is marked, so that later
# commands do not start it to find that out; more minutes are another mark. Fails where the stage does.
stage() {
    local log=$WORK/$1.log
    [ ! -f "$WORK/$1-$2.done" ] || return 0
    said "$PYTHON" -m "training.$1" "${COMMON[@]}" --minutes "$2" --until "$UNTIL" >>"$log" 2>&1 ||
        { echo "$1 failed" && tail -n 30 "$log" && return 1; }
    ! grep ^Outcome "$log" | tail -n 1 | grep -q done=True || touch "$WORK/$1-$2.done"
}

# Vae, latents, unet: each when the one before it is done.
pictures() { # pictures PID: of clip, whose towers the unet takes where it has no start
    stage vae "$VAE_MIN" || return 1
    [ -f "$WORK/vae-$VAE_MIN.done" ] || return 0
    [ "$WORK/latents/latents.pt" -nt "$WORK/vae/state.pt" ] || said "$PYTHON" -m training.latents "${COMMON[@]}" || return 1
    if [ ! -f "$WORK/start/unet.pt" ]; then
        wait "$1" || return 1
        [ -f "$WORK/clip-$CLIP_MIN.done" ] || return 0
    fi
    if [ "$(date +%s)" -ge $((UNTIL - 30)) ]; then
        echo "unet: not begun, in 30 seconds it would only start up; run again"
    else
        stage unet "$UNET_MIN"
    fi
}

# Trains what is left for as long as this command has.
train() {
    local failed=0
    stage clip "$CLIP_MIN" &
    local beside=$!
    pictures $beside || failed=1
    wait $beside || failed=1
    for curve in "$WORK"/*/curve.jsonl; do
        [ ! -f "$curve" ] || { echo "$curve" && tail -n 1 "$curve"; }
    done
    keep
    [ $failed = 0 ] || return 1
    [ ! -f "$WORK/vae-$VAE_MIN.done" ] || [ ! -f "$WORK/clip-$CLIP_MIN.done" ] || [ ! -f "$WORK/unet-$UNET_MIN.done" ] ||
        echo "all is trained"
}

# Brings the averaged weights back after every command: the machine may be lost before the next one.
keep() {
    said "$PYTHON" -m training.start "${COMMON[@]}" --keep "$WORK/kept"
    tar -C "$WORK/kept" -cf - . | split -b 15M -d - "$OUT/kept.tar.part-"
}

collect() {
    said "$PYTHON" -m training.export "${COMMON[@]}" --only emoji-xl emoji-clip
    tar -C "$WORK/models" -cf - emoji-xl emoji-clip | split -b 15M -d - "$OUT/xl.tar.part-"
    # Figures are written after each kind of prompts: the judge may be ended early.
    said timeout "$JUDGE_S" "$PYTHON" -m training.judge_scenes "${COMMON[@]}" --count "$COUNT" || echo "judge: no end"
    (cd "$WORK" && mkdir -p judge && tar -czf "$OUT/report.tgz" ./judge ./*/curve.jsonl ./*.log)
    ls -l "$OUT"
}

case "${1:-}" in
    run) setup; rehearse >>"$WORK/rehearsal.log" 2>&1 || { tail -30 "$WORK/rehearsal.log"; exit 1; }; train ;;
    collect) mkdir -p "$OUT"; collect ;;
    *) echo "usage: $0 run | collect" >&2; exit 2 ;;
esac
