"""The features of requests that vLLM servers support; others are refused, and the refusal names the field."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from steering.errors import Inapplicable
from steering.interventions.contrast import Icd
from steering.interventions.generate import Generate
from steering.interventions.see import See
from steering.interventions.steer import Steering
from steering.protocol import intervention, readout
from steering.protocol.intervention_spec import InterventionSpec
from steering.protocol.readout import Diagnose
from steering.protocol.request import Request
from steering.protocol.signals import Signal

ABILITIES: Mapping[str, str] = {
    "steering": "steer",
    "contrast.vcd": "vcd",
    "contrast.icd": "pairs",
    "sage.generate": "generate",
    "sage.think": "think",
    "sage.see": "see",
}
"""The ability of a server that each intervention needs; one that only changes the chat needs none."""
SIGNALS: Mapping[str, frozenset[Signal]] = {
    "attention": frozenset({Signal.SPANS, Signal.LAST, Signal.ANCHOR, Signal.DECAY}),
    "states": frozenset({Signal.PROMPT_STATE}),
    "residual": frozenset({Signal.UPDATES}),
    "stream": frozenset({Signal.STREAM}),
    "prompt_logprobs": frozenset({Signal.REPLY, Signal.PROMPT_LOGPROBS}),
}
"""The signals that each ability captures; log-probabilities of generated tokens every server has."""
NEEDED_BY = {Signal.PROMPT_STATE: "states", Signal.DIVERGENCE: "divergence", Signal.REPLY: "reply",
             Signal.PROMPT_LOGPROBS: "prompt_logprobs"}  # fmt: skip
"""The fields of a request that ask for signals by themselves."""


def _reading(spec: InterventionSpec) -> tuple[str, object] | None:
    reading = getattr(spec, "reading", None)
    return ("sage.see.reading", reading) if reading != "scale" else None


def _loop(spec: InterventionSpec) -> tuple[str, object] | None:
    loops = [steer.until for steer in getattr(spec, "steers", ()) if steer.until is not None]
    return ("steering.until", loops[0].number) if loops else None


def _form(spec: InterventionSpec) -> tuple[str, object] | None:
    form = getattr(spec, "form", None)
    return ("contrast.form", form) if form != "released" else None


def _scores(spec: InterventionSpec) -> tuple[str, object] | None:
    scores = getattr(spec, "scores", None)
    return ("sage.generate.scores", scores) if scores != "logits" else None


LIMITED: Mapping[str, Callable[[InterventionSpec], tuple[str, object] | None]] = {
    Steering.name(): _loop,
    See.name(): _reading,
    Icd.name(): _form,
    Generate.name(): _scores,
}
"""For interventions that are supported in part, a function that returns the unsupported field with its value."""


@dataclass(frozen=True)
class Supported:
    """The abilities that all servers have, by the plugin's names for them."""

    can: frozenset[str]

    @classmethod
    def of(cls, can: Collection[str]) -> Supported:
        return cls(frozenset(can))

    @property
    def interventions(self) -> frozenset[str]:
        """The names of the interventions that may be requested."""
        return frozenset(
            name
            for name, (kind, _) in intervention.REGISTRY.items()
            if kind.only_chat or ABILITIES.get(name) in self.can
        )

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals that can be captured."""
        captured = (signals for ability, signals in SIGNALS.items() if ability in self.can)
        return frozenset({Signal.LOGPROBS}).union(*captured)

    @property
    def readouts(self) -> frozenset[str]:
        """The names of the readouts that may be requested, at least with their default options."""
        captured = ((name, entry.signals(Diagnose([name]))) for name, entry in readout.REGISTRY.items())
        return frozenset(name for name, signals in captured if signals and signals <= self.signals)

    @property
    def states(self) -> bool:
        """True where the residual stream at the prompt's end is returned."""
        return "states" in self.can

    @property
    def grammars(self) -> bool:
        """True where answers can be constrained."""
        return "grammar" in self.can

    def check(self, request: Request) -> None:
        """Raise Inapplicable, naming the field, where a request asks for what no server can do."""
        for name, spec in request.asked.items():
            if name not in self.interventions:
                raise _unsupported(".".join(spec.path))
            if name in LIMITED and (limit := LIMITED[name](spec)) is not None:
                raise _unsupported(*limit)
        for entry in () if request.readouts is None else request.readouts.readouts:
            if request.readouts is not None and not entry.signals(request.readouts) <= self.signals:
                raise _unsupported(f"diagnostics.{entry.name}")
        for signal in request.signals - self.signals:
            raise _unsupported(NEEDED_BY.get(signal, "diagnostics"))
        if request.grammar is not None and not self.grammars:
            raise _unsupported(request.grammar.param)
        if request.tools is not None and request.tools.required and not self.grammars:
            raise _unsupported("tool_choice")
        self._check_forced(request)

    def _check_forced(self, request: Request) -> None:
        """Refuse forced tokens, which a server reads behind the prompt, where interventions act on them one by one."""
        acting = {name for name, spec in request.asked.items() if spec.twin or ABILITIES.get(name) == "think"}
        if request.forced and "prompt_logprobs" not in self.can:
            raise _unsupported("force")
        if request.forced and acting:
            message = f"'force' is not supported beside {min(acting)!r} by this server's engine, vLLM."
            raise Inapplicable(message, param="force", code="unsupported_value")


def _unsupported(param: str, value: object = None) -> Inapplicable:
    what = f"'{param}'" if value is None else f"'{param}' {value!r}"
    return Inapplicable(
        f"{what} is not supported by this server's engine, vLLM.", param=param, code="unsupported_value"
    )
