#!/usr/bin/env bash
# Trains emoji-z alone on one H200-class GPU in about 12 minutes, over a connection whose commands end after ten and whose
# answers hold at most eight files of 16 MB. scenes.sh and extras.sh train the other image models. Runs on the GPU machine.
#
# Before, on the machine with the network, beside the repository (neither folder is committed):
#   mkdir -p .carry/emoji && cp $DATA/emoji/* .carry/emoji/ && cp -r training pipeline models/emoji-xl/vae .carry/
#   pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl \
#       diffusers==0.42.1 importlib_metadata==10.2.0 lazy-importer==0.1.0
# Then, on the GPU machine, in the folder that holds both, with OUT set to where answers are taken from:
#   .carry/training/zimage.sh start     1st command, 9.5 minutes: installs and starts everything
#   .carry/training/zimage.sh collect   2nd command, at once behind it: watches until the end, judges, brings all back
# What came back is unpacked with: cat state.tar.part-* | tar -x -C $WORK && tar -xzf report.tgz -C $WORK, and written
# to models/ with: python -m training.export --work $WORK --only emoji-z ...
#
# Minutes:      0     0.5            2.7                 10.2      11
#   lane 1      setup | zimage_vae 2 | zimage 7.5          | export, judge
#   lane 2            | tokens, rehearsal: three steps of everything, which fill the compiler's cache for lane 1
set -euo pipefail

CARRIED=${CARRIED:-.carry}
WORK=${WORK:-/tmp/zimage}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/zimage-out}
SITE=${SITE:-/tmp/site}
VAE_MIN=${VAE_MIN:-2} MODEL_MIN=${MODEL_MIN:-7.5} REHEARSED=${REHEARSED:-17}
export PYTHONPATH=$WORK/code:$SITE:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=true TORCHINDUCTOR_CACHE_DIR=$WORK/inductor
read -ra MORE <<<"${EXTRA:-}" # more options for every stage, for a rehearsal elsewhere: EXTRA="--shape smoke --size 32"
COMMON=(--data "$WORK/data" --work "$WORK" --models "$WORK/models" --checkpoint-s 150 --variants 24 "${MORE[@]}")

setup() {
    mkdir -p "$WORK/code" "$WORK/data" "$WORK/models/emoji-xl" "$OUT"
    cp -r "$CARRIED/training" "$CARRIED/pipeline" "$WORK/code/"
    cp -r "$CARRIED/emoji" "$WORK/data/"
    cp -r "$CARRIED/vae" "$WORK/models/emoji-xl/"
    [ ! -d .whl ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$SITE" .whl/*.whl
    "$PYTHON" -c 'import torch, diffusers, transformers as t; print(torch.__version__, diffusers.__version__, t.__version__,
        torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'
}

lane1() {
    said "$PYTHON" -m training.zimage_vae "${COMMON[@]}" --minutes "$VAE_MIN"
    until [ -f "$WORK/tokens.done" ]; do sleep 1; done
    for ((waited = 0; waited < 60; waited++)); do # two at once would compile the same
        [ ! -f "$WORK/compiled.done" ] && [ ! -f "$WORK/lane2.failed" ] || break
        sleep 1
    done
    said "$PYTHON" -m training.zimage "${COMMON[@]}" --minutes "$MODEL_MIN"
    touch "$WORK/lane1.done"
}

lane2() {
    [ -f "$WORK/tokens.done" ] || said "$PYTHON" -m training.zimage_tokens "${COMMON[@]}"
    touch "$WORK/tokens.done"
    local short=("${COMMON[@]}" --work "$WORK/rehearsal")
    mkdir -p "$WORK/rehearsal"
    ln -sfn ../zimage_tokens "$WORK/rehearsal/zimage_tokens"
    said "$PYTHON" -m training.zimage_vae "${short[@]}" --iterations 1 --compile off --batch 8
    said "$PYTHON" -m training.zimage "${short[@]}" --iterations "$REHEARSED"
    touch "$WORK/compiled.done"
    said "$PYTHON" -m training.export "${short[@]}" --models "$WORK/rehearsal/models" --only emoji-z
    said "$PYTHON" -m training.judge "${short[@]}" --models "$WORK/rehearsal/models" --captions 8 --composed 8 --sheet 8
    rm -rf "$WORK/rehearsal"
    touch "$WORK/lane2.done"
}

# Says when it did what: a lane's log tells where the minutes went.
said() { echo "$(date +%T) $*" && "$@"; }

launch() { # launch LANE: starts it in its own session unless it runs, is done, or has failed in this command
    [ -f "$WORK/$1.done" ] || [ -f "$WORK/$1.failed" ] && return
    [ -f "$WORK/$1.pid" ] && kill -0 "$(cat "$WORK/$1.pid")" 2>/dev/null && return
    setsid nohup bash -c "bash '$WORK/code/training/zimage.sh' $1 || touch '$WORK/$1.failed'" >>"$WORK/$1.log" 2>&1 &
    echo $! >"$WORK/$1.pid"
}

watch() { # watch SECONDS: returns early when lane 1 is done, or one has failed
    local until=$((SECONDS + $1))
    rm -f "$WORK"/lane?.failed
    while [ $SECONDS -lt $until ]; do
        launch lane1
        launch lane2
        [ -f "$WORK/lane1.done" ] && break
        [ -f "$WORK/lane1.failed" ] || [ -f "$WORK/lane2.failed" ] && echo "a lane has failed" && break
        sleep 2
    done
    tail -qn "${TAIL:-30}" "$WORK"/lane?.log || true
    for curve in "$WORK"/zimage*/curve.jsonl; do
        [ ! -f "$curve" ] || { echo "$curve" && tail -n 1 "$curve"; }
    done
}

# The averaged weights in float32 and the codec, without optimizers and latents: 44 MB in files of 15.
SLIM='
import sys, torch
from pathlib import Path
work = Path(sys.argv[1])
state = torch.load(work / "zimage/state.pt", map_location="cpu", weights_only=True)
codec = torch.load(work / "zimage_vae/latents.pt", map_location="cpu", weights_only=True)
for name in ("zimage", "zimage_vae"):
    (work / "slim" / name).mkdir(parents=True, exist_ok=True)
torch.save({key: state[key] for key in ("averaged", "iteration", "seconds")}, work / "slim/zimage/state.pt")
torch.save({key: codec[key] for key in codec if key != "values"}, work / "slim/zimage_vae/latents.pt")
'

collect() {
    "$PYTHON" -c "$SLIM" "$WORK"
    rm -f "$OUT"/state.tar.part-*
    tar -C "$WORK/slim" -cf - zimage zimage_vae | split -b 15M -d - "$OUT/state.tar.part-"
    cd "$WORK" # Python prefers the modules of the folder that it starts in: here they must be those that trained
    report
    said "$PYTHON" -m training.export "${COMMON[@]}" --only emoji-z
    said timeout "${JUDGE_S:-100}" "$PYTHON" -m training.judge "${COMMON[@]}" --only emoji-z || echo "judge: not finished"
    report
    ls -l "$OUT"
}

# Vocabulary, curves, logs, and what is judged by then: written before that can fail, and again after it.
report() {
    mkdir -p "$WORK/judge"
    tar -C "$WORK" -czf "$OUT/report.tgz" judge zimage_tokens/tokenizer zimage/curve.jsonl zimage_vae/curve.jsonl \
        lane1.log lane2.log
}

case "${1:-}" in
    start) setup; watch "${WATCH_S:-555}"; cp "$WORK"/lane?.log "$OUT" ;;
    collect) watch "${WATCH_S:-300}"; collect ;;
    lane1 | lane2) cd "$WORK" && "$1" ;;
    *) echo "usage: $0 start | collect" >&2; exit 2 ;;
esac
