#!/usr/bin/env bash
# What the plans for the GPU machine share (scenes.sh, extras.sh); they source it. A plan has functions `setup`; `train`,
# which runs in the background; and `bring`, which writes into OUT what is trained so far.

CARRIED=${CARRIED:-.carry}
WORK=${WORK:-/tmp/scenes}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/scenes-out}
SITE=${SITE:-/tmp/site}
WATCH_S=${WATCH_S:-540}
GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l || true)}
PLAN=$(basename "$0" .sh)
export PYTHONPATH=$PWD:$SITE:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
read -ra MORE <<<"${EXTRA:-}" # more options for every stage, for a rehearsal elsewhere: EXTRA="--shape smoke --size 32"
COMMON=(--data "$CARRIED" --work "$WORK" --models "$WORK/models" --checkpoint-s 60 --variants 24 "${MORE[@]}")

# Says when it did what: a lane's log tells where the minutes went.
said() { echo "$(date +%T) $*" && "$@"; }

# Wheels beside the machine's own packages, and the folders.
install() {
    mkdir -p "$WORK" "$OUT"
    [ ! -d .whl ] || [ -d "$SITE/diffusers" ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile \
        --no-cache-dir --upgrade --target "$SITE" .whl/*.whl
}

# stage NAME GPU OPTION...: trains it on one GPU, with its log in LOG or NAME.log. Fails where the stage does.
stage() {
    local log="$WORK/${LOG:-$1}.log"
    CUDA_VISIBLE_DEVICES=$2 said "$PYTHON" -m "training.$1" "${COMMON[@]}" "${@:3}" >>"$log" 2>&1 ||
        { echo "${LOG:-$1} failed" && tail -n 30 "$log" && return 1; }
}

# Starts the plan in the background; `begun` is when this began, in seconds since the epoch.
begin() {
    begun=$(date +%s)
    export begun
    setup
    rm -f "$WORK/$PLAN.done"
    setsid --fork "$0" train >"$WORK/$PLAN.log" 2>&1 </dev/null
}

# Brings what is trained so far with every command: the machine may be lost before the next one.
watch() {
    local until=$(($(date +%s) + WATCH_S)) curve done=""
    mkdir -p "$OUT"
    while [ ! -f "$WORK/$PLAN.done" ] && [ "$(date +%s)" -lt $until ]; do sleep 2; done
    [ ! -f "$WORK/$PLAN.done" ] || done=yes # what ends from here on is for the next command
    cat "$WORK/$PLAN.log"
    for curve in "$WORK"/*/curve.jsonl; do
        [ ! -f "$curve" ] || { echo "$curve" && tail -n 1 "$curve"; }
    done
    bring
    (cd "$WORK" && tar -czf "$OUT/report.tgz" ./*/curve.jsonl ./*.log) || true # what grows meanwhile
    [ -z "$done" ] || echo "all is trained"
}

# plan COMMAND
plan() {
    case "${1:-}" in
        begin) begin ;;
        train) train "$begun" || echo "training failed"; touch "$WORK/$PLAN.done" ;;
        watch) watch ;;
        *) echo "usage: $0 begin | watch" >&2; exit 2 ;;
    esac
}
