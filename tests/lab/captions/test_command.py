"""`diptych captions` through the real engine: equal files at any width, after any kill, of any kind of model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import EMBEDDED_MODEL
from evaluation import captions
from lab.captions import caption_client, caption_filter
from lab.captions.caption_file import CaptionFile, CaptionRow
from lab.training import phrases
from lab.training.captions import COLOURS
from llm.families import tiny
from tests.cli.shell import Shell
from tests.deployment.served import ready
from workers.stages import expansion

WORDS = ("a", "red", "green", "small", "old", "fox", "tree", "house", "boat", "in", "near", "snow", "water", "light")


def write(shell: Shell, out: str, count: int, *words: str) -> bytes:
    said = shell.done("captions", "--count", str(count), "--out", out, "--threads", "1", *words)
    assert said.out == f"{out}\n" and f"{count} captions of " in said.err
    return (shell.folder / out).read_bytes()


@pytest.mark.long
def test_the_embedded_model_writes_what_its_picture_model_draws(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same captions at every width of batches; other seeds, other captions; nothing twice."""
    files = {}
    for width, count in (("1", 12), ("5", 12), ("64", 90)):  # a shorter file is a beginning of a longer one
        monkeypatch.setenv("DIPTYCH_TEXT_REQUESTS", width)
        files[width] = write(shell, f"w{width}.tsv", count)
    assert files["1"] == files["5"] and files["64"].startswith(files["1"])
    found = captions.read(shell.folder / "w64.tsv")
    assert [one.id for one in found] == [f"{k:05d}" for k in range(90)]
    assert len({"".join(one.text.split()).casefold() for one in found}) == 90
    told = json.loads((shell.folder / "w64.tsv.json").read_text("utf-8"))
    assert told["written_by"]["model"] == "emoji-lm" and len(told["rows"]) == told["captions"] == 90
    assert told["again"].get("duplicate", 0) > 0  # so that what is made again is a part of this
    # In the picture model's language, nearly all of them, and of many subjects.
    read = [match for one in found if (match := re.fullmatch(r"(.+) on an? ([a-z ]+) background", one.text))]
    assert len(read) > 81 and len({match[1] for match in read}) > 67
    assert len({match[2] for match in read} & {*COLOURS}) > 4
    sieve = caption_filter.CaptionFilter(caption_filter.tokenizers(str(EMBEDDED_MODEL)))
    assert all(sieve.wrong(one.text, complete=True) is None for one in found)
    write(shell, "other.tsv", 24, "--seed", "1")
    other = {one.text for one in captions.read(shell.folder / "other.tsv")}
    assert len(other & {one.text for one in found}) < 12


def test_a_stopped_command_ends_with_the_file_of_an_unbroken_one(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C amid its work; what a kill leaves is in tests/lab/captions."""
    count, words = 40, ["captions", "--count", "40", "--out", "broken.tsv", "--threads", "1"]
    monkeypatch.setenv("DIPTYCH_TEXT_REQUESTS", "4")
    with monkeypatch.context() as patch:

        def add(file: CaptionFile, row: CaptionRow, usual: Callable[..., None] = CaptionFile.add) -> None:
            usual(file, row)
            if len(file.rows) == 20:
                raise KeyboardInterrupt

        patch.setattr(CaptionFile, "add", add)
        said = shell(*words)
    assert said.code == 130 and "stopped: 20 of 40 captions are there; the same command goes on" in said.err, said
    assert not (shell.folder / "broken.tsv").exists()

    said = shell.done(*words)
    assert f"20 of {count} captions are there" in said.err, said
    write(shell, "whole.tsv", count)
    for end in ("", ".json"):
        broken, whole = ((shell.folder / f"{name}.tsv{end}").read_bytes() for name in ("broken", "whole"))
        assert broken == whole
    assert {path.name for path in shell.folder.glob("broken*")} == {"broken.tsv", "broken.tsv.json"}
    again = shell.done(*words)
    assert f"{count} captions of" in again.err
    other = shell(*words, "--seed", "1")
    assert other.code == 2 and "broken.tsv holds captions of other settings" in other.err
    assert "seed is 0 there, 1 here" in other.err


def small(folder: Path, chat: bool) -> Path:
    """A Llama with random weights whose tokens are words: what it writes means nothing, and can be drawn."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    network, _ = tiny.make(tiny.LlamaShape(vocabulary=len(vocabulary)))
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", unk_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        additional_special_tokens=special[3:], model_max_length=512,
    )  # fmt: skip
    if chat:
        words.chat_template = (
            "{{ bos_token }}{% for message in messages %}{{ '<|user|>' + message['content'] + '<|end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        )
    network.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.mark.quick("True")
@pytest.mark.parametrize("chat", [True, False])
def test_any_llama_writes(chat: bool, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(small(shell.folder / "words", chat))
    whole = write(shell, "a.tsv", 20, "--text-model", model)
    monkeypatch.setenv("DIPTYCH_TEXT_REQUESTS", "2")
    assert write(shell, "b.tsv", 20, "--text-model", model) == whole
    found = captions.read(shell.folder / "a.tsv")
    assert {word for one in found for word in one.text.split()} <= set(WORDS) and len(found) == 20
    rows = [line.split("\t") for line in whole.decode().splitlines()[1:]]
    assert [row[3] for row in rows] == [caption_client.theme_of(int(row[2])) for row in rows]
    template = shell.save("t.txt", "a small {subject} near")
    asked = ["--text-model", model, "--template", template, "--subjects", shell.save("s.txt", "fox\nboat\n")]
    assert write(shell, "t.tsv", 4, *asked) != write(shell, "u.tsv", 4, "--text-model", model, *asked[4:])


def test_each_kind_of_model_is_asked_in_its_own_way() -> None:
    embedded = caption_client.CaptionClient(phrases.SYSTEM, chat=True, seed=0, subjects=["a cat"])
    (question,) = {embedded.first(row, 0).messages for row in range(3)}
    assert question == (("system", phrases.SYSTEM), ("user", "a cat"))
    assert embedded.temperature == expansion.TEMPERATURE
    free = caption_client.CaptionClient(phrases.SYSTEM, chat=True, seed=0)
    idea = free.first(0, 0)
    caption = free.then(idea, "a cat")
    assert idea.idea and caption is not None and caption.messages == question and caption.seed == idea.seed
    chat = caption_client.CaptionClient("", chat=True, seed=0, subjects=["a {subject}"]).first(0, 0)
    assert len(chat.messages) == 1 and chat.messages[0][1].endswith("The picture shows: a {subject}")
    plain = caption_client.CaptionClient("", chat=False, seed=0, subjects=["a cat"]).first(0, 0)
    assert plain.prompt is not None and plain.prompt.endswith("Subject: a cat\nCaption:")
    assert plain.fields()["stop"] == ["\n"] and "messages" not in plain.fields()


def test_what_cannot_be_made_is_counted_and_told(shell: Shell) -> None:
    """A greedy model says of one subject one thing: the second row has nothing of its own."""
    subjects = shell.save("s.txt", "fox\n")
    words = ["captions", "--count", "2", "--subjects", subjects, "--temperature", "0", "--attempts", "3"]
    for _ in range(2):  # and the finished file tells the same
        said = shell(*words, "--out", "c.tsv")
        assert said.code == 1 and "1 captions of 4 answers: 3 were there already" in said.err, said
        assert "00001 about 'fox'" in said.err and "c.tsv.json lists them" in said.err
    assert len(captions.read(shell.folder / "c.tsv")) == 1
    assert json.loads((shell.folder / "c.tsv.json").read_text("utf-8"))["missing"] == [1]


def test_a_model_that_writes_no_captions_is_given_up(shell: Shell) -> None:
    said = shell("captions", "--count", "2", "--out", "c.tsv", "--attempts", "2", "--max-tokens", "2")
    assert said.code == 1 and "no valid caption was generated: of 4 answers" in said.err and "--max-tokens" in said.err
    assert not (shell.folder / "c.tsv").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--count 0", "--count: must be between 1 and 1000000, not 0"),
        ("--seed -1", "--seed: must be between 0"),
        ("--temperature nan", "--temperature: must be between 0 and 2, not nan"),
        ("--top-p 0", "--top-p: must be more than 0"),
        ("--max-tokens 300 --subjects fine.txt", "--max-tokens: "),
        ("--out c.txt", "--out: must end in .tsv"),
        ("--out mine.tsv", "--out: mine.tsv is there, and was not written by this command"),
        ("--out fine.txt/c.tsv", "--out: fine.txt cannot be written"),
        ("--subjects gone.txt", "--subjects: gone.txt: cannot be read"),
        ("--subjects gap.txt", "--subjects: gap.txt: row 2 is empty"),
        ("--subjects gap.tsv", "--subjects: gap.tsv: row 3 has an empty caption"),
        ("--subjects token.txt", "--subjects: token.txt: row 2: a content holds one of the model's control"),
        ("--template gone.txt", "--template: gone.txt: cannot be read"),
        ("--template empty.txt", "--template: empty.txt: is empty"),
        ("--template fine.txt", "--template: fine.txt: has no {subject}"),
        ("--text-model gone", "text: gone: no such folder"),
        ("--text-model off", "--text-model: not set"),
        ("--key k", "--key: is for --server"),
    ],
)
def test_what_cannot_be_used_is_named(words: str, said: str, shell: Shell) -> None:
    shell.save("mine.tsv", "id\tcaption\n1\tmine\n")
    shell.save("fine.txt", "fox\n")
    shell.save("empty.txt", "")
    shell.save("gap.txt", "fox\n\nhen\n")
    shell.save("gap.tsv", "id\tcaption\n1\tfox\n2\t \n")

    shell.save("token.txt", "fox\na <|user|>\n")
    before = sorted(shell.folder.iterdir())
    found = shell("captions", "--count", "3", "--out", "c.tsv", *words.split())
    assert found.code == 2 and found.out == "" and said in found.err.strip().splitlines()[-1], found
    assert sorted(shell.folder.iterdir()) == before


def test_a_service_that_is_none_is_named(shell: Shell) -> None:
    for url, said in ("ftp://x", "must begin with http"), ("http://127.0.0.1:1", "no service answers"):
        refused = shell("captions", "--count", "2", "--out", "no.tsv", "--server", url)
        assert refused.code == 1 and f"--server: {url}: {said}" in refused.err, refused
    assert not list(shell.folder.glob("no.tsv*"))


@pytest.mark.long
def test_a_service_writes_the_captions_that_the_command_writes_by_itself(shell: Shell, tmp_path: Path) -> None:
    whole = write(shell, "here.tsv", 20)
    with ready(tmp_path / "served", unset=("DIPTYCH_TEXT_MODEL",)) as service:
        assert write(shell, "there.tsv", 20, "--server", service.url) == whole
        refused = shell("captions", "--count", "2", "--out", "no.tsv", "--server", service.url, "--text-model", "x")
    assert refused.code == 1 and "no text model x; there: " in refused.err
    assert not list(shell.folder.glob("no.tsv*"))
