"""What a step has the device do, and how often the host waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from steering.bench.device import wait
from steering.bench.rows import Gauge
from steering.bench.trial import Trial
from steering.engine.engine import Engine
from steering.protocol import readout
from steering.protocol.readout import Diagnose

TEXT = 32
WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"})
"""Calls of the host that end when the device has come so far."""
COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Launched:
    """Of one step. operators: what the host called that no other operator called. kernels, copies: what ran on the device,
    and for how many seconds. waits: how often the host waited for it."""

    operators: int
    kernels: int
    copies: int
    seconds: float
    waits: int


def launched(events: Iterable[Any]) -> Launched:
    """The sums over a profile's events."""
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
    """A decode step and a prompt's, plain and with every readout."""
    engine = trial.engine(max(trial.size.batches))
    everything = Diagnose(frozenset(readout.REGISTRY))
    for called, diagnose in (("plain", None), ("every readout", everything)):
        for rows in trial.size.batches[: 1 if trial.quick else None]:
            for step, found in zip(("prefill", "decode"), _profiled(trial, engine, rows, diagnose), strict=True):
                yield from _rows(f"{step}, {called}, {rows} at once", found)


def _profiled(trial: Trial, engine: Engine, rows: int, diagnose: Diagnose | None) -> Iterator[Launched]:
    """The step that takes all prompts in, the first token's and the first decode's; then one decode."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if trial.place.type == "cuda" else [])]
    for _ in range(2):  # the first time makes what is made at first use
        completions = [engine.submit(trial.ask(text=TEXT, diagnose=diagnose, tokens=6)) for _ in range(rows)]
        found = []
        for _ in ("prefill", "decode"):
            wait(trial.place)
            with profile(activities=activities) as profiled:
                engine.step()
                wait(trial.place)
            found.append(launched(profiled.events() or ()))
        while not all(completion.done for completion in completions):
            engine.step()
    return iter(found)


def _rows(what: str, found: Launched) -> Iterator[Gauge]:
    yield Gauge("launches", f"{what}: operators", found.operators, "a step")
    if found.kernels:
        note = f"and {found.copies} copies; {1e3 * found.seconds:.3g} ms on the device"
        yield Gauge("launches", f"{what}: kernels", found.kernels, "a step", note)
        yield Gauge(
            "launches",
            f"{what}: host waits",
            found.waits,
            "a step",
            "two are the benchmark's own, behind the step",
        )
    else:
        yield Gauge("launches", f"{what}: kernels", None, note="The profiler saw no kernels: they are a GPU's.")
