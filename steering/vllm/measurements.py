"""An answer's measurements by a vLLM server, as our recorders and interventions leave them in `Ended.taken`."""

from __future__ import annotations

from typing import Any

import torch

from steering.prompt.spans import REPLY
from steering.protocol.sequence import Spec
from steering.protocol.signals import Signal
from steering.recorders import attention, prompt_scores, prompt_state, reply, residual
from steering.recorders.prompt_scores import PromptScores
from steering.recorders.prompt_state import PromptState
from steering.recorders.residual import Residual
from steering.vllm.arrays import tensor_of
from steering.vllm.attention import SpanLabels, attention_of
from steering.vllm.forms import FORMS, Taken


def measured(spec: Spec, labels: SpanLabels | None, measurements: Taken, fed: int) -> dict[str, Any]:
    """Return the measurements by recorder and intervention.

    labels: those by which attention was summed. measurements: those that the server reports. fed: how many generated
    tokens went through the model. Raises KeyError or ValueError where something is missing or has another form.
    """
    out: dict[str, Any] = {}
    if labels is not None:
        sums = {name: tensor_of(array) for name, array in measurements["attention"].items()}
        out[attention.NAME] = attention_of(spec.prompt.layout, labels, sums, fed)
    if Signal.PROMPT_STATE in spec.signals:
        following = measurements.get("next_logprobs")
        out[prompt_state.NAME] = PromptState(
            tensor_of(measurements["states"]), None if following is None else tensor_of(following)
        )
    if (stream := measurements.get("residual")) is not None:
        sums, neurons, states = (stream.get(name) for name in ("sums", "neurons", "states"))
        layers = tensor_of(states).shape[1]
        nothing = torch.full((layers, len(residual.NAMES)), torch.nan)
        out[residual.NAME] = Residual(
            nothing if sums is None else tensor_of(sums),
            torch.full((layers,), torch.nan) if neurons is None else tensor_of(neurons),
            tensor_of(states),
        )
    if (scored := measurements.get("prompt_logprobs")) is not None:
        scores = prompt_scores_of(scored)
        if Signal.REPLY in spec.signals:
            out[reply.NAME] = scores.logprobs[spec.prompt.layout.columns(REPLY) - 1]
        if Signal.PROMPT_LOGPROBS in spec.signals:
            rows, top = spec.prompt.length - 1, spec.sampling.prompt_logprobs or 0
            out[prompt_scores.NAME] = PromptScores(
                scores.logprobs[:rows],
                scores.ranks[:rows],
                scores.top_ids[:rows, :top],
                scores.top_logprobs[:rows, :top],
            )
    for name in spec.asked:
        if name in FORMS:
            out[name] = FORMS[name].read(spec, measurements, fed)
    return out


def prompt_scores_of(scored: Any) -> PromptScores:
    """Return the scores of a prompt's tokens from the second one on."""
    logprobs, ranks, ids, values = (
        tensor_of(scored[name]) for name in ("logprobs", "ranks", "top_ids", "top_logprobs")
    )
    return PromptScores(logprobs, ranks.long(), ids.long(), values)
