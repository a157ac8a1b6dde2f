#!/usr/bin/env bash
# Trains all shipped models on one H200-class GPU in about 24 minutes, over a connection whose commands end after ten
# and whose answers hold at most eight files of 16 MB. Does not know how to reach the machine: it runs on it.
#
# Before, on the machine with the network, beside the repository (neither folder is committed):
#   mkdir -p .carry/emoji .carry/coco && cp $DATA/emoji/* .carry/emoji/ && cp $DATA/coco/captions_source.tsv .carry/coco/
#   pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl \
#       diffusers==0.42.1 importlib_metadata==10.2.0 lazy-importer==0.1.0
# Together they are about 25 MB; `start` copies them and training/ to $WORK, so the later commands need neither. Then, on
# the GPU machine, in the repository's root, with OUT set to where answers are taken from and ten minutes for each:
#   training/h200.sh start     1st command: installs, starts everything; 9.5 min
#   training/h200.sh wait      2nd command: watches for 9 minutes; brings back emoji-clip, emoji-lm and emoji-lm-draft
#   training/h200.sh collect   3rd command: watches until the end, judges all, and brings back emoji-xl and the figures
# The commands must follow one another at once: the machine is given back half a minute after one ends. Training runs
# in its own process session, so it goes on between them; were it killed, `wait` starts it again from its checkpoints.
#
# Minutes:        0     1          6      8.5                    20     22    24
#   lane 1        setup | vae 5    | clip | unet 11.5            | export, judge, sheets
#   lane 2              | tokens, rehearsal 3, lm 4, draft 2 (they fill the gaps that lane 1 leaves on the GPU)
# The rehearsal takes three steps of every stage at full size: it fills the compiler's cache for lane 1, and what would
# fail at minute 9 fails at minute 3, in the first command's answer.
# What came back is unpacked with: cat small.tar.part-* | tar -x -C models/ (and the same for xl.tar), figures and sheets
# with: tar -xzf report.tgz. Cards of the small models get their figures with: python -m training.export --cards
set -euo pipefail

WORK=${WORK:-/tmp/emoji-train}
CARRIED=${CARRIED:-.carry}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/emoji-out}
SITE=${SITE:-/tmp/site}
VAE_MIN=${VAE_MIN:-5} CLIP_MIN=${CLIP_MIN:-2.3} UNET_MIN=${UNET_MIN:-11.5} LM_MIN=${LM_MIN:-4} DRAFT_MIN=${DRAFT_MIN:-2}
export PYTHONPATH=$WORK/code:$SITE:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=true TORCHINDUCTOR_CACHE_DIR=$WORK/inductor
read -ra MORE <<<"${EXTRA:-}" # more options for every stage, for a rehearsal elsewhere: EXTRA="--shape smoke --size 32"
COMMON=(--data "$WORK/data" --work "$WORK" --models "$WORK/models" --checkpoint-s 90 --variants 24 "${MORE[@]}")

setup() {
    mkdir -p "$WORK/code" "$WORK/data" "$OUT"
    cp -r training "$WORK/code/"
    cp -r "$CARRIED"/* "$WORK/data/"
    [ ! -d .whl ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$SITE" .whl/*.whl
    "$PYTHON" -c 'import torch, diffusers, transformers as t; print(torch.__version__, diffusers.__version__, t.__version__,
        torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'
}

# A stage that has spent its minutes returns at once, so that starting a lane again only does what is left.
lane1() {
    "$PYTHON" -m training.vae "${COMMON[@]}" --minutes "$VAE_MIN"
    [ -f "$WORK/latents/latents.pt" ] || "$PYTHON" -m training.latents "${COMMON[@]}"
    until [ -f "$WORK/tokens.done" ]; do sleep 1; done
    "$PYTHON" -m training.clip "${COMMON[@]}" --minutes "$CLIP_MIN"
    "$PYTHON" -m training.unet "${COMMON[@]}" --minutes "$UNET_MIN"
    touch "$WORK/lane1.done"
}

lane2() {
    [ -f "$WORK/tokens.done" ] || "$PYTHON" -m training.tokens "${COMMON[@]}"
    touch "$WORK/tokens.done"
    if [ ! -f "$WORK/rehearsal.done" ]; then
        mkdir -p "$WORK/rehearsal"
        ln -sfn ../tokens "$WORK/rehearsal/tokens"
        "$PYTHON" -m training.all "${COMMON[@]}" --work "$WORK/rehearsal" --iterations 3 --only vae latents clip unet lm draft
        touch "$WORK/rehearsal.done"
        rm -rf "$WORK/rehearsal"
    fi
    "$PYTHON" -m training.lm "${COMMON[@]}" --minutes "$LM_MIN"
    "$PYTHON" -m training.draft "${COMMON[@]}" --minutes "$DRAFT_MIN"
    touch "$WORK/lane2.done"
}

launch() { # launch LANE: starts it in its own session unless it runs, is done, or has failed in this command
    [ -f "$WORK/$1.done" ] || [ -f "$WORK/$1.failed" ] && return
    [ -f "$WORK/$1.pid" ] && kill -0 "$(cat "$WORK/$1.pid")" 2>/dev/null && return
    setsid nohup bash -c "bash '$WORK/code/training/h200.sh' $1 || touch '$WORK/$1.failed'" >>"$WORK/$1.log" 2>&1 &
    echo $! >"$WORK/$1.pid"
}

watch() { # watch SECONDS: returns early when both lanes are done, or one has failed
    local until=$((SECONDS + $1))
    rm -f "$WORK"/lane?.failed
    while [ $SECONDS -lt $until ]; do
        launch lane1
        launch lane2
        [ -f "$WORK/lane1.done" ] && [ -f "$WORK/lane2.done" ] && break
        [ -f "$WORK/lane1.failed" ] || [ -f "$WORK/lane2.failed" ] && echo "a lane has failed" && break
        sleep 5
    done
    tail -qn "${TAIL:-25}" "$WORK"/lane?.log || true
    for curve in "$WORK"/*/curve.jsonl; do
        [ ! -f "$curve" ] || { echo "$curve" && tail -n 1 "$curve"; }
    done
}

# All models together are 66 MiB, an answer holds 64: they go back in two. Weights do not compress.
pack() { # pack NAME FOLDER...: one archive, cut into files of 15 MiB
    tar -C "$WORK/models" -cf - "${@:2}" | split -b 15M -d - "$OUT/$1.tar.part-"
}

bring_small() {
    "$PYTHON" -m training.export "${COMMON[@]}" --only emoji-clip emoji-lm emoji-lm-draft
    pack small emoji-clip emoji-lm emoji-lm-draft
}

collect() {
    "$PYTHON" -m training.export "${COMMON[@]}"
    timeout "${JUDGE_S:-150}" "$PYTHON" -m training.judge "${COMMON[@]}" || echo "judge: not finished"
    "$PYTHON" -m training.export "${COMMON[@]}" --cards
    pack xl emoji-xl
    (cd "$WORK" && tar -czf "$OUT/report.tgz" judge ./*/curve.jsonl ./*.log)
    ls -l "$OUT"
}

case "${1:-}" in
    start) setup; watch "${WATCH_S:-540}" ;;
    wait) watch "${WATCH_S:-530}"; bring_small ;;
    collect) watch "${WATCH_S:-300}"; collect ;;
    lane1 | lane2) cd "$WORK" && "$1" ;;
    *) echo "usage: $0 start | wait | collect" >&2; exit 2 ;;
esac
