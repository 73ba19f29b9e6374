"""vLLM servers with the plugin `helmsight-vllm` behind the server's engine protocol: found or started, compared, served."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import SecretStr

from server.engine import local
from server.engine.launched import LaunchedServer, command_of, free_port
from server.engine.progress import Tell
from server.settings import Settings
from steering import SteeringVector, VectorStore
from steering.errors import Fault
from steering.front.input_processor import Limits
from steering.model.calibration_files import CalibrationFiles
from steering.vllm.client import VllmClient
from steering.vllm.facts import ServerFacts
from steering.vllm.reference import Reference, ReferenceTask, computed_apart
from steering.vllm.selfcheck import check_servers
from steering.vllm.servers import Server, Servers
from steering.vllm.supported import Supported

log = logging.getLogger("helmsight")

KEPT = "~/.cache/helmsight/vllm"
"""The folder of references, one file for each model and vector."""
PAUSE = 1.0
"""Seconds between two looks at servers that are not ready."""
TOLD_EVERY = 30.0
"""Seconds between two lines in the log while none is ready."""

_OUR_VARIABLES = frozenset(f"HELMSIGHT_{name}".upper() for name in Settings.model_fields)
"""The variables of this server's own settings, keys among them, which are no business of the started vLLM."""


class VllmEngine(local.LocalEngine):
    """A `ServedEngine` over vLLM servers, one of which may have been started by this process."""

    def __init__(
        self,
        client: VllmClient,
        magnitudes: torch.Tensor | None,
        files: CalibrationFiles | None,
        launched: LaunchedServer | None = None,
    ):
        super().__init__(client, magnitudes, files)
        (version, *_) = {server.facts.vllm for server in client.servers.well if server.facts is not None} or {""}
        self.capabilities = replace(self.capabilities, engine=f"vLLM {version}".strip(), recovers=True)
        self._launched = launched

    def stop(self, drain: float = 0.0) -> None:
        super().stop(drain)
        if self._launched is not None:
            self._launched.stop()


def load(settings: Settings, tell: Tell = lambda stage, share: None) -> VllmEngine:
    """Wait for the vLLM servers of the settings, compare them with the plain model, and return an engine of them.

    `tell` receives the progress. Raises steering.UnsupportedModel where their answers differ, and whatever loading raises.
    """
    launched, urls = None, settings.vllm_urls
    if not urls:
        key = settings.engine_key or SecretStr(
            secrets.token_urlsafe(32)
        )  # other users of this machine can reach its port
        settings = settings.model_copy(update={"engine_key": key})
        launched, url = launch(settings)
        urls = (url,)
    try:
        return _loaded(settings, tell, urls, launched)
    except BaseException:
        if launched is not None:
            launched.stop()
        raise


def launch(settings: Settings) -> tuple[LaunchedServer, str]:
    """Start a `vllm serve` with the plugin, and return it with its address."""
    port = free_port()
    folders = [Path(folder).expanduser() for folder in settings.vectors]
    if Path(settings.model).is_dir():
        folders.append(Path(settings.model) / "vectors")
    key = {} if settings.engine_key is None else {"VLLM_API_KEY": settings.engine_key.get_secret_value()}
    environment = {
        **{name: value for name, value in os.environ.items() if name not in _OUR_VARIABLES},
        **key,
        "HELMSIGHT_GUARD": "1",
        "HELMSIGHT_VECTORS": os.pathsep.join(map(str, folders)),
        "VLLM_PLUGINS": "helmsight",
        "VLLM_NO_USAGE_STATS": "1",
        **({} if settings.download else {"HF_HUB_OFFLINE": "1"}),
    }
    environment.pop("PYTHONPATH", None)  # the other environment has packages of its own
    launched = LaunchedServer(command_of(settings, settings.model, port), environment, failed=local.end_process)
    launched.start()
    return launched, f"http://127.0.0.1:{port}"


def _loaded(settings: Settings, tell: Tell, urls: tuple[str, ...], launched: LaunchedServer | None) -> VllmEngine:
    key = None if settings.engine_key is None else settings.engine_key.get_secret_value()
    servers = Servers([Server(url, key) for url in urls])
    torch.set_num_threads(1)  # each request has its own thread; computing is left to the servers
    with ThreadPoolExecutor(2, "helmsight-load") as aside:
        unread = aside.submit(local.load_without_weights, settings)
        computed = aside.submit(_reference, settings)
        tell("computing the plain model's answers", None)
        mllm = unread.result()
        reference, vector = computed.result()
    tell("waiting for vLLM", None)
    facts = wait_for(servers, launched)
    reference.facts.complete(mllm)
    facts.complete(mllm)
    length = min(facts.context_length, settings.max_length or facts.context_length)
    slots = min(settings.slots, sum(server.slots for server in servers) or settings.slots)
    limits = Limits(length, max(1, settings.max_images), mllm.focus_layers, slots)
    supported = Supported.of(facts.can)
    client = VllmClient(mllm, limits, servers, supported, settings.max_waiting, settings.max_wait)
    tell("comparing it with the plain model", None)

    def vet(server: Server) -> None:
        """Compare one server's answers; raise UnsupportedModel where they differ."""
        alone = Server(server.url, key)
        alone.look()
        temporary = VllmClient(mllm, limits, Servers([alone]), supported)
        try:
            check_servers(temporary, reference, vector, supported.states)
        finally:
            temporary.stop()
        if launched is not None:
            launched.ready()

    for server in servers.well:
        vet(server)
    for server in servers:
        server.vet = vet
    return VllmEngine(client, reference.facts.magnitudes, local.calibration_files(mllm, settings), launched)


def wait_for(servers: Servers, launched: LaunchedServer | None = None) -> ServerFacts:
    """Wait until a server is ready, and return its facts.

    Others of the same model are used as soon as they are ready. Raises UnsupportedModel where servers serve different models
    or lack the plugin, Fault where the started one has ended for good.
    """
    last_log = time.monotonic()
    while True:
        for server in servers:
            server.look()
        if servers.well:
            return servers.facts()
        if launched is not None and launched.given_up:
            raise Fault("vllm serve ends before it is ready; its own log says why.")
        if time.monotonic() - last_log > TOLD_EVERY:
            last_log = time.monotonic()
            log.info("waiting for vLLM at %s", ", ".join(server.url for server in servers))
        time.sleep(PAUSE)


def _reference(settings: Settings) -> tuple[Reference, SteeringVector | None]:
    """Return the plain model's answers and the vector that some of them are steered with, None where there is none."""
    folders = [Path(folder).expanduser() for folder in settings.vectors]
    mllm_folder = Path(settings.model)
    store = VectorStore(*folders, mllm_folder / "vectors")
    files = [file for name in store.names() for file in store.files(name)]
    calibrations = local.calibrations_of(settings)
    task = ReferenceTask(
        settings.model,
        settings.dtype,
        not settings.download,
        settings.chat_template,
        None if calibrations is None else str(calibrations),
        tuple(map(str, files)),
    )
    reference = computed_apart(task, Path(KEPT).expanduser() / f"{_name_of(task)}.bin")
    vector = None if reference.vector is None else SteeringVector.load(Path(reference.vector))
    return reference, vector


def _name_of(task: ReferenceTask) -> str:
    """Return a name for the references of a task, which changes with the files that it reads."""
    folder = Path(task.model)
    read = [*(sorted(folder.iterdir()) if folder.is_dir() else ()), *map(Path, task.vectors)]
    read += [] if task.chat_template is None else [Path(task.chat_template)]
    stamps = [(str(file), stat.st_size, stat.st_mtime_ns) for file in read for stat in [file.stat()]]
    meaning = json.dumps([asdict(task), stamps, version("helmsight"), version("transformers")])
    return hashlib.sha256(meaning.encode()).hexdigest()[:32]
