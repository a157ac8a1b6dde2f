"""Settings: read once from the environment (DIPTYCH_*), validated, and passed down.

No other module reads the environment.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from contract import limits, model_names, parallel, plan, urls
from contract.content import Action, read_labels
from contract.precision import Choice, ImageChoice

USUAL_DATA = Path("~/.local/share/diptych")
EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "models" / "emoji-xl"
EMBEDDED_TEXT_MODEL = Path(__file__).resolve().parent.parent / "models" / "emoji-lm"
STAND_IN_MODEL = "random:emoji-xl"  # the embedded model's architecture with random weights, where it is not installed
AUTO = "auto"
_TLS = {"ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_keyfile"}  # query parameters allowed in redis_url
_OF_ONE_MODEL = ("unet", "lora", "tiny_vae", "refiner", "plans")
_OTHERS = {"DIPTYCH_TORCH_INDEX", "DIPTYCH_COMMIT"}  # read by install.py and by lab/bench/harness/provenance.py

log = logging.getLogger(__name__)


class SettingsError(ValueError):
    """Invalid settings. The message names each variable."""


class Settings(BaseSettings):
    """The settings of a Diptych process. `DIPTYCH_MODEL=…` sets `model`, and so on."""

    model_config = SettingsConfigDict(env_prefix="DIPTYCH_", extra="ignore", frozen=True)

    model: str = Field(
        default="", description="a folder in diffusers' format, a name or a hub id; empty: the embedded model"
    )
    models: str = Field(
        default="",
        pattern=r"^([^,]+(,[^,]+)*)?$",
        description="image models that each worker serves, separated by commas; the first stays in memory, and is that "
        "of --model if both are given; empty: that model alone",
    )
    models_mib: int = Field(
        default=0, ge=0, description="that the weights of these models may take in memory; 0: all of them stay"
    )
    models_host_mib: int = Field(
        default=0,
        ge=0,
        description="host memory for models that left a GPU's: they come back without being loaded; 0: none",
    )
    model_idle_s: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds without a request after which a model leaves; 0: never",
    )
    cascade_scorer: str = Field(
        default="",
        description="a CLIP's folder, which scores the drafts of cascades; empty: emoji-clip beside an embedded model, "
        "else no cascades",
    )
    models_dir: Path | None = Field(
        default=None,
        description="where `diptych models add` puts models, which are then found by name; empty: models/ in the data "
        "folder",
    )
    variant: str | None = Field(default=None, description="of the weight files, such as fp16")
    precision: ImageChoice = Field(
        default="auto",
        description="auto: int8 where the model, or the cache, has such a variant and the kernels run, else fp32 or "
        "bf16; 8 bits of a model without a variant make one, once; nf4: of a pipeline by diffusers' own loop",
    )
    offload: Literal["off", "model", "sequential", "group"] = Field(
        default="off",
        description="weights of a pipeline by diffusers' own loop that stay in the host's memory until they are used",
    )
    unet: str = Field(
        default="",
        description="a quantized UNet's folder; empty: the model's own unet-int8 or unet-fp8, or the cache's; of a "
        "pipeline by diffusers' own loop a file of its denoiser in GGUF",
    )
    lora: str = Field(
        default="", description="fused into the model as it is loaded: name, name:scale, or several with commas"
    )
    lora_dir: str = Field(
        default="",
        description="where name.safetensors of the LoRAs lies that requests may use, or bring; empty: none may",
    )
    lora_mib: int = Field(default=1024, ge=1, description="that the LoRAs which requests bring may take, once read")
    embeddings_dir: str = Field(
        default="",
        description="where name.safetensors of the textual inversions lies that prompts may name; empty: none may",
    )
    upscalers_dir: str = Field(
        default="",
        description="where name.safetensors of the networks lies that may enlarge pictures; empty: none may",
    )
    control_dir: str = Field(
        default="",
        description="where the control networks lie that requests may use, folders or name.safetensors; empty: none",
    )
    control_mib: int = Field(default=8192, ge=1, description="that these networks may take, once read")
    depth_model: str = Field(
        default="",
        description="a folder in transformers' format of the model that the preprocessor depth takes; empty: none",
    )
    ip_adapter_dir: str = Field(
        default="",
        description="where name.safetensors of the IP-Adapters lies that requests may use, and image_encoder; "
        "empty: none",
    )
    ip_adapter_mib: int = Field(
        default=12288, ge=1, description="that these adapters and their encoders may take, once read"
    )
    refiner: str = Field(
        default="",
        description="an SDXL refiner's folder, name or hub id, for the last steps of requests that say so; empty: none",
    )
    deepcache: str = Field(
        default="off", description="of requests that do not say: off, auto, or an interval such as 3 or 3:resnet"
    )
    plan: str = Field(
        default="",
        description="of requests that do not say: off, auto, or a plan of `diptych tune`; empty: none",
    )
    plans: str = Field(default="", description="a file of tuned plans; empty: plans.json in the model's folder")
    tiny_vae: str = Field(
        default="",
        description="a tiny decoder's folder or hub id (AutoencoderTiny); empty: vae-tiny in the model's folder",
    )
    max_pixels: int = Field(
        default=0, ge=0, le=4096 * 4096, description="of a picture; 0: the model's native area and half of it"
    )
    tiled_above: int = Field(
        default=1536 * 1536, ge=0, description="pixels; larger pictures go through the VAE in tiles"
    )
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int = Field(
        default=0, ge=0, le=1024, description="CPU threads that compute; 0: one per core, two beside a GPU"
    )
    backend: str = Field(
        default=AUTO,
        pattern=r"^[A-Za-z][\w.-]*$",
        description="that draws pictures: auto, torch, programs (CPU kernels), graphs (GPU), or an installed package's",
    )
    kernels: bool = Field(default=True, description="our own CPU kernels where processor and compiler allow")
    compile: bool = Field(
        default=True,
        description="where our kernels do not run, compile torch's in the background, with a C++ compiler",
    )
    cache_dir: Path = Field(default=Path("~/.cache/diptych"), description="compiled code and variants")
    checker: str = Field(
        default="",
        description="looks at each finished picture: the folder of a safety checker of diffusers or of an image "
        "classifier of transformers, or module:callable; empty: none",
    )
    checker_action: Action = Field(
        default="refuse",
        description="what is done to a picture that the checker flags, unless the key says otherwise: tag, blur, "
        "refuse, or off, which checks none",
    )
    checker_labels: str = Field(
        default="",
        description="of a classifier's labels those that flag a picture, above these scores, such as nsfw:0.5; empty: "
        "those whose names say so, above 0.5",
    )
    checker_s: float = Field(
        default=60.0, gt=0, le=600, allow_inf_nan=False, description="how long the checker may take for a picture"
    )
    image_metadata: bool = Field(
        default=True, description="prompt, parameters and fingerprint in each picture's file; off: none of them"
    )
    provenance: Literal["off", "c2pa", "c2pa+watermark"] = Field(
        default="off", description="marks each picture's file as generated: signed content credentials, a watermark"
    )
    provenance_certificate: Path | None = Field(
        default=None, description="PEM file of the certificates that sign; empty: self-signed, made in the data folder"
    )
    provenance_key: Path | None = Field(default=None, description="PEM file of the certificate's P-256 key")
    max_requests: int = Field(default=32, ge=1, le=4096, description="pictures in the making at once")
    max_rows: int = Field(
        default=32, ge=2, le=1024, description="rows of one UNet forward; guidance brings two a picture"
    )
    memory_mib: int = Field(
        default=0, ge=0, description="that pictures in the making may hold; 0: most of what is free once all is loaded"
    )
    deterministic_rows: int = Field(default=8, ge=2, le=1024, description="the fixed bucket of deterministic requests")
    image_objective_s: float = Field(
        default=20.0, gt=0, allow_inf_nan=False, description="pictures without a deadline are ordered as if due"
    )
    text_model: str = Field(
        default="", description="a folder in transformers' format or a hub id; empty: the embedded one; off: no text"
    )
    text_models: str = Field(
        default="",
        pattern=r"^([^,]+(,[^,]+)*)?$",
        description="text models that each worker serves, separated by commas; the first stays in memory, and is that "
        "of DIPTYCH_TEXT_MODEL if both are given; empty: that model alone",
    )
    text_models_mib: int = Field(
        default=0,
        ge=0,
        description="that these models may take in memory, each with its keys and values; 0: all of them stay",
    )
    text_loras: str = Field(
        default="", description="where the text models' LoRAs lie that requests may name as model; empty: none may"
    )
    text_loras_mib: int = Field(default=1024, ge=1, description="that the LoRAs of each text model may take, once read")
    text_precision: Choice = Field(
        default="auto",
        description="auto: int8 or fp8 where the model has such a variant and the kernels run, else fp32 or bf16",
    )
    text_draft: str = Field(
        default="",
        description="makes guesses: a smaller text model, a DFlash drafter, or lookup for what was said; empty: none",
    )
    text_parallel: str = Field(
        default="",
        description="spreads a text model over GPUs: tp2, tp4 or tp8 splits layers, pp2, pp4, … divides them, tp2pp2 "
        "both; empty: one GPU",
    )
    text_kv: Literal["float", "int8", "fp8"] = Field(default="float", description="what keys and values are kept in")
    text_requests: int = Field(default=64, ge=1, le=4096, description="answers in the making at once")
    text_memory_mib: int = Field(
        default=0,
        ge=0,
        description="for a model's keys and values; 0: what those answers need, at most a tenth of what is free",
    )
    text_first_s: float = Field(
        default=2.0, gt=0, allow_inf_nan=False, description="answers are ordered as if their first token were due"
    )
    text_token_s: float = Field(
        default=0.1, gt=0, allow_inf_nan=False, description="the longest that a token should take; batches keep to it"
    )
    starvation_s: float = Field(
        default=60.0, gt=0, allow_inf_nan=False, description="after so long the oldest request goes first"
    )

    # The service: addresses by which its parts find each other.
    redis_url: str = Field(default="", description="redis:// or rediss://…; empty: `serve` starts a Redis of its own")
    data_dir: Path = Field(default=USUAL_DATA, description="pictures, added models, and the embedded Redis's file")
    artifacts_url: str = Field(default="", description="where pictures go; empty: file:// in the data folder")
    storage_s: float = Field(
        default=20.0, gt=0, le=600, allow_inf_nan=False, description="how long the store of pictures may take to answer"
    )
    host: str = Field(default="127.0.0.1", description="that the API listens on")
    port: int = Field(default=8000, ge=1, le=65535, description="that the API listens on")
    apis: int = Field(
        default=1, ge=1, le=64, description="processes that answer HTTP under `diptych serve`, on the same port"
    )
    sdapi: bool = Field(default=False, description="serve AUTOMATIC1111's API too, under /sdapi/v1/")
    max_queued: int = Field(default=1000, ge=1, le=1_000_000, description="jobs that may wait in one queue")
    max_attempts: int = Field(default=3, ge=1, le=100, description="crashes that a job may be in before it fails")
    image_jobs: int = Field(default=32, ge=1, le=1000, description="image jobs that a worker computes at once")
    text_jobs: int = Field(default=64, ge=1, le=1000, description="text jobs that a worker computes at once")
    lease_s: float = Field(
        default=15.0,
        ge=0.5,
        le=3600,
        allow_inf_nan=False,
        description="after such silence a worker's jobs are taken away",
    )
    warm_wait_s: float = Field(
        default=0.5,
        ge=0,
        le=60,
        description="that a job waits at most for a worker that has its LoRAs, control networks, IP-Adapters in memory",
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

    metrics: str = Field(
        default="",
        pattern=r"^([^\s/]*:[0-9]{1,5})?$",
        description="where a worker shows figures, such as 0.0.0.0:9100; empty: nowhere",
    )
    traces: str = Field(
        default="", description="an OTLP collector that spans go to, such as http://collector:4318; empty: nowhere"
    )
    log_format: Literal["text", "json"] = Field(default="text", description="of log lines")

    # Access control and public addresses.
    client_s: float = Field(
        default=20.0,
        ge=0.1,
        le=3600,
        allow_inf_nan=False,
        description="that a client may take over its headers, or stall while it sends a body or reads an answer",
    )
    connections: int = Field(
        default=0, ge=0, le=1_000_000, description="open at once; 0: as many as open files allow, less some"
    )
    public_url: str = Field(default="", description="what links begin with; empty: as called")
    trust_network: bool = Field(
        default=False, description="without keys, serve other machines too: something else keeps strangers out"
    )
    rate: str = Field(
        default="600/minute",
        description="requests of one key, such as 10/second, or 10/second, emoji-z=10/minute; empty: no limit",
    )
    quota: str = Field(default="", description="pictures of one key, such as 1000/day; empty: no limit")
    tokens: str = Field(default="", description="estimated tokens of one key's texts, such as 100000/minute")
    key_jobs: str = Field(
        default="", description="of one key queued or running at once, such as 200, or 200, emoji-z=8; empty: no limit"
    )
    key_running: str = Field(
        default="", description="of a model that workers run or are given at once of one key, such as 8 or 50%"
    )
    files_quota_bytes: int = Field(
        default=10 * 2**30, ge=0, le=2**50, description="that the files of one key may take together; 0: no limit"
    )
    key_queued: str = Field(
        default="50%",
        pattern=f"^({limits.SHARE.pattern.pattern})?$",
        description="of a queue, or jobs, that one key's may be; empty: no limit",
    )
    key_stored: str = Field(
        default="40%",
        pattern="^([1-9][0-9]?%|100%)?$",
        description="of Redis's memory that the records of one key may take; empty: no limit",
    )
    batch_jobs: int = Field(default=16, ge=1, le=10_000, description="pictures' jobs of one key's batches at once")
    batch_texts: int = Field(default=32, ge=1, le=10_000, description="texts' jobs of one key's batches at once")
    webhook_private: bool = Field(default=False, description="let webhooks call private addresses, of this network")
    fetch_images: Literal["public", "private", "off"] = Field(
        default="public",
        description="https:// URLs of pictures in requests: public fetches them from public addresses alone, private "
        "from this network's too, off fetches none",
    )
    model_aliases: str = Field(
        default="", description="other names of models, such as gpt-image-1=emoji-xl,dall-e-3=emoji-xl-turbo"
    )
    openai_names: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="whether names of OpenAI's image models stand for the first live image model; auto: if it is the "
        "only one",
    )
    unknown_fields: Literal["error", "warn"] = Field(
        default="error", description="of requests: refused, or left out with a warning"
    )
    predictions: bool = Field(
        default=True, description="serve Cog's and Replicate's APIs: /predictions, /v1/predictions"
    )
    cors_origins: str = Field(default="", description="origins whose pages may call, with commas; empty: none")
    link_s: float = Field(
        default=3600.0,
        gt=0,
        le=31_536_000,
        allow_inf_nan=False,
        description="how long a signed link to a picture works",
    )

    @field_validator("checker_labels")
    @classmethod
    def _are_labels(cls, value: str) -> str:
        read_labels(value)
        return value

    @field_validator("rate", "quota", "tokens", "key_jobs", "key_running")
    @classmethod
    def _are_limits(cls, value: str, info: ValidationInfo) -> str:
        limits.read_limits(value, limits.KEY_LIMITS[str(info.field_name).removeprefix("key_")])
        return value

    @field_validator("text_parallel")
    @classmethod
    def _is_a_split(cls, value: str, info: ValidationInfo) -> str:
        split = parallel.parse(value)
        if split.ranks > 1 and "," in info.data.get("text_models", ""):
            raise ValueError("splits one model, and DIPTYCH_TEXT_MODELS names several")
        if split.ranks > 1 and info.data.get("text_loras"):
            raise ValueError("splits layers, whose parts take no adapters: DIPTYCH_TEXT_LORAS must be empty")
        if split.pipeline > 1 and info.data.get("text_draft", "") not in ("", "lookup"):
            raise ValueError("has stages, beside which DIPTYCH_TEXT_DRAFT is lookup or empty")
        return value

    @field_validator("deepcache")
    @classmethod
    def _is_a_schedule(cls, value: str) -> str:
        plan.parse(value)
        return value

    @field_validator("warm_wait_s")
    @classmethod
    def _is_a_lease_at_most(cls, value: float, info: ValidationInfo) -> float:
        """Sweeps leave a job alone while it is offered: if the worker that offers it dies, it is late by so long."""
        lease_s = info.data.get("lease_s", value)
        if value > lease_s:
            raise ValueError(f"must not exceed DIPTYCH_LEASE_S ({lease_s:g} s)")
        return value

    @field_validator("public_url")
    @classmethod
    def _is_where_links_begin(cls, value: str) -> str:
        parts = urls.parse(value) if value else None
        if parts is not None and ("@" in parts.netloc or set("?#") & set(value)):
            raise ValueError("must not contain a user, a query or a fragment")
        return value

    @field_validator("model_aliases")
    @classmethod
    def _are_aliases(cls, value: str) -> str:
        model_names.read_aliases(value)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        for origin in {origin.strip() for origin in value.split(",")} - {"", "*"}:
            if "@" in origin or urls.parse(origin)[2:] != ("", "", ""):
                raise ValueError("must be origins such as https://studio.example, separated by commas")
        return value

    @field_validator("traces")
    @classmethod
    def _is_a_collector(cls, value: str) -> str:
        if value:
            urls.parse(value)
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis(cls, value: str) -> str:
        """Accept a URL that redis-py and kombu parse alike, and that both verify."""
        if not value:
            return value
        parts = urls.parse(value, ("redis", "rediss"))
        query = parse_qsl(parts.query, keep_blank_values=True)
        names = [name for name, _ in query]
        if parts.fragment or not set(names) <= _TLS or len(set(names)) < len(names) or not all(v for _, v in query):
            raise ValueError(f"may contain only the parameters {', '.join(sorted(_TLS))}, each once")
        if names and parts.scheme == "redis":
            raise ValueError("must begin with rediss:// if it has certificate parameters")
        if dict(query).get("ssl_cert_reqs", "required") != "required":
            raise ValueError("must not disable certificate verification: the only value of ssl_cert_reqs is required")
        return value

    @field_validator("cache_dir", "data_dir", "models_dir")
    @classmethod
    def _has_home(cls, value: Path | None) -> Path | None:
        try:
            return value and value.expanduser()
        except RuntimeError as error:  # ~ of an unknown user
            raise ValueError("refers to a home folder that does not exist") from error

    @property
    def catalogue(self) -> list[Settings]:
        """The settings of each image model that a worker serves; what names files of one model is the first's."""
        own = [self.model_copy(update={"model": name, "models": ""}) for name in _names(self.model, self.models)]
        specific = dict.fromkeys(_OF_ONE_MODEL, "") | ({} if self.plan in (AUTO, plan.OFF) else {"plan": ""})
        return [own[0], *(each.model_copy(update=specific) for each in own[1:])]

    @property
    def text_catalogue(self) -> list[Settings]:
        """The settings of each text model that a worker serves; a draft model is the first's. Empty: no text."""
        if self.text_model_name is None:
            return []
        names = _names(self.text_model, self.text_models)
        own = [self.model_copy(update={"text_model": name, "text_models": ""}) for name in names]
        draft = self.text_draft if self.text_draft == "lookup" else ""
        return [own[0], *(each.model_copy(update={"text_draft": draft}) for each in own[1:])]

    @property
    def model_name(self) -> str:
        """The model to load: the configured one, the embedded one, or its stand-in.

        A name without a folder of its own may be that of an embedded model, such as "emoji-z", or of one in
        `model_stores`.
        """
        if name := _names(self.model, self.models)[0]:
            return _located(name, "model_index.json", self.model_stores)
        return str(EMBEDDED_MODEL) if (EMBEDDED_MODEL / "model_index.json").is_file() else STAND_IN_MODEL

    @property
    def scorer_folder(self) -> Path | None:
        """The folder of the CLIP that scores the drafts of cascades: the configured one, or beside an embedded model
        the embedded one. None: no cascades.
        """
        if self.cascade_scorer:
            return Path(self.cascade_scorer)
        folder = EMBEDDED_MODEL.parent
        own = Path(self.model_name).absolute().parent == folder and (folder / "emoji-clip" / "config.json").is_file()
        return folder / "emoji-clip" if own else None

    @property
    def text_model_name(self) -> str | None:
        """The text model to load: the configured one, or the embedded one if it is installed. None: no text.

        A name without a folder of its own may be that of an embedded model, or of one in `model_stores`.
        """
        if self.text_model == "off":
            return None
        if name := _names(self.text_model, self.text_models)[0]:
            return _located(name, "config.json", self.model_stores)
        return str(EMBEDDED_TEXT_MODEL) if (EMBEDDED_TEXT_MODEL / "model.safetensors").is_file() else None

    @property
    def model_stores(self) -> list[Path]:
        """Where added models are looked for; new ones are put into the first. Those in the usual data folder are found
        beside another one's, since versions until 0.3 put all of them there.
        """
        if self.models_dir is not None:
            return [self.models_dir.expanduser()]
        return [*dict.fromkeys(folder.expanduser() / "models" for folder in (self.data_dir, USUAL_DATA))]

    @property
    def aliases(self) -> Mapping[str, str]:
        """The models by their aliases."""
        return model_names.read_aliases(self.model_aliases)

    @property
    def artifacts(self) -> str:
        """The URL of the artifact store."""
        return self.artifacts_url or (self.data_dir.expanduser().absolute() / "artifacts").as_uri()

    @property
    def compiled_code(self) -> Path:
        return self.cache_dir.expanduser() / "inductor"

    @property
    def compiled_kernels(self) -> Path:
        return self.cache_dir.expanduser() / "kernels"

    @property
    def measured_tiles(self) -> Path:
        return self.cache_dir.expanduser() / "tiles"


def _names(model: str, models: str) -> list[str]:
    """The names of the models of one modality; "" for the embedded one."""
    names = [name for name in (model, *map(str.strip, models.split(","))) if name]
    return [*dict.fromkeys(names)] or [""]


def _located(name: str, file: str, stores: list[Path]) -> str:
    """The folder with this file of an embedded model of this name, or of one in `stores`; else the name."""
    if re.fullmatch(r"[\w.-]+", name) and not Path(name).exists():
        for where in (EMBEDDED_MODEL.parent, *stores):
            if (where / name / file).is_file():
                return str(where / name)
    return name


def read(**overrides: object) -> Settings:
    """Read the settings from the environment, overridden by `overrides` (None: not given). Raises `SettingsError`.

    An unknown variable DIPTYCH_… is most likely misspelt: it is logged and ignored.
    """
    _warn_of_misspelt()
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("; ".join(_say(str(e["loc"][0]), e["msg"], overrides) for e in error.errors())) from None


def _say(field: str, message: str, values: Mapping[str, object]) -> str:
    """An error message for one value: names the option, or the variable."""
    name = f"--{field.replace('_', '-')}" if values.get(field) is not None else f"DIPTYCH_{field.upper()}"
    message = message.removeprefix("Value error, ")
    return f"{name}: {message[:1].lower()}{message[1:]}"


def _warn_of_misspelt() -> None:
    names = {f"DIPTYCH_{field.upper()}" for field in Settings.model_fields}
    for name in sorted(os.environ):
        if name.upper().startswith("DIPTYCH_") and name.upper() not in names | _OTHERS:
            near = difflib.get_close_matches(name.upper(), names, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            log.warning("%s is not a known setting and is ignored%s", name, hint)
