"""The layer at which the preference surfaces: logits of the two options as read from each layer.

Source: the authors' rebuttal, their Rebuttal_Update/README.md, W3. The state behind every layer at the prompt's last token,
which predicts the answer's first token, is read through the final norm and the output embedding. The rebuttal does not say
whether its states were normalised; here they are, so that the last layer's logits are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probes.answering.progress import tracked
from probes.answering.requests import request
from probes.conflicts.asking import Condition
from probes.conflicts.samples import LETTERS, SIDES, ConflictSample, Side, messages
from probes.harness.bootstrap import interval
from probes.mc2.evaluate import named
from steering import MLLM, Engine, Request, Steer, SteeringVector

SURFACED = 0.05
"""The share of the last layer's margin at which a margin has surfaced."""


@dataclass(frozen=True)
class Margin:
    """Margins by layer, over `n` questions.

    The fields are the mean logits of the preferred side's option and of the other one, and the mean of their difference, the
    authors' MPM, with its 95 % interval over samples.
    """

    preferred: list[float]
    other: list[float]
    margin: list[float]
    intervals: list[tuple[float, float]]
    n: int

    @property
    def surfaces(self) -> int | None:
        """The first layer from which on the margin stays above 0, and at least SURFACED of the last layer's.

        None if even the last layer's margin is not above 0.
        """
        is_above = [
            low > 0 and mean >= SURFACED * self.margin[-1]
            for mean, (low, _) in zip(self.margin, self.intervals, strict=True)
        ]
        return next((layer for layer in range(len(is_above)) if all(is_above[layer:])), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "preferred": self.preferred, "other": self.other, "margin": self.margin,
            "margin_95": [list(bounds) for bounds in self.intervals], "n": self.n, "surfaces": self.surfaces,
        }  # fmt: skip


def lens(
    engine: Engine,
    samples: Sequence[ConflictSample],
    conditions: Mapping[tuple[str, Side | None], Condition],
    *,
    quiet: bool = False,
) -> dict[str, Margin]:
    """Return the margins of the conditions by their names in a report.

    A condition without a side is split into questions with the image's letter as the likelier one, and those with the
    text's, as NAME_vision and NAME_text, if there are any. Raises ValueError for a model whose tokenizer has no single token
    for a letter, or that has no final norm.
    """
    tokens = [_token(engine.mllm, letter) for letter in LETTERS]
    norm = getattr(engine.mllm.decoder, "norm", None)
    if norm is None:
        raise ValueError(f"{engine.mllm.name} has no final norm through which states of its layers could be read.")
    logits = {key: np.zeros((2, len(samples), 2, engine.mllm.num_layers)) for key in conditions}

    def requests() -> Iterator[Request]:
        for sample in samples:
            for condition in conditions.values():
                for swapped in (False, True):
                    yield _read(sample, condition, swapped)

    total = len(samples) * len(conditions) * 2
    results = tracked(engine.stream(requests()), total, "Layers", unit="prompts", quiet=quiet)
    places = ((key, number, swapped) for number in range(len(samples)) for key in conditions for swapped in (0, 1))
    for (key, number, swapped), result in zip(places, results, strict=True):
        states = result.choices[0].states
        assert states is not None
        with torch.inference_mode():
            logits_of_reply = (
                engine.mllm.head(norm(states.to(engine.mllm.device, engine.mllm.dtype)))[:, tokens].cpu().numpy()
            )
        # A is the image's option if the options are not swapped.
        logits[key][:, number, swapped] = logits_of_reply.T[::-1] if swapped else logits_of_reply.T
    return dict(_margins(logits))


def _read(sample: ConflictSample, condition: Condition, swapped: bool) -> Request:
    """Return the request for the states of a question."""
    chat = messages(sample, condition.setting, swapped, condition.shots, condition.wording)
    push = condition.push
    if push is None:
        return request(chat, states=True)
    assert isinstance(push.vector, SteeringVector)
    return request(chat, [Steer.to(push.vector, push.toward, push.strength, layers=push.layers)], states=True)


def _token(mllm: MLLM, letter: str) -> int:
    """Return the token of a letter in an answer."""
    ids = mllm.tokenizer.encode(letter, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{mllm.name} has no single token for the letter {letter}, whose logit the layers could tell.")
    return int(ids[0])


def _margins(logits: Mapping[tuple[str, Side | None], np.ndarray]) -> Iterator[tuple[str, Margin]]:
    """Yield the margins of every condition.

    logits: by condition (2, samples, 2, layers): sides, samples, orders, layers.
    """
    for (kind, side), pair in logits.items():
        vision, text = pair
        for preferred_side, preferred, rival in zip(SIDES, (vision, text), (text, vision), strict=True):
            chosen = (preferred > rival)[..., -1] if side is None else np.full(vision.shape[:2], side == preferred_side)
            if chosen.any():
                yield named(kind, preferred_side), _margin(preferred, rival, chosen)


def _margin(preferred: np.ndarray, rival: np.ndarray, chosen: np.ndarray) -> Margin:
    """Return the margin over the chosen questions.

    preferred, other: (samples, 2, layers). chosen: (samples, 2), the questions that count.
    """
    counted = chosen.sum(1)
    differences = ((preferred - rival) * chosen[..., None]).sum(1)[counted > 0]
    counted = counted[counted > 0]
    # The margin of a resample is also a mean over its questions; each sample contributes one or two.
    weighted = np.concatenate([differences, counted[:, None]], 1)
    return Margin(
        preferred[chosen].mean(0).tolist(),
        rival[chosen].mean(0).tolist(),
        (preferred - rival)[chosen].mean(0).tolist(),
        [interval(weighted[:, [layer, -1]], statistic=_of_questions) for layer in range(differences.shape[1])],
        int(chosen.sum()),
    )


def _of_questions(drawn: np.ndarray, axis: int) -> np.ndarray:
    """Return the mean over questions of resamples (..., samples, 2): a sample's sum of margins, and their number."""
    sums = drawn.sum(axis)
    mean: np.ndarray = sums[..., 0] / sums[..., 1]
    return mean
