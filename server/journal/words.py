"""The words that the journal's filters accept; those of interventions and readouts are the registered ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

NONE = "none"
"""The word for rows without any."""
TOWARD = ("vision", "text", "other", NONE)
UNFINISHED = ("cancelled", "error", "shutdown")
"""Outcomes of unfinished answers: given up by the client or for time, failed, cut off by the server's shutdown."""
LIVE = "live"
SOURCES = (LIVE, "eval", "probe", "batch", "observe")
"""The sources of requests, live traffic, benchmarks and the like: few, because they are labels of metrics."""
BENCHMARKS = ("eval", "probe")
"""Those of measurements, which say nothing of what users ask."""
FINISH_REASONS = ("stop", "length", "tool_calls", *UNFINISHED)


class Words(NamedTuple):
    """A filter's title on a page, its subject and its accepted words."""

    title: str
    about: str
    allowed: Callable[[], tuple[str, ...]]

    def schema(self) -> dict[str, Any]:
        """Return the words as JSON schema."""
        return {"type": "string", "enum": list(self.allowed())}

    def check(self, name: str, word: str) -> None:
        """Raise ValueError, with the sentence to show, for a word that the filter of that name does not accept."""
        if word not in (words := self.allowed()):
            raise ValueError(f"'{name}' must be one of {', '.join(words)}; got {word[:64]!r}.")


def interventions(head: str = "") -> tuple[str, ...]:
    """Return the names of interventions that begin with `head`, without it, in the order of the registry."""
    # Imported late, so that commands that read a database do not wait for torch.
    from steering.protocol.intervention import REGISTRY  # noqa: PLC0415

    return *(name.removeprefix(head) for name in REGISTRY if name.startswith(head)), NONE


def flags() -> tuple[str, ...]:
    """Return the truth values of readouts, except the correctness of the focus, which is no flag."""
    from steering.protocol.readout import REGISTRY  # noqa: PLC0415

    scalars = [scalar for readout in REGISTRY.values() for scalar in readout.scalars.items()]
    return tuple(name for name, kind in scalars if kind is bool and name != "correct")


def with_numbers() -> tuple[str, ...]:
    """Return the readouts of which a journal's row has numbers."""
    from steering.protocol.readout import REGISTRY  # noqa: PLC0415

    return tuple(name for name, readout in REGISTRY.items() if readout.scalars)


WORDED = {
    "toward": Words("Toward", "the direction of steering: vision, text, other or none", lambda: TOWARD),
    "sage": Words("SAGE", "a stage of SAGE, or none", partial(interventions, "sage.")),
    "contrast": Words("Contrast", "a contrastive decoder, or none", partial(interventions, "contrast.")),
    "intervention": Words("Intervention", "an intervention by its name, such as sage.see, or none", interventions),
    "flag": Words("Flag", "a flag that a readout raised", flags),
    "finish_reason": Words(
        "Finish", "the outcome: stop, length, tool_calls, cancelled, error or shutdown", lambda: FINISH_REASONS
    ),
    "source": Words("Source", f"the source of the request: {', '.join(SOURCES)}", lambda: SOURCES),
}
"""The filters that accept one of a few words."""
