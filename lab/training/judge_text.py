"""Evaluates `emoji-lm` and its draft: held-out perplexity, expansions that keep what was asked, agreement.

Uses the exported models through transformers' own classes.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from lab.scenes import emoji
from lab.scenes.grammar import CaptionParser
from lab.training import draft, phrases
from lab.training.phrases import Chat
from lab.training.run import TrainingRun
from lab.training.scene_chats import SceneChat, SceneExpander, keeps
from llm.drafts.dflash import DFlashNetwork

T = TypeVar("T")
CHUNK = 64
_WIDTH = 4  # tokens of a place that a tree may try
SEED = 4321  # the corpus is drawn from the run's own seed: these chats are others


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
    def perplexity(self, rows: Sequence[list[int]], starts: Sequence[int]) -> float:
        """Perplexity of a token of `rows`, of those from `starts` on."""
        nats, count = 0.0, 0
        for row, start in zip(rows, starts, strict=True):
            ids = torch.tensor([row], device=self.device)
            losses = F.cross_entropy(self.model(input_ids=ids[:, :-1]).logits[0].float(), ids[0, 1:], reduction="none")
            nats, count = nats + float(losses[start - 1 :].sum()), count + len(row) - start
        return math.exp(nats / count)

    @torch.no_grad()
    def answers(self, chats: Sequence[Chat], longest: int = 48, *, sampled: bool = False) -> list[list[int]]:
        """Answers' token ids, greedy or drawn, without the prompt, up to and with the end token."""
        tokens: list[list[int]] = []
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        for first in range(0, len(chats), CHUNK):
            prompts = [self.prompt(chat) for chat in chats[first : first + CHUNK]]
            width = max(map(len, prompts))
            ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
            options = {"do_sample": sampled, "max_new_tokens": longest, "pad_token_id": pad, "eos_token_id": end}
            options |= {"top_k": 0} if sampled else {}
            generated = self.model.generate(input_ids=ids, attention_mask=(ids != pad).long(), **options)[
                :, width:
            ].tolist()
            tokens += [row[: row.index(end) + 1] if end in row else row for row in generated]
        return tokens

    def texts(self, chats: Sequence[Chat]) -> list[str]:
        """Greedy answers."""
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.answers(chats)]

    def prompt(self, chat: Chat) -> list[int]:
        """Token ids of an exchange up to where the answer begins."""
        return self.ids(
            self.tokenizer.apply_chat_template(chat.messages(False), tokenize=False, add_generation_prompt=True)
        )

    def ids(self, text: str) -> list[int]:
        """Token ids of a text as it is."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def _new(chats: Iterator[tuple[str, T]], seen: set[str], count: int) -> list[T]:
    """`count` chats, each given after its prompt, with different prompts that are not in `seen`."""
    fresh: dict[str, T] = {}
    for prompt, chat in islice(chats, 500 * count):
        if prompt not in seen:
            fresh.setdefault(prompt, chat)
        if len(fresh) == count:
            break
    return list(fresh.values())


def held_out_chats(run: TrainingRun, count: int) -> list[Chat]:
    """Chats about single emoji with prompts that training has not drawn."""
    expander = phrases.Expander(emoji.read_rows(run.data))
    draw, generators = random.Random(SEED), random.Random(run.seed)
    seen = {expander.draw(generators).prompt for _ in range(run.shapes.chats)}
    chats = (expander.draw(draw) for _ in iter(int, 1))
    return _new(((chat.prompt, chat) for chat in chats), seen, count)


def scene_chats(run: TrainingRun, count: int, *, held_out: bool) -> tuple[list[SceneChat], CaptionParser]:
    """Scene chats with prompts that training has not drawn, of families that it draws or never does; and the reader of
    their captions.
    """
    expander = SceneExpander.read(run.data, run.size)
    seen = {scene.chat.prompt for scene in islice(expander.chats(run.seed), run.shapes.chats)}
    chats = ((scene.chat.prompt, scene) for scene in expander.chats(SEED, held_out=held_out))
    return _new(chats, seen, count), expander.composer.reader


def judge_lm(run: TrainingRun, expansions: int, model: str = "emoji-lm") -> dict[str, Any]:
    """Perplexity on held-out COCO captions and chats; the share of good expansions: of single emoji, of scenes, and of
    scenes of held-out families.
    """
    rows = emoji.read_rows(run.data)
    writer = CaptionModel(run, model)
    chats = held_out_chats(run, expansions)
    start, end = writer.tokenizer.bos_token, writer.tokenizer.eos_token
    coco = [writer.ids(f"{start}{text}{end}") for text in phrases.split(phrases.read_coco(run.data))[1]]
    prompts = [writer.prompt(chat) for chat in chats]
    full = [p + writer.ids(f"{chat.answer}{end}") for p, chat in zip(prompts, chats, strict=True)]
    figures: dict[str, Any] = {
        "coco_perplexity": writer.perplexity(coco, [1] * len(coco)),
        "captions_perplexity": writer.perplexity(full, [len(p) for p in prompts]),
    }
    answers = writer.texts(chats)
    good = [phrases.names_the_subject(c.prompt, a, rows) for c, a in zip(chats, answers, strict=True)]
    figures |= _written(run, "expansions", chats, answers, good)
    for name, held_out in (("scene_expansions", False), ("held_out_scene_expansions", True)):
        scenes, reader = scene_chats(run, expansions, held_out=held_out)
        chats = [scene.chat for scene in scenes]
        answers = writer.texts(chats)
        good = [_keeps(scene, answer, reader) for scene, answer in zip(scenes, answers, strict=True)]
        figures |= _written(run, name, chats, answers, good)
    return figures


def _keeps(scene: SceneChat, answer: str, reader: CaptionParser) -> bool:
    """Return whether the answer is a caption of the grammar of scenes that keeps what was asked."""
    try:
        return keeps(scene.truth, reader.read(answer))
    except ValueError:
        return False


def _written(
    run: TrainingRun, name: str, chats: Sequence[Chat], answers: Sequence[str], good: Sequence[bool]
) -> dict[str, Any]:
    """The share of good answers; writes all of them to `judge/NAME.txt`."""
    lines = [f"{'ok ' if g else 'BAD'} {c.prompt} -> {a}" for g, c, a in zip(good, chats, answers, strict=True)]
    (run.folder("judge") / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {name: len(good), f"{name}_good": sum(good) / len(good)}


def judge_draft(run: TrainingRun, expansions: int) -> dict[str, Any]:
    """Mean accepted lengths of the drafter's blocks along the target's greedy and sampled answers, about emoji and
    scenes: tokens for each forward of the target, its own one among them. For comparison those of trees of guesses.
    """
    target, drafter = CaptionModel(run, "emoji-lm"), draft.build(run).eval()
    drafter.load_state_dict(load_file(run.models / "emoji-lm-draft" / "model.safetensors", str(run.device)))
    figures: dict[str, Any] = {}
    most = run.shapes.draft_block - 1
    scenes, _ = scene_chats(run, expansions, held_out=False)
    for name, chats in (("", held_out_chats(run, expansions)), ("scene_", [scene.chat for scene in scenes])):
        for kind, sampled in (("greedy", False), ("sampled", True)):
            torch.manual_seed(SEED)
            written, forwards = 0, Counter[str]()
            for chat, answer in zip(chats, target.answers(chats, sampled=sampled), strict=True):
                written += len(answer) - 1  # the first token is the prompt's
                places = _places(run, target, drafter, target.prompt(chat), answer)
                forwards["accepted_length"] += _forwards(places, answer, lambda place: [place.tokens[:, 0].tolist()])
                for size in (most, 31):
                    key = f"accepted_length_of_trees_of_{size}"
                    forwards[key] += _forwards(places, answer, partial(likeliest_prefixes, size=size))
            figures |= {f"{name}{kind}_tokens": written}
            figures |= {f"{name}{kind}_{key}": written / max(1, count) for key, count in forwards.items()}
    cost = sum(weight.numel() for weight in drafter.parameters()) / target.model.num_parameters()
    return figures | {"parameters_against_target": cost}


class Place(NamedTuple):
    """The likeliest tokens of a block behind a token of an answer, and their probabilities, [guesses, _WIDTH]."""

    tokens: Tensor
    probabilities: Tensor


@torch.no_grad()
def _places(
    run: TrainingRun, target: CaptionModel, drafter: DFlashNetwork, prompt: list[int], answer: list[int]
) -> list[Place]:
    """The blocks behind each token of an answer but its last."""
    if len(answer) < 2:
        return []
    ids = torch.tensor([prompt + answer], device=run.device)
    anchors = torch.arange(len(prompt), ids.shape[1] - 1, device=run.device)[None]
    mask = target.tokenizer.pad_token_id
    states = draft.blocks(drafter, target.model, ids, anchors, run.shapes.draft_block, mask)[0, :, 1:]
    probabilities, tokens = target.model.get_output_embeddings()(states).float().softmax(-1).topk(_WIDTH, -1)
    return [Place(*place) for place in zip(tokens.cpu(), probabilities.cpu(), strict=True)]


def _forwards(places: Sequence[Place], answer: list[int], guesses: Callable[[Place], list[list[int]]]) -> int:
    """Forwards of the target that write an answer behind its first token. A guess that is its most likely token is
    accepted as often as the target draws it: so the drawn answer tells.
    """
    at = count = 0
    while at < len(answer) - 1:
        rest = answer[at + 1 :]
        at += 1 + max(_shared(path, rest) for path in guesses(places[at]))
        count += 1
    return count


def _shared(path: list[int], answer: list[int]) -> int:
    """The length of the beginning that both have."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, answer, strict=False)))


def likeliest_prefixes(place: Place, size: int) -> list[list[int]]:
    """The tree of the `size` likeliest beginnings of a block whose places are independent, as its paths."""
    tokens, logs = place.tokens.tolist(), place.probabilities.log().tolist()
    heap: list[tuple[float, list[int]]] = [(0.0, [])]
    paths: list[list[int]] = []
    while heap and len(paths) <= size:
        cost, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < len(tokens):
            for token, log in zip(tokens[len(path)], logs[len(path)], strict=True):
                heapq.heappush(heap, (cost - log, [*path, token]))
    return paths
