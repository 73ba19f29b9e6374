"""Settings of the server: command-line flags, then HELMSIGHT_* environment variables, then a TOML file, then defaults.

Every field of `Settings` but `presets` is one flag (`--max-waiting`), one variable (`HELMSIGHT_MAX_WAITING`) and one TOML
key (`max_waiting`); presets are TOML tables (`[presets.NAME]`). Importing this module is cheap: neither Flask nor torch.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from demo import CHECKPOINT, located
from probes.harness.loading.settings import ModelSettings

MEBI = 2**20
DEFAULT_JOURNAL = "~/.helmsight/journal.db"


class SettingsError(Exception):
    """Raised for an unknown setting or an invalid value; the message names it and its source."""


class PresetTable(BaseModel):
    """A preset as it is written: fields of a request; `source` tells where."""

    model_config = ConfigDict(frozen=True)

    fields: dict[str, Any]
    source: str = "settings"


class Settings(ModelSettings):
    """All settings, with their defaults and bounds; those of the model that other commands have too are inherited."""

    # The model
    model: str = Field(default=str(CHECKPOINT), description=ModelSettings.model_fields["model"].description)
    name: str | None = Field(default=None, description="name of the model on the wire (default: the checkpoint's own)")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64,
        description="processes that share every layer, all started by torchrun (needs the extra parallel)",
    )  # fmt: skip
    vectors: tuple[str, ...] = Field(
        default=("~/.helmsight/vectors",), description="folder of steering vectors, before <model>/vectors (repeatable)"
    )

    # The engine
    slots: int = Field(default=64, ge=1, le=1024, description="answers generated at the same time")
    max_length: int | None = Field(
        default=None, ge=16, description="context length per request in tokens (default: the model's, 4096 at most)"
    )
    max_waiting: int = Field(default=64, ge=0, le=10_000, description="answers that may wait for a slot before 429")
    max_wait: float | None = Field(
        default=None, ge=0, le=86_400, allow_inf_nan=False,
        description="longest expected wait for a slot in seconds before 429 (default: no limit)",
    )  # fmt: skip
    max_gap: float = Field(
        default=100.0, gt=0, allow_inf_nan=False,
        description="longest gap between tokens of an answer while prompts are prefilled, in milliseconds",
    )  # fmt: skip
    max_stall: float | None = Field(
        default=None, gt=2, allow_inf_nan=False,
        description="longest gap between tokens while prompts are prefilled, as a multiple of a decode step; "
        "the smaller bound applies (default: --max-gap only)",
    )  # fmt: skip
    overlap: bool | None = Field(
        default=None,
        description="launch each forward pass before the tokens of the last one are read, so that a GPU need not wait for "
        "the host (default: on a GPU, where a few answers at the start are the same both ways)",
    )
    image_cache: int = Field(
        default=256 * MEBI, ge=0,
        description="bytes for cached image embeddings, and as many for images preprocessed by the processor",
    )  # fmt: skip
    kv_share: float = Field(
        default=0.9, gt=0, le=1, allow_inf_nan=False,
        description="share of the GPU memory left by the model that the KV cache may use: fewer --slots if it needs more",
    )  # fmt: skip
    prefix_cache: int = Field(
        default=512 * MEBI, ge=0,
        description="bytes of the prefix cache, so that shared prompt prefixes are computed once; 0 for none",
    )  # fmt: skip
    compiled: bool | None = Field(
        default=None,
        description="compile decode steps and short prompts, for less time per token: on a CPU in the background, and "
        "cached; on a GPU decode steps are captured as CUDA graphs (default: on one GPU; on a CPU, if there is a C++ "
        "compiler and the weights take up to 1 GiB)",
    )
    compiled_folder: str | None = Field(
        default=None,
        description="folder of compiled steps, which nobody else may be able to write; off for none "
        "(default: ~/.cache/helmsight/compiled)",
    )
    engine: str = Field(
        default="own",
        description="own, or vLLM with the plugin helmsight-vllm: vllm=http://host:8000 for one server that runs, "
        "vllm=http://one:8000,http://other:8000 for several of the same model, vllm to start one (needs --vllm-env)",
    )
    engine_key: SecretStr | None = Field(default=None, description="API key that the vLLM servers require")
    vllm_env: str | None = Field(
        default=None, description="folder of the virtual environment with vLLM and helmsight-vllm, for --engine vllm"
    )
    vllm_args: str = Field(
        default="", description="further arguments of the started vllm serve, such as --tensor-parallel-size 2"
    )
    engine_process: bool = Field(
        default=True,
        description="run the engine in its own process, so that many clients do not slow its steps down",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of the engine (default: the number of usable processors)",
    )

    # Several replicas
    replicas: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="replicas of the whole server behind one address, each a process with the model (needs the extra ray)",
    )
    max_replicas: int | None = Field(
        default=None, ge=1, le=1000, description="replicas under load (default: no more than --replicas)"
    )
    replica_requests: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="running requests per replica above which a replica is added, and below which one is removed "
        "(default: --slots)",
    )
    replica_added_after: float = Field(
        default=30.0, ge=0, le=86_400, allow_inf_nan=False, description="seconds of load before a replica is added"
    )
    replica_removed_after: float = Field(
        default=600.0, ge=0, le=86_400, allow_inf_nan=False, description="idle seconds before a replica is removed"
    )

    # Limits on a request
    max_body: int = Field(default=32 * MEBI, ge=1024, description="largest request body in bytes")
    max_characters: int | None = Field(
        default=None, ge=1,
        description="characters of all texts of a request (default and maximum: as many as the context can hold)",
    )  # fmt: skip
    max_parts: int | None = Field(
        default=None, ge=1, description="texts in the messages of a request (default and maximum: the context length)"
    )
    max_images: int = Field(default=16, ge=0, le=1024, description="images in one request")
    max_image_bytes: int = Field(default=16 * MEBI, ge=1024, description="bytes of one encoded image")
    max_image_pixels: int = Field(default=40_000_000, ge=1, le=170_000_000, description="pixels of one image")
    max_request_pixels: int = Field(default=80_000_000, ge=1, description="pixels of all images of one request")
    max_choices: int = Field(default=8, ge=1, le=128, description="largest n")
    max_strength: float = Field(
        default=4.0, gt=0, allow_inf_nan=False,
        description="largest steering strength in published units: a vector's strength times its 'published', and "
        "what all vectors of a request together add at a layer, in mean magnitudes of the model's states",
    )  # fmt: skip
    max_vectors: int = Field(default=8, ge=1, le=64, description="steering vectors in one request")
    max_vector_bytes: int = Field(
        default=64 * MEBI, ge=1024, le=2**31, description="bytes of an uploaded steering vector"
    )
    max_uploaded_vectors: int = Field(default=256, ge=1, le=10_000, description="steering vectors that may be uploaded")
    disable_interventions: tuple[str, ...] = Field(
        default=(),
        description="intervention that requests may not ask for, such as opera, by its name in /v1/models (repeatable)",
    )
    request_timeout: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="longest time of an answer in seconds, from the arrival of its request",
    )
    read_timeout: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="seconds for a client to send its request, or to receive 256 KiB of an answer",
    )
    allow_remote_images: bool = Field(default=False, description="fetch http(s) image URLs from public addresses")
    remote_image_timeout: float = Field(
        default=10.0, gt=0, le=300, allow_inf_nan=False, description="seconds to fetch one remote image"
    )

    # Access
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65_535, description="port to listen on")
    api_keys: tuple[SecretStr, ...] = Field(
        default=(), description="key that clients must send as a bearer token (repeatable)"
    )
    api_key_file: str | None = Field(default=None, description="file with one API key per line")
    named_key_file: str | None = Field(
        default=None,
        description="file of keys with names, roles and limits, which 'helmsight keys' writes; reread when it changes",
    )
    allow_host: tuple[str, ...] = Field(
        default=(),
        description="further name that requests may have as Host, and pages as Origin: a name, *.domain or * (repeatable); "
        "checked if no key is required or a name is given here; addresses, localhost, the name of --host and, unless "
        "bound to loopback, names without a dot are always allowed as Host",
    )
    cors_origin: tuple[str, ...] = Field(
        default=(),
        description="origin of other web pages that may call the API from a browser, such as https://app.example.org, "
        "or * (repeatable)",
    )
    allow_uploads: bool = Field(
        default=False, description="let clients upload and delete steering vectors, in the first folder of --vectors"
    )

    # The journal of answers
    journal: SecretStr = Field(
        default_factory=lambda: DEFAULT_JOURNAL,
        validate_default=True,
        description="file (SQLite) or postgresql:// URL that keeps a row for each answer; off for none",
    )
    journal_max_rows: int = Field(default=1_000_000, ge=1, le=100_000_000, description="number of newest rows kept")
    journal_days: float = Field(
        default=30.0, gt=0, le=36_500, allow_inf_nan=False, description="days that a row is kept"
    )
    journal_texts: bool = Field(default=False, description="keep prompts and answers in the journal (images never)")
    journal_text_limit: int = Field(
        default=4000, ge=1, le=20_000, description="characters kept of a prompt and of an answer"
    )
    store: Literal["off", "own", "on"] = Field(
        default="own",
        description='own: keep the texts of an answer whose request says "store": true, for its own key, until that deletes '
        "it or the journal's days are over; on: also of every response whose request does not say false; off: of none",
    )
    store_bytes: int = Field(
        default=1024 * MEBI, ge=0, description="bytes of images kept beside the journal for stored responses"
    )
    journal_readouts: tuple[str, ...] = Field(
        default=(),
        description="readout whose numbers are computed for every request, just for the journal, such as focus, modality, "
        "decay, residual or flags (repeatable)",
    )

    # Presets, which only the file holds
    presets: dict[str, PresetTable] = Field(
        default={}, description="tables of request fields, selected by the name of the model"
    )

    # The process
    graceful_timeout: int = Field(
        default=30, ge=1, le=3600, description="seconds that running answers get after SIGTERM"
    )
    keep_alive: int = Field(default=75, ge=0, le=3600, description="seconds that an idle connection stays open")
    access_log: bool = Field(default=True, description="log one line per request on standard output")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest severity that is logged: debug, info, warning or error"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="format of the log: text, or json with an object per line"
    )
    traces: bool = Field(
        default=False,
        description="send traces by OpenTelemetry, configured by its own variables such as OTEL_EXPORTER_OTLP_ENDPOINT "
        "(needs the extra otel)",
    )

    @field_validator("model")
    @classmethod
    def _that_ships(cls, model: str) -> str:
        return located(model)

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, engine: str) -> str:
        kind, _, urls = engine.partition("=")
        addresses = [url.strip().rstrip("/") for url in urls.split(",")] if urls else []
        valid = not urls if engine in ("own", "vllm") else kind == "vllm" and addresses
        if not valid or not all(re.fullmatch(r"https?://[^\s/]+(/\S*)?", address) for address in addresses):
            raise ValueError(f"must be own, vllm, or vllm=http://host:8000[,http://...]; got {engine[:128]!r}")
        if len({*addresses}) < len(addresses):
            raise ValueError("must not name a server twice")
        return engine

    @field_validator("cors_origin")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        """Check that each is written as browsers send it, in lower case and without a path."""
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:\d+)?", origin):
                raise ValueError(f"must be like https://app.example.org or *; got {origin[:128]!r}")
        return origins

    @field_validator("api_keys")
    @classmethod
    def _no_empty_key(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(len(key.get_secret_value().strip()) < 8 for key in keys):
            raise ValueError("an API key needs at least 8 characters")
        return keys

    @field_validator("allow_host")
    @classmethod
    def _names_only(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if any(not name.strip() or set(name) & set("/: @") for name in names):
            raise ValueError("must be names of hosts, without scheme and port")
        return names

    @field_validator("journal")
    @classmethod
    def _known_database(cls, journal: SecretStr) -> SecretStr:
        # The message must not contain the value, which may contain a password.
        text = journal.get_secret_value()
        if not text.strip():
            raise ValueError("must be a path, a URL, or off")
        scheme, separator, _ = text.partition("://")
        if separator and scheme.partition("+")[0] not in ("sqlite", "postgresql", "postgres"):
            raise ValueError("a URL must begin with postgresql:// or sqlite:///")
        return journal

    @property
    def keys(self) -> tuple[str, ...]:
        """All API keys, including those of the key file; empty if no key is required."""
        keys = [key.get_secret_value() for key in self.api_keys]
        if self.api_key_file:
            lines = Path(self.api_key_file).expanduser().read_text().splitlines()
            file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not file_keys:
                raise SettingsError(f"api_key_file {self.api_key_file!r} holds no key")
            keys += file_keys
        return tuple(keys)

    @property
    def asks_for_key(self) -> bool:
        """True if requests need a key."""
        return self.named_key_file is not None or bool(self.keys)

    @property
    def address(self) -> str:
        """The URL of the server, or its socket's `unix:` and path."""
        if self.host.startswith("unix:"):
            return self.host
        host = f"[{self.host}]" if ":" in self.host and self.host[0] != "[" else self.host
        return f"http://{host}:{self.port}"

    @property
    def public_bind(self) -> bool:
        """True if other machines may reach the server."""
        if self.host == "localhost" or self.host.startswith("unix:"):
            return False
        try:
            return not ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return True

    @property
    def vllm_urls(self) -> tuple[str, ...]:
        """The addresses of the vLLM servers; empty where none runs already."""
        urls = self.engine.partition("=")[2]
        return tuple(url.strip().rstrip("/") for url in urls.split(",")) if urls else ()

    @property
    def follows(self) -> bool:
        """True if this process shares a model that another one serves."""
        return self.tensor_parallel > 1 and os.environ.get("RANK", "0") != "0"

    @property
    def apart(self) -> bool:
        """True if our own engine has a process of its own, which torchrun's processes do not have."""
        return self.engine == "own" and self.engine_process and self.tensor_parallel == 1

    @property
    def max_request_bytes(self) -> int:
        """The largest size in bytes of a request's body for any route."""
        return max(self.max_body, self.max_vector_bytes if self.allow_uploads else 0)

    @property
    def worker_threads(self) -> int:
        """The number of HTTP threads: one for each running or waiting request, and 16 for refusals, health and metrics."""
        return self.slots + self.max_waiting + 16


def warnings_for(settings: Settings) -> Sequence[str]:
    """Return warnings that an operator should know before serving with these settings."""
    if settings.public_bind and not settings.asks_for_key:
        return [f"listening on {settings.host} without an API key: anyone who reaches this port can use the model"]
    return []
