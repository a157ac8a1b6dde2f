"""The family of all pipelines of diffusers that no native family reads: a request runs in diffusers' own loop.

A request's call runs on a thread of its own that stops after every step (`loop.py`) until the engine starts the next
one, so that the runner (`runner.py`) has iterations as a native family's has. What the class of the pipeline takes
(`signature.py`) is what the model offers.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pipeline.checkpoints import folder as folders
from pipeline.families import registry

LOOP = "diffusers"
"""The name of the loop in cards and fingerprints."""

NOTICE = (
    "runs by diffusers' own loop; a native family would also have steps of several requests in one forward, DeepCache, "
    "INT8 and FP8 kernels, and LoRAs, control networks and image prompts by request"
)


def find(name: str) -> Path | None:
    """Return the folder of a pipeline of diffusers that no native family reads; None for any other model.

    Of a hub id only configs are downloaded. Raises `ModelError` for a name that leads to no model.
    """
    if registry.seeded(name) is not None:
        return None
    folder = folders.find_configs(name)
    index = folders.read_json(folder / "model_index.json")
    class_name = index.get("_class_name")
    if registry.native(index) or not isinstance(class_name, str) or find_spec("diffusers") is None:
        return None
    import diffusers

    # Names of the lazy module: nothing of a pipeline is imported.
    return folder if class_name.endswith("Pipeline") and class_name in dir(diffusers) else None
