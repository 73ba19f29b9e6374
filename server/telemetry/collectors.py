"""Numbers that others count, collected at each scrape: of the engine, its memory, its build, the journal."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version

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

from server.engine.runtime import Runtime
from server.journal.writer import Journal
from steering import Bins

_GAUGES = {
    "running": ("running", "Answers being generated now"),
    "waiting": ("waiting", "Answers waiting for a slot"),
    "slots": ("slots", "Answers that fit at the same time"),
    "max_waiting": ("max_waiting", "Answers that may wait"),
    "kv_tokens": ("kv_cache_tokens", "Tokens whose keys and values are kept"),
    "kv_max_tokens": ("kv_cache_max_tokens", "Tokens whose keys and values fit"),
    "kv_bytes": ("kv_cache_bytes", "Bytes allotted for keys and values"),
    "state_bytes": ("slot_state_bytes", "Bytes allotted for what interventions and recorders keep of every slot"),
    "image_cache_bytes": ("image_cache_bytes", "Bytes of cached image embeddings"),
    "processed_images_bytes": ("processed_images_bytes", "Bytes of images that are kept as the processor made them"),
    "compiled_in_use": ("compiled_in_use", "Compiled decode steps that are in use, 0 while steps run as they are"),
    "prefix_cache_bytes": ("prefix_cache_bytes", "Bytes of what is kept of the beginnings of prompts"),
    "pass_seconds": ("pass_seconds", "Seconds that a pass of prompts costs whatever its size, as measured"),
    "prompt_token_seconds": ("prompt_token_seconds", "Seconds that each prompt token of a pass costs, as measured"),
    "picture_seconds": ("picture_seconds", "Seconds that encoding a picture of the usual size takes, as measured"),
    "decode_seconds": ("decode_seconds", "Seconds of a step that only decodes the running answers, as measured"),
    "prompt_chunk_tokens": ("prompt_chunk_tokens", "Prompt tokens that a step takes in beside the running answers"),
    "gap_unreachable": (
        "gap_unreachable",
        "1 where passes or decodes take so long that --max-gap or --max-stall is exceeded",
    ),
    "resident_bytes": ("engine_resident_memory_bytes", "Bytes of memory of the engine's process, where it has its own"),
}
_COUNTERS = {
    "steps": "Engine steps",
    "compiled_steps": "Decode steps that ran compiled",
    "image_cache_hits": "Images whose embeddings were cached",
    "image_cache_misses": "Images that were encoded",
    "processed_images_hits": "Images that the processor had seen before",
    "processed_images_misses": "Images that it processed",
    "prefix_cache_queries": "Prompts of which it was looked whether their beginning is known",
    "prefix_cache_hits": "Prompts whose beginning was known",
    "faults": "Sequences that ended in an error",
    "cancelled": "Requests given up by their clients",
}
_BINS = {
    "queue_seconds": "Time that an answer waited for its slot",
    "prefill_seconds": "Time from an answer's slot to its first token",
    "inter_token_seconds": "Time between two tokens of an answer",
    "batch_size": "Rows of one decode: answers, and twins of those that are contrasted",
}

_GPU_MEMORY = {
    "allocated": "Bytes of GPU memory that tensors take",
    "reserved": "Bytes of GPU memory that torch holds",
    "free": "Bytes of GPU memory that nobody holds",
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
        able, stats = engine.capabilities, engine.stats()
        yield InfoMetricFamily(
            "helmsight_model",
            "What is served",
            {"model": able.name, "fingerprint": able.fingerprint, "device": able.device, "dtype": able.dtype},
        )
        for name, (called, text) in _GAUGES.items():
            if name in stats:
                yield GaugeMetricFamily(f"helmsight_{called}", text, stats[name])
        reading = "Requests whose pictures are decoded and read, or wait for that; the engine knows none of them yet"
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


class JournalCollector(Collector):
    """The journal's own numbers; none if it is switched off."""

    def __init__(self, journal: Journal):
        self.journal = journal

    def collect(self) -> Iterable[Metric]:
        journal = self.journal
        if not journal.enabled:
            return
        yield GaugeMetricFamily("helmsight_journal_up", "1 while rows are written", float(journal.state == "ok"))
        yield GaugeMetricFamily("helmsight_journal_waiting", "Rows that wait to be written", journal.waiting)
        rows = CounterMetricFamily("helmsight_journal_rows", "Rows written, and rows lost", labels=["outcome"])
        rows.add_metric(["written"], journal.written)
        rows.add_metric(["dropped"], journal.dropped)
        yield rows


def _histograms(found: Mapping[str, Bins]) -> Iterable[Metric]:
    for name, text in _BINS.items():
        if (bins := found.get(name)) is not None:
            bounds = [*map(floatToGoString, bins.bounds), "+Inf"]
            buckets = list(zip(bounds, bins.cumulative(), strict=True))
            yield HistogramMetricFamily(f"helmsight_{name}", text, buckets=buckets, sum_value=bins.total)


def _gpu_memory(stats: Mapping[str, float]) -> Iterable[Metric]:
    """Yield the engine's numbers of each GPU's memory; none without a GPU."""
    for kind, text in _GPU_MEMORY.items():
        start = f"gpu_memory_{kind}_bytes "
        found = {name.removeprefix(start): value for name, value in stats.items() if name.startswith(start)}
        if found:
            family = GaugeMetricFamily(f"helmsight_gpu_memory_{kind}_bytes", text, labels=["device"])
            for device, value in found.items():
                family.add_metric([device], value)
            yield family
