"""Settings: read once from the environment (DIPTYCH_*), checked, and passed down.

Knows names, types and defaults; nothing below it reads the environment.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "models" / "emoji-xl"
STAND_IN_MODEL = "random:emoji-xl"  # the embedded model's shape with random weights, where it is not installed
_OTHERS = {"DIPTYCH_TORCH_INDEX"}  # read by install.py, before anything is installed

log = logging.getLogger(__name__)


class SettingsError(ValueError):
    """Settings that cannot be used. The message names each variable."""


class Settings(BaseSettings):
    """What a process of Diptych can be told. `DIPTYCH_MODEL=…` sets `model`, and so on."""

    model_config = SettingsConfigDict(env_prefix="DIPTYCH_", extra="ignore", frozen=True)

    model: str = Field(default="", description="a folder in diffusers' format or a hub id; empty: the embedded model")
    variant: str | None = Field(default=None, description="of the weight files, such as fp16")
    precision: Literal["fp32", "bf16", "fp16", "int8", "fp8"] = "fp32"
    unet: str = Field(default="", description="a quantized UNet's folder; empty: the model's own unet-int8 or unet-fp8")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads of one forward; 0: one per core")
    kernels: bool = Field(default=True, description="our own CPU kernels where processor and compiler allow")
    compile: bool = Field(default=True, description="else compile torch's in the background, with a C++ compiler")
    cache_dir: Path = Field(default=Path("~/.cache/diptych"), description="compiled code, kept between starts")
    max_requests: int = Field(default=32, ge=1, le=4096, description="pictures in the making at once")
    max_rows: int = Field(
        default=32, ge=2, le=1024, description="rows of one UNet forward; guidance brings two a picture"
    )
    deterministic_rows: int = Field(default=8, ge=2, le=1024, description="the fixed bucket of deterministic requests")
    image_objective_s: float = Field(
        default=20.0, gt=0, allow_inf_nan=False, description="pictures without a deadline are ordered as if due"
    )
    starvation_s: float = Field(
        default=60.0, gt=0, allow_inf_nan=False, description="after so long the oldest request goes first"
    )

    # The service: its parts find one another by these.
    redis_url: str = Field(default="", description="redis://…; empty: `serve` starts a Redis of its own")
    data_dir: Path = Field(
        default=Path("~/.local/share/diptych"), description="pictures, and the embedded Redis's file"
    )
    artifacts_url: str = Field(default="", description="where pictures go; empty: file:// in the data folder")
    host: str = Field(default="127.0.0.1", description="that the API listens on")
    port: int = Field(default=8000, ge=1, le=65535, description="that the API listens on")
    max_queued: int = Field(default=1000, ge=1, le=1_000_000, description="jobs that may wait in one queue")
    max_attempts: int = Field(default=3, ge=1, le=100, description="crashes that a job may be in before it fails")
    image_jobs: int = Field(default=32, ge=1, le=1000, description="image jobs that a worker takes at once")
    text_jobs: int = Field(default=64, ge=1, le=1000, description="text jobs that a worker takes at once")
    lease_s: float = Field(
        default=15.0,
        ge=0.5,
        le=3600,
        allow_inf_nan=False,
        description="after such silence a worker's jobs are taken away",
    )
    stuck_s: float = Field(
        default=300.0, gt=0, allow_inf_nan=False, description="one iteration of so long means a hung device"
    )
    drain_s: float = Field(
        default=20.0, ge=0, allow_inf_nan=False, description="how long a stopping worker goes on with what it has begun"
    )
    retention_s: float = Field(
        default=86_400.0, gt=0, allow_inf_nan=False, description="how long a finished job can be asked for"
    )

    @field_validator("cache_dir", "data_dir")
    @classmethod
    def _has_home(cls, value: Path) -> Path:
        try:
            return value.expanduser()
        except RuntimeError as error:  # ~ of nobody
            raise ValueError("names a home folder that does not exist") from error

    @property
    def model_name(self) -> str:
        """The model to load: the one that was asked for, the embedded one, or its stand-in."""
        if self.model:
            return self.model
        return str(EMBEDDED_MODEL) if (EMBEDDED_MODEL / "model_index.json").is_file() else STAND_IN_MODEL

    @property
    def artifacts(self) -> str:
        """The URL that pictures are kept under."""
        return self.artifacts_url or (self.data_dir.expanduser().absolute() / "artifacts").as_uri()

    @property
    def compiled_code(self) -> Path:
        return self.cache_dir.expanduser() / "inductor"

    @property
    def compiled_kernels(self) -> Path:
        return self.cache_dir.expanduser() / "kernels"


def read(**given: object) -> Settings:
    """Settings from the environment, with `given` values (None: not given) over it. Raises `SettingsError`.

    A variable DIPTYCH_… that is no setting is most likely misspelt: it is logged and ignored.
    """
    _warn_of_misspelt()
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("; ".join(_say(str(e["loc"][0]), e["msg"], given) for e in error.errors())) from None


def _say(field: str, message: str, given: Mapping[str, object]) -> str:
    """One complaint, about what the user wrote: the option, or the variable."""
    name = f"--{field.replace('_', '-')}" if given.get(field) is not None else f"DIPTYCH_{field.upper()}"
    return f"{name}: {message[:1].lower()}{message[1:]}"


def _warn_of_misspelt() -> None:
    known = {f"DIPTYCH_{field.upper()}" for field in Settings.model_fields}
    for name in sorted(os.environ):
        if name.upper().startswith("DIPTYCH_") and name.upper() not in known | _OTHERS:
            near = difflib.get_close_matches(name.upper(), known, 1)
            log.warning("%s is no setting and is ignored%s", name, f"; did you mean {near[0]}?" if near else "")
