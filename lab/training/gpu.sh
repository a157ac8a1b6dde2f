#!/usr/bin/env bash
# What plans such as scenes.sh share; they source it. Each has functions `setup`; `train`, which runs in the
# background; and `collect`, which writes what is trained so far into OUT. All run in the repository's root, with a Python
# that has torch for CUDA, transformers and diffusers. DATA has emoji/ and coco/; MODELS are the models to begin with.
#
#   lab/training/NAME.sh begin    starts the training in the background
#   lab/training/NAME.sh watch    shows the logs' ends and collects what is trained, once all is or after WATCH_S seconds

DATA=${DATA:-data}
MODELS=${MODELS:-models}
WORK=${WORK:-build/training}
OUT=${OUT:-$WORK/out}
PYTHON=${PYTHON:-python3}
WATCH_S=${WATCH_S:-540}
GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l || true)}
PLAN=$(basename "$0" .sh)
export PYTHONPATH=$PWD:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
read -ra MORE <<<"${EXTRA:-}" # more options for every stage, for a rehearsal elsewhere: EXTRA="--shape smoke --size 32"
COMMON=(--data "$DATA" --work "$WORK" --models "$WORK/models" --checkpoint-s 60 --variants 24 "${MORE[@]}")

# Says when it did what: a lane's log tells where the minutes went.
said() { echo "$(date +%T) $*" && "$@"; }

# stage NAME GPU OPTION...: trains it on one GPU, with its log in LOG or NAME.log. Fails where the stage does.
stage() {
    local log="$WORK/${LOG:-$1}.log"
    CUDA_VISIBLE_DEVICES=$2 said "$PYTHON" -m "lab.training.$1" "${COMMON[@]}" "${@:3}" >>"$log" 2>&1 ||
        { echo "${LOG:-$1} failed" && tail -n 30 "$log" && return 1; }
}

# Starts the plan in the background; `begun` is when this began, in seconds since the epoch.
begin() {
    begun=$(date +%s)
    export begun
    mkdir -p "$WORK" "$OUT"
    setup
    rm -f "$WORK/$PLAN.done"
    setsid --fork "$0" train >"$WORK/$PLAN.log" 2>&1 </dev/null
}

# Collects what is trained so far every time: what is in OUT outlives a machine that is lost.
watch() {
    local until=$(($(date +%s) + WATCH_S)) curve done=""
    while [ ! -f "$WORK/$PLAN.done" ] && [ "$(date +%s)" -lt $until ]; do sleep 2; done
    [ ! -f "$WORK/$PLAN.done" ] || done=yes # what ends from here on is collected the next time
    cat "$WORK/$PLAN.log"
    for curve in "$WORK"/*/curve.jsonl; do
        [ ! -f "$curve" ] || { echo "$curve" && tail -n 1 "$curve"; }
    done
    collect
    (cd "$WORK" && tar -czf "$OUT/report.tgz" ./*/curve.jsonl ./*.log) || true # files that grow meanwhile
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
