"""Faults of the plugin within a step: one in what an answer asked for ends that answer, and leaves all others as they are.

What is raised within a step ends vLLM's engine, and all answers with it. So what runs there for single answers is contained
here. Requests of answers that failed are named in the step's output, and the scheduler ends them before their tokens of that
step go out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from helmsight_vllm.plan import name_of

log = logging.getLogger(__name__)

KEPT = 1024
"""The number of failed answers whose errors are kept."""
FAILED = "helmsight_failed"
"""The attribute of a runner's output with the requests that the scheduler is to end."""


class Failing(Protocol):
    """An answer that can fail, by a name that both sides of a contrast pair have."""

    failed: bool

    @property
    def name(self) -> str:
        """The name by which it fails."""


class Part(NamedTuple):
    """Consecutive tokens of one answer among chosen ones: `begin` to `end` of these, the first of them at `start`."""

    answer: Any
    begin: int
    end: int
    start: int


@dataclass
class Chosen:
    """Tokens of a step: their rows (k,), and their parts by answer."""

    rows: torch.Tensor
    parts: list[Part]


Compute = Callable[[slice, Sequence[Part]], torch.Tensor]
"""Computes values (k, ...) of chosen tokens: of those in a slice, which are those of some parts."""


class Faults:
    """The errors of answers that failed, by name."""

    def __init__(self) -> None:
        self.errors: OrderedDict[str, str] = OrderedDict()
        self._untold = set[str]()

    def fail(self, name: str, error: Exception) -> None:
        """Let an answer fail; the log has the traceback of its first error."""
        self._untold.add(name)
        if name not in self.errors:
            log.error("the plugin failed in the answer %s, which ends", name, exc_info=error)
            self.errors[name] = f"{type(error).__name__}: {error}"
            while len(self.errors) > KEPT:
                self.errors.popitem(last=False)

    @contextmanager
    def of(self, answer: Failing) -> Iterator[None]:
        """Contain what is raised within, by which the answer fails."""
        try:
            yield
        except Exception as error:
            answer.failed = True
            self.fail(answer.name, error)

    def computed(self, chosen: Chosen, compute: Compute) -> torch.Tensor | None:
        """Return what is computed of chosen tokens, (k, ...), by one call.

        Where that raises, each answer's are computed alone: those fail that raise then, and their values are 0. None where
        all fail. `compute` must change nothing before it raises.
        """
        try:
            return compute(slice(0, len(chosen.rows)), chosen.parts)
        except Exception:
            log.warning("what was computed for several answers is computed for each alone", exc_info=True)
        alone = list[tuple[Part, torch.Tensor]]()
        for part in chosen.parts:
            if not part.answer.failed:
                with self.of(part.answer):
                    alone.append((part, compute(slice(part.begin, part.end), [part])))
        if not alone:
            return None
        values = alone[0][1].new_zeros(len(chosen.rows), *alone[0][1].shape[1:])
        for part, own in alone:
            values[part.begin : part.end] = own
        return values

    def agree(self, names: Sequence[str | None], total: Callable[[torch.Tensor], torch.Tensor]) -> set[str]:
        """Return those of some names that failed here or on another rank, where `total` sums a tensor over ranks."""
        failed = total(torch.tensor([float(name in self.errors) for name in names])).tolist()
        everywhere = {name for name, ranks in zip(names, failed, strict=True) if ranks and name is not None}
        for name in everywhere - self.errors.keys():
            self.fail(name, RuntimeError("another rank failed in this answer"))
        return everywhere

    def told(self, requests: Mapping[str, Any]) -> list[str]:
        """Return which of the runner's requests have failed since the last call."""
        untold, self._untold = self._untold, set()
        return [request for request, state in requests.items() if name_of(state) in untold] if untold else []
