#!/bin/bash
# Measures every configuration of emoji-xl for docs/quality.md, on captions of families that training never saw, and draws
# the page's strip. Each part goes on where it was stopped. 450 captions, 300 of them judged, take some 40 minutes on two
# cores.
#   bash lab/training/ways.sh DATA [CAPTIONS [JUDGED]]        in the repository's root; WORK keeps what the parts leave
set -euo pipefail
data=$1 captions=${2:-450} judged=${3:-300} work=${WORK:-build/ways} python=${PYTHON:-.venv/bin/python}
# One thread: arrays of 128 pixels are too small for two, which would wait for each other most of the time.
training=(--data "$data" --work "$work/training" --variants 24 --threads 1 --unseen)
mkdir -p "$work/training"
if [ ! -f "$work/halves.txt" ]; then
  "$python" -m lab.training.scene_prompts "${training[@]}" --count $((captions / 3)) --out "$work/unseen.tsv" \
    --real "$work/real" > "$work/halves.part"
  mv "$work/halves.part" "$work/halves.txt"
fi
"$python" -m lab.bench.ways draw --work "$work" ${THREADS:+--threads "$THREADS"}
rest=()
judge() { "$python" -m cli evaluate scenes "$@" --data "$data" --threads 1 --count $((judged / 3)); }
for name in $("$python" -m lab.bench.ways names); do
  run=$work/runs/$name found=$work/runs/$name/scenes.json
  if [ -f "$found" ] && [ ! "$run/pictures.jsonl" -nt "$found" ]; then continue; fi
  if [ "$name" = int8 ]; then judge "$run" --again "$work/runs/int8-seeds" --real "$work/real"; else rest+=("$run"); fi
done
if [ ${#rest[@]} -gt 0 ]; then judge "${rest[@]}"; fi
"$python" -m lab.training.sheet $("$python" -m lab.bench.ways names | sed "s|^|$work/runs/|") docs/quality.png
"$python" -m lab.bench.ways collect --work "$work"
"$python" -m lab.bench.figures
