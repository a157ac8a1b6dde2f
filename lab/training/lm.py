"""Stage `lm`: a Llama that expands short prompts into captions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lab.scenes import emoji
from lab.training import loop, phrases, tokens
from lab.training.run import TrainingRun, command
from lab.training.scene_chats import SceneExpander

LENGTH = 72  # tokens in a row; longer rows are dropped, which is under one in a hundred
# 4,500 captions are soon known by heart: at a share of 0.3 they were read 230 times in four minutes of a GPU, and
# held-out ones became less likely than by counting words. A few a step, with words missing, teach without that.
COCO_SHARE = 1 / 64
COCO_WEIGHT = 0.2
COCO_BLANKS = 0.2


@dataclass(frozen=True)
class Corpus:
    """Token rows [N, LENGTH], padded; `said` marks the tokens to be predicted: answers, and all of COCO's words."""

    chats: Tensor
    chats_said: Tensor
    coco: Tensor
    coco_said: Tensor


def build(run: TrainingRun) -> Any:
    """A fresh model on the run's device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokens.lm_tokenizer(run)
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    torch.manual_seed(run.seed)
    # Rows rounded up to the shape's vocabulary: a small corpus may not have filled it.
    model: Any = LlamaForCausalLM(LlamaConfig(**run.shapes.llama(run.shapes.lm, run.shapes.lm_vocab, *ids)))
    return model.to(run.device)


def corpus(run: TrainingRun, count: int) -> Corpus:
    """Draw `count` chats about single emoji and as many about scenes; reads the training part of COCO. Tokenized."""
    rows = emoji.read_rows(run.data)
    tokenizer = tokens.lm_tokenizer(run)
    expander, draw = phrases.Expander(rows), random.Random(run.seed)
    chats = [expander.draw(draw) for _ in range(count)]
    scenes = SceneExpander.read(run.data, run.size).chats(run.seed)
    chats += [scene.chat for scene in islice(scenes, count)]
    heads = [
        tokenizer.apply_chat_template(c.messages(False), tokenize=False, add_generation_prompt=True) for c in chats
    ]
    tails = [f"{c.answer}{tokenizer.eos_token}" for c in chats]
    coco, _ = phrases.split(phrases.read_coco(run.data))
    starts = [tokenizer.bos_token] * len(coco)
    return Corpus(*_table(tokenizer, heads, tails), *_table(tokenizer, starts, [c + tokenizer.eos_token for c in coco]))


def _table(tokenizer: Any, heads: list[str], tails: list[str]) -> tuple[Tensor, Tensor]:
    before = tokenizer(heads, add_special_tokens=False).input_ids
    after = tokenizer(tails, add_special_tokens=False).input_ids
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if len(a) + len(b) <= LENGTH]
    ids = torch.full((len(pairs), LENGTH), tokenizer.pad_token_id, dtype=torch.int16)
    answer_mask = torch.zeros(len(pairs), LENGTH, dtype=torch.bool)
    for number, (a, b) in enumerate(pairs):
        ids[number, : len(a) + len(b)] = torch.tensor([*a, *b], dtype=torch.int16)
        answer_mask[number, len(a) : len(a) + len(b)] = True
    return ids, answer_mask


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the model on the corpus."""
    model = build(run)
    loop.begin("lm", {"lm": model}, run)
    return fit(run, "lm", model)


def fit(
    run: TrainingRun, name: str, model: Any, teacher: Any = None, *, rate: float = 2e-3, coco_share: float = COCO_SHARE,
    constrain: Callable[[], None] = lambda: None,
) -> loop.StageOutcome:  # fmt: skip
    """Train a model on the corpus, or on a teacher's distributions over it; `constrain` comes before each step."""
    data = corpus(run, run.shapes.chats)
    chats, chats_said = data.chats.to(run.device), data.chats_said.to(run.device)
    coco, coco_said = data.coco.to(run.device), data.coco_said.to(run.device)
    bodies = [(run.compiled(network.model), network.lm_head) for network in (model, teacher) if network is not None]
    batch = run.batch or (256 if run.on_gpu else 32)
    talk = batch - max(1, int(batch * coco_share))

    def loss(_: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        constrain()
        factory = loop.factory(generator)
        chat_rows = torch.randint(len(chats), (talk,), **factory)
        two = torch.randint(len(coco), (batch - talk,), **factory)
        ids = torch.cat([chats[chat_rows], coco[two]]).long()
        answer_mask = torch.cat([chats_said[chat_rows], coco_said[two]])
        # Input words of COCO rows give way to random ones (word dropout, Bowman et al. 2016); targets stay.
        seen = ids.clone()
        blank = torch.rand(batch - talk, LENGTH, **factory) < COCO_BLANKS
        blank[:, 0] = False
        words = torch.randint(run.shapes.lm_vocab, (batch - talk, LENGTH), **factory)
        seen[talk:] = torch.where(blank, words, seen[talk:])
        if not run.compile:  # rows are padded at the end, and a causal model cannot see there
            width = int(answer_mask.any(0).nonzero().max()) + 1
            ids, answer_mask, seen = ids[:, :width], answer_mask[:, :width], seen[:, :width]
        mask, true = answer_mask[:, 1:], ids[:, 1:][answer_mask[:, 1:]]

        def predict(body: Any, head: Any) -> Tensor:
            """Logits [n, V] of the tokens to be predicted alone."""
            with run.autocast():
                logits: Tensor = head(body(input_ids=seen[:, :-1], use_cache=False).last_hidden_state[mask])
            return logits.float()

        scores = predict(*bodies[0])
        nats, of_chats = F.cross_entropy(scores, true, reduction="none"), int(mask[:talk].sum())
        talked, read = nats[:of_chats].mean(), nats[of_chats:].mean()
        total = (1 - COCO_WEIGHT) * talked + COCO_WEIGHT * read
        logged = {"nats": talked.detach(), "nats_coco": read.detach()}
        if teacher is not None:
            with torch.no_grad():
                target = predict(*bodies[1])
            logged["agrees"] = (scores.argmax(-1) == target.argmax(-1)).float().mean()
            divergence = F.kl_div(
                scores.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean"
            )
            total = divergence + 0.1 * total
        return total, logged

    stage = loop.Stage(name, {"lm": model}, loss, rate=run.rate(rate, name), decay=0.05, warmup=50, average=0.998)
    return loop.train(stage, run)


def load(run: TrainingRun) -> Any:
    """The trained model; raises `FileNotFoundError` when it is not trained."""
    return loop.load_average("lm", {"lm": build(run)}, run)


if __name__ == "__main__":
    command(__doc__, train)
