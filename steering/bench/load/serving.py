"""Throughput for callers that each send a new picture: through the engine alone, beside what its own steps would allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from steering.bench.answering import answered
from steering.bench.asking import pushes
from steering.bench.load.callers import CallerTimes, ask_all
from steering.bench.rows import Gauge
from steering.bench.trial import Trial
from steering.front.engine import Engine
from steering.interventions.see import See
from steering.interventions.steer import Steering
from steering.model.mllm import MLLM
from steering.protocol.readout import Diagnose
from steering.protocol.request import Request

TEXT = 24
"""Words of a question after its picture."""


@dataclass(frozen=True)
class RequestKind:
    """A kind of request. options: of a request to the engine. fields: of a body over HTTP."""

    name: str
    options: dict[str, Any]
    fields: dict[str, Any]


def kinds(mllm: MLLM | None = None) -> list[RequestKind]:
    """Return plain answers, steered ones with readouts, and enhanced ones; without a model only the bodies' fields."""
    steering = () if mllm is None else (Steering(pushes(mllm, 1)[0]),)
    focus, readouts = frozenset({"focus"}), frozenset({"focus", "modality"})
    steered = {"steering": {"toward": "vision"}, "diagnostics": {"include": sorted(readouts)}}
    see = {"sage": {"see": True, "think": False, "generate": False}, "diagnostics": {"include": ["focus"]}}
    return [
        RequestKind("plain", {}, {}),
        RequestKind("steered, with readouts", {"interventions": steering, "diagnose": Diagnose(readouts)}, steered),
        RequestKind("See", {"interventions": (See(),), "diagnose": Diagnose(focus)}, see),
    ]


def serving(trial: Trial) -> Iterator[Gauge]:
    """Measure tokens a second, first tokens and gaps of each kind of request by the number of callers."""
    engine = trial.engine(max(trial.size.callers))
    kinds_of = kinds(engine.mllm)
    allowed = {callers: _attainable_rate(trial, engine, callers) for callers in trial.size.callers}
    engine.start()
    try:
        for kind in kinds_of:
            for callers in trial.size.callers:
                requests = [_request(trial, kind) for _ in range(callers + max(4, 2 * callers))]
                ask_all(engine.submit, requests[:callers], callers)  # makes everything made at first use
                times = ask_all(engine.submit, requests[callers:], callers)
                yield from rows_of("serving", f"{kind.name}, {callers} callers", times, trial.size.answer)
                share = len(times.first) * trial.size.answer / times.whole / allowed[callers]
                label = f"{kind.name}, {callers} callers"
                yield Gauge("serving", label, 100 * share, "% of what plain steps and prompts allow")
    finally:
        engine.stop()


def rows_of(section: str, label: str, times: CallerTimes, tokens: int) -> Iterator[Gauge]:
    """Yield the figures of callers whose answers had `tokens` tokens each."""
    yield Gauge(section, label, len(times.first) * tokens / times.whole, "tokens/s")
    yield Gauge(section, label, 1e3 * times.median_first, "ms to the first token, median")
    yield Gauge(section, label, 1e3 * times.long_gap, "ms between tokens, 99th percentile")


def _request(trial: Trial, kind: RequestKind) -> Request:
    return trial.ask(text=TEXT, picture=trial.size.picture, tokens=trial.size.answer, **kind.options)


def _attainable_rate(trial: Trial, engine: Engine, callers: int) -> float:
    """Return the tokens a second of plain answers if steps and prompts took as long as by themselves.

    A caller's cycle is the steps of an answer, and the prompts of all callers.
    """
    plain = RequestKind("plain", {}, {})
    for _ in range(2):
        times = answered(engine, [trial.ask(text=TEXT, tokens=callers + 6) for _ in range(callers)])
    together = min(callers, 8)
    prompts = [answered(engine, [_request(trial, plain) for _ in range(together)]).first / together for _ in range(2)][
        -1
    ]
    return callers * trial.size.answer / (trial.size.answer * times.step + callers * prompts)
