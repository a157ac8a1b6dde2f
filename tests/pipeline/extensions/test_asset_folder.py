"""Folders of files that requests name: what is in memory is found at once, and a file that changed is read anew."""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from contract.offered import check_offered
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import weight_files
from pipeline.extensions.asset_cache import ReadFile
from pipeline.extensions.asset_folder import AssetFolder, stamp_of
from pipeline.extensions.weight_files import PICKLE
from pipeline.text.textual_inversion import words


class Files(AssetFolder[bytes]):
    """Files of at most a kibibyte, two of them in memory; `begun` is called before one is read."""

    kind = "file"

    def __init__(self, folder: Path, begun: Callable[[str], None] = lambda name: None) -> None:
        super().__init__(folder, 2, most_bytes=2**10)
        self._begun = begun

    def _read(self, key: str) -> ReadFile[bytes]:
        self._begun(key)
        return ReadFile(self._data(key), key, 1)


def write(folder: Path, name: str, text: str = "") -> bytes:
    data = save({}, {"text": text or name})
    (folder / f"{name}.safetensors").write_bytes(data)
    return data


def test_what_cannot_be_offered_is_logged_once_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("Detail Tweaker XL (v2)", "线稿", "plain.v1"):
        write(tmp_path, name)
    refused = {"a, b": "has ','", "a:b": "has ':'", "-x": "begins with", "\u202ex": "not printable", "y" * 129: "129"}
    for name in refused:
        write(tmp_path, name)
    (tmp_path / "old.ckpt").write_bytes(b"")
    (tmp_path / "loud.SAFETENSORS").write_bytes(b"")
    (tmp_path / ".hidden.safetensors").write_bytes(b"")
    (tmp_path / "styles").mkdir()
    write(tmp_path / "styles", "ink")
    files = Files(tmp_path)
    assert files.asset_names() == files.asset_names() == ["Detail Tweaker XL (v2)", "plain.v1", "线稿"]
    reasons = {record.args[0]: record.args[1] for record in caplog.records}  # type: ignore[index]
    assert len(caplog.records) == len(reasons) == len(refused) + 3
    assert all(any(reason in said for said in reasons.values()) for reason in refused.values()), reasons
    assert "is a pickle" in reasons[str(tmp_path / "old.ckpt")]
    assert "ends in .SAFETENSORS" in reasons[str(tmp_path / "loud.SAFETENSORS")]
    assert reasons[str(tmp_path / "styles")] == "only files right in the folder are"
    assert files.find("Detail Tweaker XL (v2)").name == "Detail Tweaker XL (v2)"


@pytest.mark.parametrize("name", ["café", "ガラス", "각", "Å (v2)"])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_are_listed_and_found_in_their_normal_form(name: str, form: Any, tmp_path: Path) -> None:
    """Whatever form the file system has: some write NFD."""
    spelling = unicodedata.normalize(form, name)
    data = write(tmp_path, spelling)
    files = Files(tmp_path)
    assert files.asset_names() == [unicodedata.normalize("NFC", name)]
    for asked in (name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)):
        check_offered("file", asked, files.asset_names())
        assert files.get(asked) == data
    assert [path.stem for path in tmp_path.iterdir()] == [spelling]
    assert words(files.asset_names()).search(f"a {spelling} at night")  # type: ignore[union-attr]


def test_a_listing_compares_each_entry_a_few_times(tmp_path: Path) -> None:
    """Not each with each: workers list their folders again and again beside drawing."""
    compared = []

    class Counted(type(tmp_path)):  # type: ignore[misc]
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return bool(super().__eq__(other))

        __hash__ = type(tmp_path).__hash__

    for number in range(200):
        (tmp_path / f"{number}.safetensors").touch()
    assert len(weight_files.offered(Counted(tmp_path))) == 200 and len(compared) <= 5 * 200


def test_a_file_in_memory_is_found_while_another_is_read(tmp_path: Path) -> None:
    """By the thread that computes, among others: it never waits for a file that another request needs."""
    kept, slow = (write(tmp_path, name) for name in ("kept", "slow"))
    begun, go_on, reads = threading.Event(), threading.Event(), list[str]()

    def reading(name: str) -> None:
        reads.append(name)
        if name == "slow":
            begun.set()
            assert go_on.wait(60)

    files = Files(tmp_path, reading)
    assert files.get("kept") == kept
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(files.get, "slow") for _ in range(2)]
        assert begun.wait(60)
        try:
            assert pool.submit(files.get, "kept").result(60) == kept
        finally:
            go_on.set()
        assert [file.result(60) for file in waiting] == [slow, slow]
    assert reads == ["kept", "slow"] and [*files.held] == ["kept", "slow"]


def test_a_file_that_is_written_over_is_read_anew(tmp_path: Path) -> None:
    """Of the same size, in the same place."""
    files = Files(tmp_path)
    for time, text in enumerate(("one", "two")):
        data = write(tmp_path, "it", text)
        os.utime(tmp_path / "it.safetensors", ns=(0, time))
        assert files.get("it") == data


def test_what_is_wrong_with_a_file_is_told_with_its_name_as_data(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(b"\x80\x04.")
    (tmp_path / "large.safetensors").write_bytes(bytes(2**11))
    (tmp_path / "cut.safetensors").write_bytes(b"cut")
    for name, reason in (
        ("old", f"old.pt {PICKLE}"),
        ("large", "large.safetensors is no file of at most 0 MiB"),
        ("gone", "there is no gone.safetensors in the folder"),
        ("cut", "cut.safetensors is damaged or cut short"),
    ):
        for _ in range(2):  # the second time as remembered
            with pytest.raises(ModelError) as caught:
                Files(tmp_path).find(name)
            assert caught.value.kind == "file" and caught.value.detail.startswith(f"{name}: {reason}")
            assert str(caught.value) == f"file {caught.value.detail}"


def test_a_stamp_changes_with_any_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_text("1")
    (tmp_path / "b").write_text("2")
    seen = [stamp_of(tmp_path / "a", tmp_path / "b")]
    for path, text in ((tmp_path / "a" / "one", "11"), (tmp_path / "b", "22"), (tmp_path / "a" / "two", "3")):
        path.write_text(text)
        seen.append(stamp_of(tmp_path / "a", tmp_path / "b"))
    assert len({*seen}) == len(seen) and stamp_of(tmp_path / "b") == stamp_of(tmp_path / "b")
