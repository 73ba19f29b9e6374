"""The cost of each registered intervention and readout, and of sampling, beside the plain greedy answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from steering.bench.answering import Clocked, answered
from steering.bench.asking import pushes
from steering.bench.rows import Gauge
from steering.bench.trial import Trial
from steering.errors import Fault, SteeringError
from steering.front.turn import decide
from steering.interventions.steer import Steering
from steering.interventions.think import Think
from steering.model.mllm import MLLM
from steering.protocol import intervention, readout
from steering.protocol.forms import example
from steering.protocol.intervention_spec import InterventionSpec, Options, vector_fields
from steering.protocol.readout import Diagnose

TEXT = 32
"""Words of each question, after a picture."""
PICTURE = (6, 6)
"""Tokens of the picture, (columns, rows)."""

MADE: Mapping[str, Callable[[MLLM], InterventionSpec]] = {
    Steering.name(): lambda mllm: Steering(pushes(mllm, 1)[0]),
    Think.name(): lambda mllm: Think(threshold=0.5),  # its default needs a calibration
}
"""Interventions whose defaults need vectors or a calibration, which a random model lacks, with their replacements."""


SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k, top_p and repetition_penalty": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
}
"""Options of sampling, by the name of their row; the last are the defaults of some checkpoints."""


def overhead(trial: Trial) -> Iterator[Gauge]:
    """Measure ratios to plain answers: of a step, of the time to the first token, and of the whole."""
    rows = max(trial.size.batches)
    engine = trial.engine(2 * rows)  # a contrast takes two slots

    def run(**options: Any) -> Clocked:
        """Time requests after a first run, which makes everything made at first use, graphs too.

        The requests that an intervention depends on run before.
        """
        first, timed = (
            [decide(engine, trial.ask(text=TEXT, picture=PICTURE, **options)) for _ in range(rows)] for _ in range(2)
        )
        engine.generate(first)
        return answered(engine, timed)

    plain = run()
    yield Gauge("overhead", f"plain, {rows} at once", 1e3 * plain.step, "ms a step")
    for name, options in everything(engine.mllm):
        try:
            times = run(**options())
        except SteeringError as reason:
            yield Gauge("overhead", name, None, note=str(reason))
            continue
        first, total = times.first / plain.first, times.whole / plain.whole
        note = f"first token {first:.2f}, whole answers {total:.2f}"
        yield Gauge("overhead", name, times.step / plain.step, "of a plain step", note)
    again = run()
    yield Gauge(
        "overhead", "plain, once more", again.step / plain.step, "of a plain step", "the noise of this measurement"
    )


def everything(mllm: MLLM) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield each registered intervention, readout and kind of sampling by name, with a maker of request options.

    All readouts together are among them.
    """
    for name, (kind, _) in intervention.REGISTRY.items():
        yield name, lambda name=name, kind=kind: {"interventions": [with_defaults(name, kind, mllm)]}  # type: ignore[misc]
    for name in readout.REGISTRY:
        yield f"readout {name}", lambda name=name: {"diagnose": Diagnose(frozenset({name}))}  # type: ignore[misc]
    yield "every readout", lambda: {"diagnose": Diagnose(frozenset(readout.REGISTRY))}
    for name, sampling in SAMPLINGS.items():
        yield name, lambda sampling=sampling: {"sampling": sampling}  # type: ignore[misc]


def with_defaults(name: str, kind: type[InterventionSpec], mllm: MLLM) -> InterventionSpec:
    """Return an intervention with its defaults; raise Fault where none are known."""
    if name in MADE:
        return MADE[name](mllm)
    if issubclass(kind, Options):
        vectors = dict.fromkeys(vector_fields(kind), pushes(mllm, 1)[0][0].vector)
        return kind(**{**example(kind), **vectors})
    raise Fault(f"No default is known for {name}: add one to steering/bench/extras.py.")
