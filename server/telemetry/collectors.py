"""Numbers that others count, collected at each scrape: of the engine, its memory, its build, the journal."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from typing import Any

import torch
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from server.engine.runtime import Runtime, Serving
from server.journal.writer import Journal
from server.requests.readiness import readouts_available
from steering import Histogram, VectorError

_GAUGES = {
    "running": ("running", "Answers being generated"),
    "waiting": ("waiting", "Answers waiting for a slot"),
    "slots": ("slots", "Answers that can be generated at the same time"),
    "max_waiting": ("max_waiting", "Answers that may wait for a slot"),
    "kv_tokens": ("kv_cache_tokens", "Tokens in the KV cache"),
    "kv_max_tokens": ("kv_cache_max_tokens", "Tokens that fit into the KV cache"),
    "kv_bytes": ("kv_cache_bytes", "Bytes allocated for the KV cache"),
    "state_bytes": ("slot_state_bytes", "Bytes allocated for the slots' state of interventions and recorders"),
    "image_cache_bytes": ("image_cache_bytes", "Bytes of cached image embeddings"),
    "processed_images_bytes": ("processed_images_bytes", "Bytes of cached images preprocessed by the processor"),
    "compiled_in_use": ("compiled_in_use", "Compiled decode steps in use, 0 while steps run eagerly"),
    "prefix_cache_bytes": ("prefix_cache_bytes", "Bytes in the prefix cache"),
    "pass_seconds": ("pass_seconds", "Measured seconds of a prefill pass independent of its size"),
    "prompt_token_seconds": ("prompt_token_seconds", "Measured seconds of each prompt token of a prefill pass"),
    "picture_seconds": ("picture_seconds", "Measured seconds of encoding an image of the usual size"),
    "decode_seconds": ("decode_seconds", "Measured seconds of a step that only decodes the running answers"),
    "prompt_chunk_tokens": ("prompt_chunk_tokens", "Prompt tokens that a step prefills beside the running answers"),
    "gap_unreachable": (
        "gap_unreachable",
        "1 if prefill passes or decodes take so long that --max-gap or --max-stall is exceeded",
    ),
    "servers": ("engine_servers", "vLLM servers behind this one"),
    "servers_ready": ("engine_servers_ready", "vLLM servers behind this one that answer"),
    "resident_bytes": ("engine_resident_memory_bytes", "Resident bytes of the engine's process, if it has its own"),
}
_COUNTERS = {
    "steps": "Engine steps",
    "compiled_steps": "Decode steps that ran compiled",
    "image_cache_hits": "Images whose embeddings were cached",
    "image_cache_misses": "Images that were encoded",
    "processed_images_hits": "Images whose preprocessing was cached",
    "processed_images_misses": "Images that the processor preprocessed",
    "prefix_cache_queries": "Prompts looked up in the prefix cache",
    "prefix_cache_hits": "Prompts with a prefix in the cache",
    "faults": "Sequences that ended in an error",
    "cancelled": "Requests cancelled by their clients",
}
_BINS = {
    "queue_seconds": "Time that an answer waited for a slot",
    "prefill_seconds": "Time from getting a slot to the first token",
    "inter_token_seconds": "Time between two tokens of an answer",
    "batch_size": "Rows of a decode batch: answers and their contrast branches",
}

_GPU_MEMORY = {
    "allocated": "Bytes of GPU memory allocated to tensors",
    "reserved": "Bytes of GPU memory reserved by torch",
    "free": "Bytes of free GPU memory",
    "total": "Bytes of GPU memory",
}


class EngineCollector(Collector):
    """The engine's own numbers, and the versions of engine and model."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily(
            "helmsight_build",
            "Versions",
            {"version": version("helmsight"), "python": platform.python_version(), "torch": torch.__version__},
        )
        yield GaugeMetricFamily("helmsight_ready", "1 while requests are served", float(self.runtime.state == "ready"))
        if self.runtime.loaded is None:
            return
        engine = self.runtime.loaded.engine
        capabilities, stats = engine.capabilities, engine.stats()
        yield InfoMetricFamily(
            "helmsight_model",
            "The served model",
            {
                "model": capabilities.name,
                "fingerprint": capabilities.fingerprint,
                "device": capabilities.device,
                "dtype": capabilities.dtype,
            },
        )
        yield from _calibrated_shares(capabilities.about.get("calibration") or {})
        yield from _digests(self.runtime.loaded)
        available = GaugeMetricFamily(
            "helmsight_readout_available",
            "0 for readouts whose values are null without calibration",
            labels=["readout"],
        )
        for name, there in readouts_available(self.runtime.loaded).items():
            available.add_metric([name], float(there))
        yield available
        for name, (called, text) in _GAUGES.items():
            if name in stats:
                yield GaugeMetricFamily(f"helmsight_{called}", text, stats[name])
        reading = "Requests whose images are being prepared, or wait for it, before the engine"
        yield GaugeMetricFamily("helmsight_reading", reading, self.runtime.loaded.pictures.held)
        for name, text in _COUNTERS.items():
            if name in stats:
                yield CounterMetricFamily(f"helmsight_{name}", text, stats[name])
        tokens = CounterMetricFamily("helmsight_tokens", "Tokens through the engine", labels=["kind"])
        for kind, name in (
            ("prompt", "prompt_tokens"),
            ("generated", "generated_tokens"),
            ("cached", "prefix_cache_tokens"),
        ):
            tokens.add_metric([kind], stats.get(name, 0))
        yield tokens
        yield from _histograms(engine.bins)
        yield from _gpu_memory(stats)


def _calibrated_shares(calibration: Mapping[str, Any]) -> Iterable[Metric]:
    """Yield how often each flag was raised on right and on wrong answers when it was calibrated; nothing if none was."""
    raised = dict((calibration.get("flags") or {}).get("raised", {}))
    raised["alarm"] = (calibration.get("alarm") or {}).get("raised", {})
    text = "Share of right and of wrong answers on which a flag was raised when it was calibrated"
    shares = GaugeMetricFamily("helmsight_flag_calibrated_share", text, labels=["flag", "answers"])
    for flag, measured in raised.items():
        for answers in ("right", "wrong"):
            if measured.get(answers) is not None:
                shares.add_metric([flag, answers], measured[answers][0])
    if shares.samples:
        yield shares


def _digests(serving: Serving) -> Iterable[Metric]:
    """Yield what the model's calibration and the names of its vectors stand for now."""
    calibrated = serving.engine.calibration()
    if calibrated is not None and calibrated.digest is not None:
        yield InfoMetricFamily("helmsight_calibration", "The model's calibration", {"digest": calibrated.digest})
    vectors = InfoMetricFamily("helmsight_vector", "The steering vectors of the model", labels=["vector"])
    for name in serving.store.names():
        with suppress(VectorError, OSError):
            vector = serving.store.get(name)
            if vector.fingerprint == serving.capabilities.fingerprint:
                vectors.add_metric([name], {"digest": vector.identity})
    yield vectors


class JournalCollector(Collector):
    """The journal's own numbers; none if it is switched off. `readouts` are those that it has computed of every answer."""

    def __init__(self, journal: Journal, readouts: Iterable[str]):
        self.journal = journal
        self.readouts = sorted(readouts)

    def collect(self) -> Iterable[Metric]:
        journal = self.journal
        if not journal.enabled:
            return
        yield GaugeMetricFamily("helmsight_journal_up", "1 while rows are written", float(journal.state == "ok"))
        yield GaugeMetricFamily("helmsight_journal_waiting", "Rows that wait to be written", journal.waiting)
        rows = CounterMetricFamily("helmsight_journal_rows", "Rows written or dropped", labels=["outcome"])
        rows.add_metric(["written"], journal.written)
        rows.add_metric(["dropped"], journal.dropped)
        yield rows
        text = "1 for each readout that is computed of every answer for the journal"
        readouts = GaugeMetricFamily("helmsight_journal_readouts", text, labels=["readout"])
        for name in self.readouts:
            readouts.add_metric([name], 1)
        if self.readouts:
            yield readouts


class KeyCollector(Collector):
    """The expiry of each named key that has one."""

    def __init__(self, expiries: Callable[[], Mapping[str, datetime]]):
        self.expiries = expiries

    def collect(self) -> Iterable[Metric]:
        text = "Unix time at which a key with an expiry is no longer accepted"
        expiry = GaugeMetricFamily("helmsight_key_expiry_timestamp_seconds", text, labels=["key"])
        for name, expires in self.expiries().items():
            expiry.add_metric([name], expires.timestamp())
        if expiry.samples:
            yield expiry


def _histograms(histograms: Mapping[str, Histogram]) -> Iterable[Metric]:
    for name, text in _BINS.items():
        if (bins := histograms.get(name)) is not None:
            bounds = [*map(floatToGoString, bins.bounds), "+Inf"]
            buckets = list(zip(bounds, bins.cumulative(), strict=True))
            yield HistogramMetricFamily(f"helmsight_{name}", text, buckets=buckets, sum_value=bins.total)


def _gpu_memory(stats: Mapping[str, float]) -> Iterable[Metric]:
    """Yield the engine's numbers of each GPU's memory; none without a GPU."""
    for kind, text in _GPU_MEMORY.items():
        start = f"gpu_memory_{kind}_bytes "
        by_device = {name.removeprefix(start): value for name, value in stats.items() if name.startswith(start)}
        if by_device:
            family = GaugeMetricFamily(f"helmsight_gpu_memory_{kind}_bytes", text, labels=["device"])
            for device, value in by_device.items():
                family.add_metric([device], value)
            yield family
