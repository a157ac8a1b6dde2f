"""Compiles thousands of hostile JSON schemas as a worker would: `python -m tests.faults.schema_attack --count 3000`.

Each schema (tests/schemas.py) has to be accepted, or refused by an error that names json_schema, on a checker that
lasts. `python -m tests.faults.attacks G4` attacks a running service with such schemas.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter

from contract.errors import Invalid
from contract.json_schema import FIELD, check_json_schema
from tests.schemas import hostile


def fuzz(count: int, seed: int) -> Counter[str]:
    """What became of so many hostile schemas. Raises any error but `Invalid` naming the field."""
    from llm.constrain import GrammarCompiler
    from tests.llm import stage

    model = stage.small()
    compiler, ends = GrammarCompiler(model.tokenizer, model.vocabulary, sorted(model.ends)), Counter[str]()
    draw = random.Random(seed)
    try:
        for _ in range(count):
            schema = hostile(draw)
            try:
                text = check_json_schema(schema)
                compiler.compile(text).matcher().allowed()
                ends["accepted"] += 1
            except Invalid as error:
                assert error.field == FIELD and str(error).isprintable() and len(str(error)) < 300, (schema, error)
                ends["refused"] += 1
                if "to compile" in error.message:
                    ends["refused by the limits of compiling"] += 1
    finally:
        compiler.close()
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.schema_attack", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000, help="hostile schemas")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(fuzz(options.count, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
