"""Names of OpenTelemetry's GenAI semantic conventions, in one place, since the conventions left the Python package.

They follow https://github.com/open-telemetry/semantic-conventions-genai (`docs/gen-ai/gen-ai-spans.md`,
`model/gen-ai/events.yaml`), whose status is Development.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from server.journal.scalars import scalars
from steering import Choice, Request
from steering.protocol.readout import REGISTRY

OPERATION = "chat"
PROVIDER = "helmsight"
EVALUATION = "gen_ai.evaluation.result"
"""The name of the event of one score of an answer."""

GEN_AI = {
    "operation": "gen_ai.operation.name",
    "provider": "gen_ai.provider.name",
    "requested_model": "gen_ai.request.model",
    "model": "gen_ai.response.model",
    "completion_id": "gen_ai.response.id",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "output_type": "gen_ai.output.type",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "n": "gen_ai.request.choice.count",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "name": "gen_ai.evaluation.name",
    "value": "gen_ai.evaluation.score.value",
    "label": "gen_ai.evaluation.score.label",
    "explanation": "gen_ai.evaluation.explanation",
}
"""The names by ours."""
HTTP = {"route": "http.route", "method": "http.request.method", "status": "http.response.status_code"}
ERROR = "error.type"
OWN = {
    "request_id": "helmsight.request_id",
    "interventions": "helmsight.interventions",
    "choice": "helmsight.choice",
    "tokens": "helmsight.tokens",
}
READOUT = "helmsight.readout."
"""The beginning of the attributes of readouts' numbers; the rest is the number's name."""
SAMPLED = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


class Score(NamedTuple):
    """A number or flag of an answer; `label` is that of a flag."""

    name: str
    value: float
    label: str | None
    explanation: str

    def attributes(self, completion_id: str) -> dict[str, Any]:
        """Return the attributes of its event."""
        fields = {**self._asdict(), "completion_id": completion_id}
        return {GEN_AI[name]: value for name, value in fields.items() if value is not None}


def requested(request: Request, model: str) -> dict[str, Any]:
    """Return the attributes of a request for a model as its client names it."""
    fields = {name: getattr(request.sampling, name) for name in SAMPLED}
    fields |= {"operation": OPERATION, "provider": PROVIDER, "requested_model": model, "output_type": "text"}
    if request.n != 1:
        fields["n"] = request.n
    return {GEN_AI[name]: value for name, value in fields.items() if value is not None}


def scores(numbers: Mapping[str, Any]) -> list[Score]:
    """Return the scores of an answer's numbers by name; those that are missing, or no number, have none."""
    about = explanations()
    result = []
    for name, value in numbers.items():
        if isinstance(value, bool):
            result.append(Score(name, float(value), "true" if value else "false", about.get(name, name)))
        elif isinstance(value, int | float):
            result.append(Score(name, float(value), None, about.get(name, name)))
    return result


def numbers_of(choice: Choice) -> dict[str, Any]:
    """Return a finished choice's numbers and flags that are known."""
    return {name: value for name, value in scalars(choice.applied, choice.diagnostics).items() if value is not None}


def explanations() -> dict[str, str]:
    """Return a sentence for each number that readouts keep."""
    sentences = {"dose": "Mean dose over the applied steering vectors", "answer_correct": "Whether the answer is right"}
    for readout in REGISTRY.values():
        for name, kind in readout.scalars.items():
            quantity = readout.quantities.get(name)
            own = f"{'Flag' if kind is bool else 'Number'} of the readout {readout.name}"
            text = own if quantity is None else quantity.about
            sentences[name] = f"{text} ({quantity.unit})" if quantity is not None and quantity.unit else text
    return sentences
