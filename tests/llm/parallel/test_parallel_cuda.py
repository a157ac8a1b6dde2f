"""The fused decoder of ranks against that of one process: in Triton's interpreter, ranks as threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.interpreted import CUDA

# isort: split
from contract.parallel import parse
from core.kernels.kv_cache import TokenBatch
from llm.backends.fused import FusedBackend
from llm.parallel.ranks import RankGroup, open_store
from llm.parallel.shards import Rank, shard_
from tests.llm.backends.test_cuda import fused, model_of

pytestmark = pytest.mark.skipif(CUDA, reason="ranks are threads of one process, on a CPU")
STEPS = [([5, 6, 8], [0, 1, 0], [0, 0, 1]), ([-1], [2], [0])]


def batch(step: tuple[list[int], list[int], list[int]], *, logits: bool = True) -> TokenBatch:
    rows = TokenBatch.of(*step, [i for i, s in enumerate(step[2]) if i + 1 == len(step[2]) or step[2][i + 1] != s])
    return TokenBatch(rows.tokens, rows.positions, rows.sequences, rows.output_rows, logits=logits)


def results(run: FusedBackend) -> list[Tensor | None]:
    """Logits of a step that reads prompts, and tokens of one that decodes, after the tokens that the first gave."""
    logits = run.forward(batch(STEPS[0])).logits.clone()
    best = run.forward(batch(STEPS[1], logits=False)).best
    return [logits, None if best is None else best.clone()]


@pytest.mark.quick("tp2-int8")
@pytest.mark.parametrize(("parallel", "kind"), [("tp2", "int8"), ("pp2", "plain")])
def test_ranks_give_the_logits_of_one_process(parallel: str, kind: str) -> None:
    expected = results(fused(model_of(kind)))
    split, store = parse(parallel), open_store()
    models = [model_of(kind) for _ in range(split.ranks)]

    def run(number: int) -> list[Tensor | None]:
        rank, model = Rank(number, split), models[number]
        shard_(model.network, rank)
        group = RankGroup(rank, torch.device("cpu"), store if number == 0 else store.port)
        execution = fused(model, group=group)
        if split.pipeline == 1:
            return results(execution)
        known = expected[0]
        assert known is not None
        decoding = (known.argmax(-1).tolist()[:1], *STEPS[1][1:])  # a first stage has no latest tokens
        logits = execution.forward(batch(STEPS[0])).logits.clone()
        return [logits, execution.forward(batch(decoding, logits=False)).best]

    with ThreadPoolExecutor(split.ranks) as pool:
        logits, best = next(iter([*pool.map(run, range(split.ranks))]))
    assert logits is not None and best is not None and expected[0] is not None and expected[1] is not None
    torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=1e-4 * float(expected[0].abs().max()))
    assert torch.equal(best, expected[1])
