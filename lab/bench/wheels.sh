#!/bin/bash
# Downloads into .whl the wheels that gpu.sh needs on a GPU machine without a network that has Python 3.12, torch,
# Triton and transformers. Versions are those of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/../.."
names="diffusers pytest pluggy iniconfig hypothesis sortedcontainers rich markdown-it-py mdurl pygments
  pydantic pydantic-core pydantic-settings python-dotenv annotated-types typing-inspection"
pins=$(for name in $names; do grep -iE "^$name==" constraints.txt | cut -d' ' -f1; done)
[ "$(wc -w <<< "$pins")" = "$(wc -w <<< "$names")" ] || { echo "constraints.txt lacks one of: $names" >&2; exit 1; }
platforms=$(printf -- "--platform manylinux%s_x86_64 " _2_28 _2_27 _2_17 2014 1)
mkdir -p .whl && rm -f .whl/*.whl  # two versions of one package would stop the whole install
# shellcheck disable=SC2086
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $platforms -d .whl $pins
ls .whl && du -sh .whl
