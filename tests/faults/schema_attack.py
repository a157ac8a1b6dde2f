"""Attacks text generation with JSON schemas, and draws thousands of them: `python -m tests.faults.schema_attack`.

`--count N` compiles N hostile schemas (tests/schemas.py) as a worker would: each has to be accepted, or refused by an
error that names json_schema, on a checker that lasts. `--beside` starts a service with the embedded models instead:
one tenant draws and writes, alone and beside `attack`. The exit code is 1 where something else happens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from contract.errors import Invalid
from contract.json_schema import FIELD, check_json_schema
from tests.schemas import Schema, heavy, hostile

_ANSWER_S = 300.0
_CLIENTS = 16


def body(schema: Schema, n: int = 16) -> dict[str, Any]:
    """A chat request with n answers of this schema."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"messages": [{"role": "user", "content": "a"}], "n": n, "max_tokens": 64, "response_format": form}


# Within all bounds of the contract, and beyond those of compiling: refused by the worker's checker.
COSTLY: tuple[Schema, ...] = (
    {"type": "integer", "allOf": [{"multipleOf": p} for p in (101, 103, 107, 109)]},
    {"$defs": {f"d{i}": {"type": "object", "properties": {
        name: {"$ref": f"#/$defs/d{i + 1}", "minProperties": 0} for name in "xy"}} for i in range(20)}
        | {"d20": {"type": "object"}}, "$ref": "#/$defs/d0"},
)  # fmt: skip


def attack(url: str, key: str, *, requests: int = 10) -> Counter[int]:
    """Send so many chat requests of 16 answers each at once, with a different schema of 44 KB in each, and as many
    whose schemas cannot be compiled within limits; return the statuses. Ten requests are ten times the review's attack.
    """
    schemas = [heavy(i) for i in range(requests)]
    schemas += [COSTLY[i % len(COSTLY)] | {"title": str(i)} for i in range(requests)]

    def post(schema: Schema) -> int:
        try:
            with httpx2.Client(
                base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=_ANSWER_S, trust_env=False
            ) as client:
                return client.post("/v1/chat/completions", json=body(schema)).status_code
        except httpx2.HTTPError:
            return 0

    with ThreadPoolExecutor(_CLIENTS) as pool:
        return Counter(pool.map(post, schemas))


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


def writes(client: httpx2.Client) -> bool:
    """Whether the service writes texts by now, which it does after pictures."""
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    return client.post("/v1/chat/completions", json=asked).status_code == 200


def beside(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of a tenant's requests alone and beside the attack, what the attack got, and whether all workers live."""
    from core.jobs.keyring import Keyring
    from deployment.redis import address_in
    from tests.deployment.served import ROOT, Served, wait_until
    from tests.faults.neighbours import Felt, _client, live

    unset, text = ("DIPTYCH_KERNELS", "DIPTYCH_COMPILE"), {"DIPTYCH_TEXT_MODEL": str(ROOT / "models" / "emoji-lm")}
    service = Served(folder, model=None, unset=unset, variables=text)
    try:
        service.ready()
        keyring = Keyring(address_in(folder / "data" / "redis"))
        keys = [keyring.add(name, ["images", "text"], "", "")[1] for name in ("well-behaved", "other")]
        keyring.close()
        worker = service.part("worker")
        felt = {"alone": Felt(), "beside": Felt()}
        statuses: list[Counter[int]] = []
        with _client(service.url, keys[0]) as client:
            wait_until(lambda: writes(client), "a text")
            live(client, 3, Felt())
            live(client, rounds, felt["alone"])
            thread = threading.Thread(target=lambda: statuses.append(attack(service.url, keys[1])))
            thread.start()
            while thread.is_alive():
                live(client, 1, felt["beside"])
            thread.join()
        told = {name: one.as_json() for name, one in felt.items()}
        return told | {
            "statuses": dict(statuses[0]),
            "worker": worker.is_running(),
            "lost": "stopped answering" in service.err,
        }
    finally:
        service.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.schema_attack", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000, help="hostile schemas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", type=int, metavar="ROUNDS", help="measure a service instead, so many rounds alone")
    options = parser.parse_args()
    if options.beside is None:
        print(json.dumps(fuzz(options.count, options.seed)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = beside(Path(folder), options.beside)
    print(json.dumps(result))
    sound = result["worker"] and not result["lost"] and not result["alone"]["failed"] and not result["beside"]["failed"]
    return int(not sound or not result["statuses"].keys() <= {200, 400, 429})


if __name__ == "__main__":
    sys.exit(main())
