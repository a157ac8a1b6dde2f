"""What the nodes use of ComfyUI, with its behaviour (0.3.64): it loads the folder, checks inputs, and runs nodes."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.deployment.served import ROOT

FOLDER = ROOT / "integrations" / "comfyui"
MODULE = "custom_nodes_diptych"  # ComfyUI names it by its path
SAMPLER = "DiptychSampler"
WIDGETS = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}


class Interrupted(Exception):
    """Stands for `InterruptProcessingException`."""


class Host:
    """A ComfyUI without nodes of its own, as long as the monkeypatch lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.progress: list[tuple[int, int]] = []
        self.previews: list[Image.Image] = []
        self.texts: list[tuple[str, str]] = []
        self.noticed = threading.Event()  # a look at the stop button that raised
        self._interrupt, self._lock = False, threading.Lock()
        self._stand_in(monkeypatch)
        for name in [name for name in sys.modules if name.startswith(MODULE)]:
            monkeypatch.delitem(sys.modules, name)
        spec = importlib.util.spec_from_file_location(MODULE, FOLDER / "__init__.py")
        assert spec is not None and spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, MODULE, self.module)
        spec.loader.exec_module(self.module)
        self.nodes: dict[str, type] = self.module.NODE_CLASS_MAPPINGS
        self.error: type[Exception] = self.part("service").DiptychError
        self.services: Path  # the file of configured services

    @staticmethod
    def part(name: str) -> Any:
        return sys.modules[f"{MODULE}.{name}"]

    def _stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = self

        class ProgressBar:
            def __init__(self, total: int, node_id: str | None = None) -> None:
                self.total = total

            def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
                host._throw_exception_if_processing_interrupted()
                self.total = self.total if total is None else total
                host.progress.append((min(value, self.total), self.total))
                if preview is not None:
                    form, picture, side = preview
                    assert form in ("JPEG", "PNG") and isinstance(side, int)
                    host.previews.append(picture)

        prompt_server = types.SimpleNamespace(
            client_id="me", send_progress_text=lambda text, node, sid=None: host.texts.append((node, text))
        )
        modules = {
            "comfy": {},
            "comfy.utils": {"ProgressBar": ProgressBar},
            "comfy.model_management": {
                "InterruptProcessingException": Interrupted,
                "throw_exception_if_processing_interrupted": self._throw_exception_if_processing_interrupted,
            },
            "server": {"PromptServer": types.SimpleNamespace(instance=prompt_server)},
        }  # type: dict[str, dict[str, Any]]
        for name, members in modules.items():
            module = types.ModuleType(name)
            module.__dict__.update(members)
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)

    # -- the stop button -------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        with self._lock:
            self._interrupt = True

    def _throw_exception_if_processing_interrupted(self) -> None:
        with self._lock:
            if self._interrupt:
                self._interrupt = False
                self.noticed.set()
                raise Interrupted

    # -- a node ----------------------------------------------------------------------------------------------------

    def inputs(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """A node's inputs as the page fills them in, checked as ComfyUI does. Raises `ValueError`."""
        node = self.nodes[name]
        schema = node.INPUT_TYPES()  # type: ignore[attr-defined]
        assert set(schema) <= {"required", "optional", "hidden"}
        check: Callable[..., Any] | None = getattr(node, "VALIDATE_INPUTS", None)
        checked = [] if check is None else inspect.getfullargspec(check).args
        values: dict[str, Any] = {key: "7" for key, kind in schema.get("hidden", {}).items() if kind == "UNIQUE_ID"}
        declared = schema["required"] | schema.get("optional", {})
        if unknown := given.keys() - declared.keys():
            raise ValueError(f"no inputs: {unknown}")
        for key, (kind, *rest) in declared.items():
            options = rest[0] if rest else {}
            widget = isinstance(kind, list) or kind in WIDGETS
            if key in given:
                values[key] = given[key]
            elif widget:
                values[key] = kind[0] if isinstance(kind, list) else options["default"]
            elif key in schema["required"]:
                raise ValueError(f"{key}: is missing")
            else:
                continue
            if widget and isinstance(kind, str):
                values[key] = WIDGETS[kind](values[key])
            if widget and key not in checked:
                if not options.get("min", values[key]) <= values[key] <= options.get("max", values[key]):
                    raise ValueError(f"{key}: beyond its bounds")
                if isinstance(kind, list) and values[key] not in kind:
                    raise ValueError(f"{key}: not in list")
        if check is not None:
            answer = check(**{key: values[key] for key in checked if key in values})
            if answer is not True:
                raise ValueError(str(answer))
        return values

    def run(self, name: str, **given: Any) -> tuple[Any, ...]:
        return self.run_all((name, given))[0]

    def draw(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        """The images of the sampler, and the facts of their job."""
        images, info = self.run(SAMPLER, **{"prompt": "a cat", **given})
        return images, json.loads(info)

    def choices(self, name: str) -> dict[str, Any]:
        """What a node's required inputs may be, or of which type they are."""
        return {key: kind[0] for key, kind in self.nodes[name].INPUT_TYPES()["required"].items()}  # type: ignore[attr-defined]

    def run_all(self, *calls: tuple[str, Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        """The outputs of several nodes of a workflow, which run at once where they are async. The first error ends
        the workflow: the loop that ends cancels the others.
        """

        async def work() -> list[tuple[Any, ...]]:
            tasks = []
            for name, given in calls:
                node = self.nodes[name]
                function = getattr(node(), node.FUNCTION)  # type: ignore[attr-defined]
                inputs = self.inputs(name, given)
                tasks.append(asyncio.ensure_future(_call(function, inputs)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            return [task.result() for task in tasks]

        outputs = asyncio.run(work())
        for (name, _), output in zip(calls, outputs, strict=True):
            assert isinstance(output, tuple) and len(output) == len(self.nodes[name].RETURN_TYPES)  # type: ignore[attr-defined]
        return outputs


async def _call(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    output = function(**inputs)
    return await output if isinstance(output, Coroutine) else output
