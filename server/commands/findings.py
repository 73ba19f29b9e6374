"""The checks of `helmsight doctor`: a finding for everything that a server with these settings depends on."""

from __future__ import annotations

import os
import platform
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement

from server.access.ring import KeyRing, checked, count
from server.engine import resources
from server.process.preflight import check_place, preflight
from server.process.sources import merged, unknown
from server.settings import Settings, SettingsError, warnings_for
from server.startup.openmp import VARIABLES
from server.wording import one_sentence

if TYPE_CHECKING:
    from server.engine.served import Capabilities, ServedEngine

State = Literal["ok", "warning", "problem"]


ADVICE = {
    "device": "--device cpu runs the model without a GPU",
    "threads": "set their number with --threads",
    "model": "download it again, or choose another one with --model",
    "memory": "take fewer --slots or a smaller --max-length",
    "vectors": "choose other folders with --vectors",
    "prepared": "measure it again with 'helmsight prepare'",
    "presets": "correct that table of the file",
    "keys": "correct the file, or make one with 'helmsight keys add NAME --file FILE'",
    "journal": "choose another path with --journal (off for none), or move the existing file away",
    "port": "stop the program that listens there, or choose another port with --port",
}
"""Advice for a part with a problem."""
OF_REASON = {
    "newer_version": "upgrade Helmsight, or choose another path with --journal (off for none)",
    "unreachable": "check that the database server runs and accepts this machine and user",
}
"""Advice for a journal that does not open for a known reason."""
ROOM = 64 * 2**20
"""Free bytes of a disk below which a journal may soon run out of space."""
SOON = timedelta(days=7)
"""The time before a key's expiry in which that is a warning."""


@dataclass(frozen=True)
class Finding:
    """The state of a part, the observation, and advice."""

    part: str
    state: State
    said: str
    advice: str | None = None


def examine(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: str | None, load: bool = True
) -> Iterator[Finding]:
    """Yield every finding in the order of the page; `flags` are those of `serve`.

    The model is loaded if `load` is true.
    """
    yield from packages()
    for name, meant in unknown(environ):
        yield Finding(
            "settings", "warning", f"{name} is not a setting", f"did you mean {meant}?" if meant else "unset it"
        )
    try:
        settings = merged(flags, environ, config)
    except SettingsError as error:
        yield Finding("settings", "problem", str(error), "correct it; the checks that depend on settings were skipped")
        return
    yield from _guarded("keys", keys, settings)
    yield from _guarded("device", device, settings)
    yield from _guarded("threads", threads, settings)
    yield openmp(environ)
    yield compiler(settings)
    loaded: list[Capabilities] = []
    yield from _guarded("model", lambda settings: model(settings, load, loaded), settings)
    yield from _guarded(
        "vectors", lambda settings: vectors(settings, loaded[0].fingerprint if loaded else None), settings
    )
    yield from _guarded("presets", lambda settings: presets(settings, loaded[0] if loaded else None), settings)
    yield from _guarded("prepared", lambda settings: prepared(settings, loaded[0] if loaded else None), settings)
    yield from _guarded("journal", journal, settings)
    yield from _guarded("port", port, settings)


def _guarded(part: str, look: Callable[[Settings], Iterator[Finding]], settings: Settings) -> Iterator[Finding]:
    """Yield the findings of a part; an exception becomes one."""
    try:
        yield from look(settings)
    except Exception as error:  # no error may stop the rest of the page
        advice = OF_REASON.get(getattr(error, "reason", ""), ADVICE[part])
        yield Finding(part, "problem", one_sentence(error), advice)


def keys(settings: Settings) -> Iterator[Finding]:
    """Yield the number of accepted keys if keys are required, and a warning if they should be."""
    yield from (Finding("settings", "warning", warning, "set --api-key") for warning in warnings_for(settings))
    if settings.asks_for_key:
        path = settings.named_key_file
        named = count(checked(Path(path).expanduser())) if path is not None else 0
        yield Finding("keys", "ok", f"{len(settings.keys) + named} keys, {named} of them with a name")
        for name, expires in KeyRing(named=path).expiries().items():
            if expires < (now := datetime.now(UTC)) + SOON:
                time = f"{expires:%Y-%m-%d %H:%M} UTC"
                message = f"the key {name!r} expire{'s' if expires > now else 'd'} at {time}"
                message += "" if expires > now else ": its requests are refused"
                yield Finding("keys", "warning", message, f"helmsight keys rotate {name} --expires TIME --file {path}")


def packages() -> Iterator[Finding]:
    """Yield Python's version, and each package that is missing or of an untested version."""
    outside = []
    for line in metadata.requires("helmsight") or ():
        required = Requirement(line)
        if required.marker is not None and not required.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(required.name)
        except metadata.PackageNotFoundError:
            yield Finding("packages", "problem", f"{required.name} is missing", f"pip install '{required}'")
            continue
        if not required.specifier.contains(version, prereleases=True):
            outside.append((required, version))
    for required, version in outside:
        message = f"{required.name} {version} is not among the tested versions, {required.specifier}"
        yield Finding("packages", "warning", message, f"pip install '{required}'")
    core = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    yield Finding(
        "packages", "ok", f"helmsight {metadata.version('helmsight')}, Python {platform.python_version()}, {core}"
    )


def device(settings: Settings) -> Iterator[Finding]:
    """Yield the device that the model would run on."""
    import torch

    count = torch.cuda.device_count()
    if settings.device == "cpu" or (settings.device == "auto" and not count):
        gpu = next(iter(Path("/dev").glob("nvidia[0-9]*")), None)
        if settings.device == "auto" and gpu is not None:
            advice = "install a torch built for CUDA, and a driver that it supports"
            yield Finding("device", "warning", f"cpu: torch sees no GPU, although the machine has {gpu}", advice)
        else:
            yield Finding("device", "ok", "cpu")
        return
    for index in range(count):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        name = torch.cuda.get_device_name(index)
        yield Finding("device", "ok", f"cuda:{index}: {name}, {free:.1f} of {total:.1f} GiB free")


def threads(settings: Settings) -> Iterator[Finding]:
    """Yield the engine's number of threads and the processors available to it."""
    from server.engine.local import engine_threads

    used, most = engine_threads(settings), resources.processors()
    quota = resources.cpu_quota()
    limit = "" if quota is None else f", and a control group's quota of {quota:g}"
    message = f"{used} threads on {len(os.sched_getaffinity(0))} processors{limit}"
    if used > most:
        advice = f"--threads {most}: more threads than processors slow every step down"
        yield Finding("threads", "warning", message, advice)
    else:
        yield Finding("threads", "ok", message)


def openmp(environ: Mapping[str, str]) -> Finding:
    """Return whether waiting OpenMP threads go to sleep soon."""
    variables = ", ".join(f"{name}={environ[name]}" for name in (*VARIABLES, "OMP_NUM_THREADS") if name in environ)
    count = environ.get("GOMP_SPINCOUNT", "infinity" if environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE" else "")
    spinning = "INFINIT" in count.upper()
    advice = "unset it: spinning threads take processor time from those that they wait for"
    return Finding("openmp", "warning" if spinning else "ok", variables or "nothing set", advice if spinning else None)


def compiler(settings: Settings) -> Finding:
    """Return whether steps can be compiled."""
    from server.engine import local

    if settings.compiled is False:
        return Finding("compiler", "ok", "not needed: steps run eagerly")
    name, path = local.compiler()
    if path is not None:
        return Finding("compiler", "ok", f"{path}, which compiles steps")
    return Finding("compiler", "warning", f"there is no {name}: steps run eagerly, which is slower", f"install {name}")


def model(settings: Settings, load: bool, loaded: list[Capabilities]) -> Iterator[Finding]:
    """Yield whether the model's files are complete, and whether it loads and passes its self-check.

    Its capabilities are appended to `loaded`.
    """
    preflight(settings.model_copy(update={"api_key_file": None, "named_key_file": None}), place=False)
    if not load:
        yield Finding("model", "ok", f"{settings.model}: its files are complete; it was not loaded")
        return
    from transformers.utils import logging as transformers_logging

    from server.engine import local

    transformers_logging.disable_progress_bar()
    begun = time.monotonic()
    engine = local.load(settings if settings.compiled else settings.model_copy(update={"compiled": False}))
    loaded.append(engine.capabilities)
    facts, seconds = engine.capabilities, time.monotonic() - begun
    if (warning := local.cut_length(settings, facts)) is not None:
        yield Finding("model", "warning", warning, "choose a smaller --max-length, or leave it out")
    yield Finding(
        "model", "ok", f"{facts.name}: {facts.layers} layers, {facts.quantization or facts.dtype} on {facts.device}, "
        f"context of {facts.context_length} tokens; loaded and self-checked in {seconds:.1f} s",
    )  # fmt: skip
    yield from _guarded("memory", lambda _: memory(engine), settings)


def memory(engine: ServedEngine) -> Iterator[Finding]:
    """Yield the memory of the slots, after a first prompt, which allocates it and fails if it does not fit."""
    from steering import Request, Sampling

    engine.start()
    try:
        with engine.turn() as turn:
            turn.submit(Request([{"role": "user", "content": "?"}], Sampling(max_tokens=1))).result()
        stats = engine.stats()
    finally:
        engine.stop()
    slots, tokens = int(stats["slots"]), int(stats["kv_max_tokens"])
    kv_bytes, state = stats["kv_bytes"], stats["state_bytes"] / 2**20
    yield Finding(
        "memory", "ok", f"{slots} slots of {tokens // slots:,} tokens: {kv_bytes / 2**20:,.0f} MiB for keys and values "
        f"({kv_bytes / tokens:,.0f} bytes a token), {state:,.0f} MiB for what is recorded and set",
    )  # fmt: skip


def vectors(settings: Settings, fingerprint: str | None) -> Iterator[Finding]:
    """Yield the vectors of each folder that match the model."""
    from server.engine.runtime import vector_store
    from steering import SteeringVector, VectorError

    store = vector_store(settings, Path(settings.model).expanduser())
    for folder in dict.fromkeys(store.folders):
        if not folder.is_dir():
            yield Finding("vectors", "ok", f"{folder}: there is no such folder yet")
            continue
        fitting: list[str] = []
        strange: list[str] = []
        for file in sorted(folder.glob("*.safetensors")):
            try:
                vector = SteeringVector.load(file)
            except (VectorError, OSError) as error:
                yield Finding("vectors", "warning", f"{file}: {one_sentence(error)}", "create it again, or remove it")
                continue
            (fitting if fingerprint in (None, vector.fingerprint) else strange).append(file.stem)
        names = ", ".join(fitting) or "none for this model"
        others = f"; of other models: {', '.join(strange)}" if strange else ""
        yield Finding("vectors", "ok", f"{folder}: {names}{others}")


def presets(settings: Settings, capabilities: Capabilities | None) -> Iterator[Finding]:
    """Yield the presets, and those of the settings that name a missing vector.

    Built-in presets are only known if the model was loaded.
    """
    from server.engine.runtime import vector_store
    from server.requests.preset import AT, built_in
    from server.requests.presets import Presets
    from server.wire.chat import ChatRequest, with_interventions
    from steering import VectorError

    own = Presets.of(settings, with_interventions(ChatRequest))
    store = vector_store(settings, Path(settings.model).expanduser(), capabilities)
    for preset in own.own.values():
        for name in own.vectors(preset):
            try:
                store.get(name)
            except (VectorError, OSError) as error:
                message = f"{AT}{preset.name} ({preset.source}): {one_sentence(error)}"
                yield Finding(
                    "presets", "warning", message, "create that vector; until then the preset is used without it"
                )
    if capabilities is None:
        names = ", ".join(AT + name for name in own.own) or "none"
        yield Finding("presets", "ok", f"from the settings: {names}; those of the model are unknown until it is loaded")
    else:
        names = ", ".join(AT + name for name in {**built_in(capabilities, store), **own.own}) or "none"
        yield Finding("presets", "ok", names)


def prepared(settings: Settings, capabilities: Capabilities | None) -> Iterator[Finding]:
    """Yield each part that is measured once for a model, and whether it is there."""
    from server.engine.runtime import vector_store
    from server.requests.readiness import measured
    from steering.readiness import advice, states

    if capabilities is None:
        yield Finding("prepared", "ok", "what is measured for the model is unknown until it is loaded")
        return
    store = vector_store(settings, Path(settings.model).expanduser(), capabilities)
    for state in states(measured(capabilities, store)):
        if state.there:
            yield Finding("prepared", "ok", state.said)
        else:
            yield Finding("prepared", "warning", state.said, advice(state.part, settings.model))


def journal(settings: Settings) -> Iterator[Finding]:
    """Yield whether the journal opens, its revision and its number of rows, without changing it."""
    from sqlalchemy import func, select, text

    from server.journal.database import Place, open_database
    from server.journal.errors import JournalError
    from server.journal.schema import ROWS, VERSION_TABLE

    setting = settings.journal.get_secret_value()
    if setting.strip().lower() == "off":
        yield Finding("journal", "ok", "off")
        return
    place = Place.of(setting)
    if place.path is not None:
        folder = next(parent for parent in place.path.absolute().parents if parent.is_dir())
        if (free := shutil.disk_usage(folder).free) < ROOM:
            message = f"{place.shown}: its disk has {free / 2**20:.0f} MiB left"
            yield Finding("journal", "warning", message, "free disk space, or choose another path with --journal")
    try:
        database = open_database(place, create=False, upgrade=False)
    except JournalError as error:
        if error.reason != "missing":
            raise
        yield Finding("journal", "ok", f"{place.shown}: does not exist yet; the first start creates it")
        return
    try:
        with database.engine.connect() as connection:
            revision = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one()
            rows = connection.execute(select(func.count()).select_from(ROWS)).scalar_one()
    finally:
        database.close()
    yield Finding("journal", "ok", f"{place.shown}: revision {revision}, {rows:,} rows")


def port(settings: Settings) -> Iterator[Finding]:
    """Yield whether a server could listen on the port, or already does."""
    where = settings.address
    try:
        check_place(settings)
    except SettingsError as error:
        try:
            with urllib.request.urlopen(f"{where}/ready", timeout=2) as answer:
                serving = b'"journal"' in answer.read(1000)
        except (OSError, ValueError):
            serving = False
        if not serving:
            raise
        yield Finding("port", "warning", f"{error}", "it is a Helmsight server, which is ready")
        return
    chosen = not settings.port and not settings.host.startswith("unix:")
    yield Finding("port", "ok", "--port 0: a free port would be chosen" if chosen else f"{where} is free")
