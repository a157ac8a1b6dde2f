"""What is done with a finished picture that the service's checker of contents flags, and by whose word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from contract.errors import Invalid

Action = Literal["off", "tag", "blur", "refuse"]
ACTIONS: tuple[str, ...] = get_args(Action)
"""From the laxest: pictures are not checked; a flagged one is told to be; is blurred; is not kept."""
HIDING = ("blur", "refuse")
"""Those that hide what a flagged picture shows, and so allow no previews."""
REFUSED = "content_policy_violation"  # OpenAI's code


def action_of(service: str, key: str, request: str) -> str:
    """The action for a request: the key's in place of the service's, in either direction, as whoever runs the service
    decides; a request may only ask for a stricter one. "" where a key or a request says nothing. Raises `Invalid`.
    """
    actions = (key or service, request or ACTIONS[0])
    if not {*actions} <= {*ACTIONS}:  # a newer version's
        raise Invalid("checker", f"must be one of {', '.join(ACTIONS)}")
    return max(actions, key=ACTIONS.index)


def as_recorded(result: Mapping[str, Any]) -> dict[str, Any]:
    """A job's result as its record has it: images without a key, which were refused, are apart, each with its `index`,
    so that APIs of older versions, which look for a file of each image, show the others.
    """
    images = [{**image, "index": k} for k, image in enumerate(result.get("images", []))]
    if not (refused := [image for image in images if "key" not in image]):
        return {**result}
    return {**result, "images": [image for image in result["images"] if "key" in image], "refused": refused}


def images_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The images of a recorded result, in the order of their seeds."""
    images = [*result.get("images", [])]
    for image in result.get("refused", []):  # in order
        images.insert(image["index"], image)
    return images


def read_labels(text: str) -> Mapping[str, float]:
    """The labels of a classifier that flag a picture, and above which score: "nsfw:0.5,porn:0.3". Raises ValueError."""
    labels: dict[str, float] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        label, _, threshold = item.rpartition(":")
        try:
            labels[label.strip()] = float(threshold)
        except ValueError:
            labels[""] = 0.0
        if not all(labels) or not 0 <= labels[label.strip()] < 1:
            raise ValueError("must look like nsfw:0.5,porn:0.3, with scores from 0 to below 1")
    return labels
