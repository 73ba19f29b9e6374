"""The self-check at the start: vLLM's answers are compared with plain transformers', so that wrong ones are refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from steering.errors import SteeringError, UnsupportedModel
from steering.front.client import Client
from steering.interventions.steer import Steer
from steering.protocol.request import Choice, Request, Sampling
from steering.runner.selfcheck import HALF_TOLERANCE, TOLERANCE
from steering.vectors.vector import SteeringVector
from steering.vllm.reference import STEPS, Reference, ReferenceAnswer, chat_of

log = logging.getLogger(__name__)

MARGIN, HALF_MARGIN = 1e-3, 0.2
"""Nats by which a token must exceed the next likeliest one for its answer to be compared: in float32, and in less."""


def check_servers(client: Client, reference: Reference, vector: SteeringVector | None, states: bool) -> None:
    """Compare answers of vLLM, plain and steered, with those of plain transformers.

    `states`: the servers return the residual stream. Raises UnsupportedModel, naming the first layer that differs where they
    do, else the first token.
    """
    answers = [answer for answer in reference.answers if vector is not None or not answer.strength]
    requests = [
        Request(
            chat_of(answer.question),
            Sampling(max_tokens=STEPS),
            [Steer(vector, answer.strength)] if vector is not None and answer.strength else (),
            states=states,
        )
        for answer in answers
    ]
    try:
        results = client.generate(requests)
    except SteeringError as error:
        raise UnsupportedModel(f"{client.mllm.name} cannot be served: it failed in the self-check: {error}") from error
    half = client.mllm.dtype != torch.float32
    for answer, result in zip(answers, results, strict=True):
        _compare(client.mllm.name, answer, result.choices[0], half)
    log.info(
        "%d answers of vLLM, %d of them steered, are those of plain transformers",
        len(answers), sum(bool(answer.strength) for answer in answers),
    )  # fmt: skip


def _compare(name: str, answer: ReferenceAnswer, choice: Choice, half: bool) -> None:
    where = f"question {answer.question + 1}" + (f", steered by {answer.strength:g}" if answer.strength else "")
    if choice.states is not None:
        layer, difference = _first_difference(answer.states, choice.states, HALF_TOLERANCE if half else TOLERANCE)
        if layer is not None:
            raise UnsupportedModel(
                f"{name} cannot be served exactly by vLLM: its states differ from the plain model's by {difference:.1e}, "
                f"first at decoder layer {layer} ({where})."
            )
    step = _first_token(answer, choice.token_ids, HALF_MARGIN if half else MARGIN)
    if step is not None:
        got = choice.token_ids[step] if step < len(choice.token_ids) else None
        raise UnsupportedModel(
            f"{name} cannot be served exactly by vLLM: token {step + 1} of an answer is {got}, where the plain model "
            f"says {answer.tokens[step] if step < len(answer.tokens) else None} ({where})."
        )


def _first_difference(expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> tuple[int | None, float]:
    """Return the first layer whose state differs, relative to its norm, and the difference; None where none does."""
    difference = (expected - got).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    wrong = ~(difference <= tolerance)  # NaN counts as a difference
    if not bool(wrong.any()):
        return None, 0.0
    layer = int(wrong.nonzero()[0])
    return layer, float(difference[layer])


def _first_token(answer: ReferenceAnswer, got: Sequence[int], margin: float) -> int | None:
    """Return the first place where an answer differs from the reference; None where it is the same.

    From a token on that is nearly as likely as another one, nothing is compared: rounding decides there.
    """
    for step, (token, sure) in enumerate(zip(answer.tokens, answer.margins, strict=True)):
        if step >= len(got) or got[step] != token:
            return step if sure > margin else None
    return len(answer.tokens) if len(got) > len(answer.tokens) else None
