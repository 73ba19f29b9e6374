"""The device operations of a step, and the number of times that the host waits for the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from steering.bench.device import wait
from steering.bench.rows import Gauge
from steering.bench.trial import Trial
from steering.front.engine import Engine
from steering.protocol import readout
from steering.protocol.readout import Diagnose

TEXT = 32
WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"})
"""Host calls that return once the device has reached them."""
COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Launched:
    """The counts of one step.

    operators: top-level operators that the host called. kernels, copies: the work on the device. seconds: its time. waits:
    the number of times that the host waited for it.
    """

    operators: int
    kernels: int
    copies: int
    seconds: float
    waits: int


def launched(events: Iterable[Any]) -> Launched:
    """Return the sums over a profile's events."""
    operators = kernels = copies = waits = 0
    spent = 0.0
    for event in events:
        if event.device_type == DeviceType.CUDA:
            copied = event.name.startswith(COPIES)
            kernels, copies = kernels + (not copied), copies + copied
            spent += event.time_range.elapsed_us() / 1e6
        else:
            waits += event.name in WAITS
            parent = event.cpu_parent
            operators += event.name.startswith("aten::") and (parent is None or not parent.name.startswith("aten::"))
    return Launched(operators, kernels, copies, spent, waits)


def launches(trial: Trial) -> Iterator[Gauge]:
    """Measure a decode step and a prefill step, plain and with every readout."""
    engine = trial.engine(max(trial.size.batches))
    everything = Diagnose(frozenset(readout.REGISTRY))
    for label, diagnose in (("plain", None), ("every readout", everything)):
        for rows in trial.size.batches[: 1 if trial.quick else None]:
            for step, sums in zip(("prefill", "decode"), _profile_steps(trial, engine, rows, diagnose), strict=True):
                yield from _rows(f"{step}, {label}, {rows} at once", sums)


def _profile_steps(trial: Trial, engine: Engine, rows: int, diagnose: Diagnose | None) -> Iterator[Launched]:
    """Profile the step that prefills all prompts, samples first tokens and decodes once; then one decode."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if trial.place.type == "cuda" else [])]
    for _ in range(2):  # the first run makes everything made at first use
        completions = [engine.submit(trial.ask(text=TEXT, diagnose=diagnose, tokens=6)) for _ in range(rows)]
        profiles = []
        for _ in ("prefill", "decode"):
            wait(trial.place)
            with profile(activities=activities) as profiled:
                engine.step()
                wait(trial.place)
            profiles.append(launched(profiled.events() or ()))
        while not all(completion.done for completion in completions):
            engine.step()
    return iter(profiles)


def _rows(label: str, sums: Launched) -> Iterator[Gauge]:
    yield Gauge("launches", f"{label}: operators", sums.operators, "per step")
    if sums.kernels:
        note = f"and {sums.copies} copies; {1e3 * sums.seconds:.3g} ms on the device"
        yield Gauge("launches", f"{label}: kernels", sums.kernels, "per step", note)
        yield Gauge(
            "launches",
            f"{label}: host waits",
            sums.waits,
            "per step",
            "two of them belong to the benchmark, after the step",
        )
    else:
        yield Gauge("launches", f"{label}: kernels", None, note="The profiler saw no kernels: only GPUs have them.")
