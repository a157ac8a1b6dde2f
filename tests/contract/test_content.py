"""Results of jobs some of whose images were refused, as records have them and as they are read."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from contract.content import as_recorded, images_of


@given(st.lists(st.booleans(), max_size=10))
def test_older_apis_find_a_file_of_each_image_and_newer_ones_all_images_in_order(shown: list[bool]) -> None:
    images = [{"seed": k, "warnings": [], **({"key": f"{k}"} if kept else {})} for k, kept in enumerate(shown)]
    result = {"images": images, "deepcache": "off"}
    record = json.loads(json.dumps(as_recorded(result)))
    assert [image["key"] for image in record["images"]] == [f"{k}" for k, kept in enumerate(shown) if kept]
    assert record == result or not all(shown)
    read = images_of(record)
    assert [{name: value for name, value in image.items() if name != "index"} for image in read] == images


def test_results_without_images_stay_as_they_are() -> None:
    assert as_recorded({"choices": []}) == {"choices": []} and images_of({"choices": []}) == images_of({}) == []
