"""Evaluates `emoji-lm` and its draft: held-out perplexity, expansions that name the requested subject, agreement.

Uses the exported models through transformers' own classes, and n-gram baselines counted here.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import islice
from typing import Any

import torch
from torch.nn import functional as F

from training import phrases, pictures
from training.run import TrainingRun
from training.scene_captions import Reader
from training.scene_chats import SceneChat, SceneExpander, keeps

MODELS = ("emoji-lm", "emoji-lm-draft")
CHUNK = 64
SEED = 4321  # the corpus is drawn from the run's own seed: these chats are others
WEIGHTS = (0.6, 0.3, 0.1)  # trigram, bigram, unigram of the interpolated baseline


class CaptionModel:
    """An exported causal model with its tokenizer."""

    def __init__(self, run: TrainingRun, name: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = run.models / name
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model = self.model.to(run.device).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.device = run.device

    @torch.no_grad()
    def nats(self, rows: list[list[int]], starts: list[int]) -> tuple[float, int]:
        """Sum of negative log-likelihood of tokens from `starts` on, and their number."""
        total, count = 0.0, 0
        for first in range(0, len(rows), CHUNK):
            part, begin = rows[first : first + CHUNK], starts[first : first + CHUNK]
            ids = self.pad(part)
            scores = self.model(input_ids=ids[:, :-1]).logits.float()
            losses = F.cross_entropy(scores.transpose(1, 2), ids[:, 1:], reduction="none")
            for row, start, loss in zip(part, begin, losses, strict=True):
                total += float(loss[start - 1 : len(row) - 1].sum())
                count += len(row) - start
        return total, count

    def pad(self, rows: list[list[int]]) -> torch.Tensor:
        """Rows padded at the end, int64 [B, L]; a causal model does not see the padding."""
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self.device)

    @torch.no_grad()
    def answer(self, chats: list[phrases.Chat], longest: int = 48) -> list[list[int]]:
        """Greedy answers' token ids, without the prompt, up to and with the end token."""
        found = []
        for first in range(0, len(chats), CHUNK):
            prompts = [self.prompt(chat) for chat in chats[first : first + CHUNK]]
            width = max(map(len, prompts))
            pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
            ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
            made = self.model.generate(
                input_ids=ids,
                attention_mask=(ids != pad).long(),
                do_sample=False,
                max_new_tokens=longest,
                pad_token_id=pad,
                eos_token_id=end,
            )[:, width:].tolist()
            found += [row[: row.index(end) + 1] if end in row else row for row in made]
        return found

    def prompt(self, chat: phrases.Chat) -> list[int]:
        """Token ids of an exchange up to where the answer begins."""
        text = self.tokenizer.apply_chat_template(chat.messages(False), tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def held_out_chats(run: TrainingRun, count: int) -> list[phrases.Chat]:
    """Chats with prompts that training has not drawn."""
    expander = phrases.Expander(pictures.read_rows(run.data))
    draw, known = random.Random(SEED), random.Random(run.seed)
    seen = {expander.draw(known).prompt for _ in range(run.shapes.chats)}
    found: dict[str, phrases.Chat] = {}
    for _ in range(500 * count):
        chat = expander.draw(draw)
        if chat.prompt not in seen:
            found.setdefault(chat.prompt, chat)
        if len(found) == count:
            break
    return list(found.values())


def scene_chats(run: TrainingRun, count: int, *, held_out: bool) -> tuple[list[SceneChat], Reader]:
    """Scene chats with prompts that training has not drawn, of families that it draws or never does; and what reads
    their captions.
    """
    expander = SceneExpander.read(run.data, run.size)
    seen = {scene.chat.prompt for scene in islice(expander.chats(run.seed), run.shapes.chats)}
    found: dict[str, SceneChat] = {}
    for scene in islice(expander.chats(SEED, held_out=held_out), 500 * count):
        if scene.chat.prompt not in seen:
            found.setdefault(scene.chat.prompt, scene)
        if len(found) == count:
            break
    return list(found.values()), expander.composer.reader


def judge_lm(run: TrainingRun, expansions: int) -> dict[str, Any]:
    """Perplexity on held-out COCO captions and chats beside n-gram baselines; the share of good expansions: of single
    emoji, of scenes, and of scenes of held-out families.
    """
    rows = pictures.read_rows(run.data)
    writer = CaptionModel(run, "emoji-lm")
    chats = held_out_chats(run, expansions)
    coco_train, coco_held = phrases.split(phrases.read_coco(run.data))
    figures: dict[str, Any] = {}
    start, end = writer.tokenizer.bos_token, writer.tokenizer.eos_token
    train, held = ([_ids(writer, f"{start}{text}{end}") for text in part] for part in (coco_train, coco_held))
    figures |= _perplexities("coco", writer, train, held, [1] * len(held))
    expander, draw = phrases.Expander(rows), random.Random(run.seed)
    known = [expander.draw(draw) for _ in range(20_000)]
    train, held = ([_ids(writer, f"{start}{c.answer}{end}") for c in part] for part in (known, chats))
    prompts = [writer.prompt(chat) for chat in chats]
    full = [p + ids[1:] for p, ids in zip(prompts, held, strict=True)]
    figures |= _perplexities("captions", writer, train, held, [1] * len(held), full, [len(p) for p in prompts])
    answers = [writer.tokenizer.decode(ids, skip_special_tokens=True) for ids in writer.answer(chats)]
    good = [phrases.names_the_subject(c.prompt, a, rows) for c, a in zip(chats, answers, strict=True)]
    figures |= _written(run, "expansions", chats, answers, good)
    for name, held_out in (("scene_expansions", False), ("held_out_scene_expansions", True)):
        scenes, reader = scene_chats(run, expansions, held_out=held_out)
        chats = [scene.chat for scene in scenes]
        answers = [writer.tokenizer.decode(ids, skip_special_tokens=True) for ids in writer.answer(chats)]
        good = [_keeps(scene, answer, reader) for scene, answer in zip(scenes, answers, strict=True)]
        figures |= _written(run, name, chats, answers, good)
    return figures


def _keeps(scene: SceneChat, answer: str, reader: Reader) -> bool:
    """Whether the answer is a caption of the grammar of scenes that keeps what was asked."""
    try:
        return keeps(scene.asked, reader.read(answer))
    except ValueError:
        return False


def _written(
    run: TrainingRun, name: str, chats: list[phrases.Chat], answers: list[str], good: list[bool]
) -> dict[str, Any]:
    """The share of good answers; writes all of them to `judge/NAME.txt`."""
    lines = [f"{'ok ' if g else 'BAD'} {c.prompt} -> {a}" for g, c, a in zip(good, chats, answers, strict=True)]
    (run.folder("judge") / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {name: len(good), f"{name}_good": sum(good) / len(good)}


def judge_draft(run: TrainingRun, expansions: int) -> dict[str, Any]:
    """How often the draft's greedy token is the target's along the target's greedy answers, about emoji and scenes."""
    target, draft = CaptionModel(run, "emoji-lm"), CaptionModel(run, "emoji-lm-draft")
    figures: dict[str, Any] = {}
    scenes, _ = scene_chats(run, expansions, held_out=False)
    for name, chats in (("", held_out_chats(run, expansions)), ("scene_", [scene.chat for scene in scenes])):
        answers = target.answer(chats)
        same = count = 0
        with torch.no_grad():
            for chat, answer in zip(chats, answers, strict=True):
                prompt = target.prompt(chat)
                ids = torch.tensor([prompt + answer], device=run.device)
                guess = draft.model(input_ids=ids[:, :-1]).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
                same += sum(a == b for a, b in zip(guess, answer, strict=True))
                count += len(answer)
        figures |= {f"{name}greedy_tokens": count, f"{name}greedy_agreement": same / count}
    cost = draft.model.num_parameters() / target.model.num_parameters()
    return figures | {"parameters_against_target": cost}


def _perplexities(
    name: str,
    writer: CaptionModel,
    train: list[list[int]],
    held: list[list[int]],
    starts: list[int],
    full: list[list[int]] | None = None,
    full_starts: list[int] | None = None,
) -> dict[str, float]:
    """Perplexity a token of the model (given the prompt, where there is one) and of the two baselines."""
    nats, count = writer.nats(full or held, full_starts or starts)
    size = len(writer.tokenizer)
    return {
        f"{name}_perplexity": math.exp(nats / count),
        f"{name}_perplexity_trigram": ngram_perplexity(train, held, size, WEIGHTS),
        f"{name}_perplexity_unigram": ngram_perplexity(train, held, size, (0.0, 0.0, 1.0)),
    }


def ngram_perplexity(
    train: list[list[int]], held: list[list[int]], vocab: int, weights: tuple[float, float, float]
) -> float:
    """Perplexity a token of an interpolated trigram (Jelinek-Mercer), unigrams with one added to every count.

    Where a context was never seen its weight falls to the shorter one.
    """
    grams: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    contexts: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    for row in train:
        padded = [row[0], *row]
        for at in range(2, len(padded)):
            for order in range(3):
                gram = tuple(padded[at - order : at + 1])
                grams[order][gram] += 1
                contexts[order][gram[:-1]] += 1
    nats, count = 0.0, 0
    for row in held:
        padded = [row[0], *row]
        for at in range(2, len(padded)):
            share, left = 0.0, 1.0
            for order, weight in ((2, weights[0]), (1, weights[1])):
                gram = tuple(padded[at - order : at + 1])
                seen = contexts[order][gram[:-1]]
                if seen and weight:
                    share += weight * grams[order][gram] / seen
                    left -= weight
            share += left * (grams[0][(padded[at],)] + 1) / (contexts[0][()] + vocab)
            nats -= math.log(share)
            count += 1
    return math.exp(nats / count)


def _ids(writer: CaptionModel, text: str) -> list[int]:
    ids: list[int] = writer.tokenizer(text, add_special_tokens=False).input_ids
    return ids
