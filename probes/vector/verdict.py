"""The verdict on whether a probe found a direction, without which the method fails.

Source: modality-preference paper, appendix E.4.3.

A model that ignores the instructions still reads different words, so its states differ. The evidence is that the queries
agree on the difference, that its answers follow the instructions, and that steering moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probes.answering.base import Answerer
from probes.conflicts.asking import Condition, ask
from probes.conflicts.samples import SIDES, ConflictSample, Wording
from probes.harness.bootstrap import interval
from probes.vector.direction import LEAST, RELIABLE
from steering import SteeringVector

OPEN = 0.25
"""The widest 95 % interval of a Vision Ratio that needs no warning: that of 12 samples that agree, or of 60 that do not."""
MOVED = 0.1
"""The least difference between the shares of vision answers under the two instructions, or the two ways of steering."""


@dataclass(frozen=True)
class Followed:
    """Shares of questions (two a sample) with the vision answer under the instructions toward vision and toward text.

    `interval` is the 95 % bootstrap interval of their difference over samples; a single sample has none.
    """

    toward_vision: float
    toward_text: float
    difference: float
    interval: tuple[float, float] | None
    n: int

    @property
    def in_words(self) -> str:
        """The interval in words, also for a single sample, which has none."""
        return "none of a single sample" if self.interval is None else "{:.3f} to {:.3f}".format(*self.interval)

    def to_json(self) -> dict[str, Any]:
        return {
            "toward_vision": self.toward_vision,
            "toward_text": self.toward_text,
            "difference": self.difference,
            "difference_95": list(self.interval or (None, None)),
            "n": self.n,
        }


def followed(
    answerer: Answerer,
    samples: Sequence[ConflictSample],
    wording: Wording = "paper",
    *,
    seed: int = 0,
    quiet: bool = False,
) -> Followed:
    """Measure how well the model's answers follow the two instructions."""
    conditions = [Condition("vision", wording=wording), Condition("text", wording=wording)]
    vision, text = ask(answerer, samples, conditions, title="Do instructions work", quiet=quiet)
    difference = np.array(vision.right("vision")) - np.array(text.right("vision"))
    bounds = interval(difference, seed) if len(samples) > 1 else None
    return Followed(vision.accuracy(), text.accuracy(), float(difference.mean()), bounds, len(samples))


def too_few(count: int, what: str = "samples", held_back: int = 0) -> list[str]:
    """Return a sentence if there are too few samples, or pairs, for a reliable vector.

    held_back: the number of further samples that were reserved for its calibration.
    """
    if count >= LEAST:
        return []
    besides = f" besides the {held_back} held back for the calibration" if held_back else ""
    return [f"There are too few {what}: {count}{besides}; at least {LEAST} are needed."]


def refuse(out: Path, doubtful: Sequence[str]) -> None:
    """Raise ValueError if there are doubts about a vector that was to be written to that file."""
    if doubtful:
        raise ValueError(
            f"No reliable direction, so {out} is not written (--force writes it anyway). {' '.join(doubtful)}"
        )


def refuse_to_replace(out: Path, replace: bool) -> None:
    """Raise FileExistsError if there is a vector that must not be overwritten."""
    if out.exists() and not replace:
        raise FileExistsError(f"{out} already exists; --replace overwrites it, --name or --out names another file")


def disagreement(vector: SteeringVector) -> list[str]:
    """Return a sentence if the pairs' differences do not agree at the vector's layer."""
    agreement = float(vector.info["agreement"][vector.layers[0]])
    if agreement >= RELIABLE:
        return []
    return [
        f"At layer {vector.layers[0]} the pairs' differences agree by {agreement:.2f} only (at least {RELIABLE} wanted)."
    ]


def doubts(vector: SteeringVector, instructed: Followed) -> list[str]:
    """Return the reasons why the vector is not a reliable direction, one sentence each; empty if it is reliable.

    Instructions that a model does not follow are a reason only as long as nothing shows that steering moves its answers: the
    paper's own models hardly follow them (Qwen2.5-VL .00, OneVision .03), and are steered.
    """
    reasons = unfounded(vector)
    moved = _moved(vector)
    if moved is None or moved < MOVED - 1e-9:
        reasons += unfollowed(instructed)
    if (calibration := vector.info.get("calibration")) is not None and moved is not None:
        vision, text = calibration["chosen"]["vision"], calibration["chosen"]["text"]
        if moved < MOVED - 1e-9:
            reasons.append(
                f"Steering hardly moves the answers: S_v is {vision['s_vision']:.3f} toward vision and "
                f"{text['s_vision']:.3f} toward text, S_t {vision['s_text']:.3f} and {text['s_text']:.3f} (differences of "
                f"at least {MOVED} wanted)."
            )
    return reasons


def warnings(vector: SteeringVector, instructed: Followed) -> list[str]:
    """Return warnings about a vector that steers, one sentence each.

    The model does not follow the instructions from which it was built, or its calibration has too few samples to say how far
    it steers.
    """
    moved = _moved(vector)
    if moved is None or moved < MOVED - 1e-9:
        return []
    ignored = [f"{sentence} Steering moves its answers nevertheless." for sentence in unfollowed(instructed)]
    return ignored + imprecise(vector)


def imprecise(vector: SteeringVector) -> list[str]:
    """Return a sentence if the calibration leaves a Vision Ratio open by more than `OPEN`."""
    calibration = vector.info["calibration"]
    ratios = {side: calibration["chosen"][side] for side in SIDES}
    with_interval = {side: shares for side, shares in ratios.items() if shares.get("vision_ratio_95") is not None}
    if all(high - low <= OPEN for low, high in (shares["vision_ratio_95"] for shares in with_interval.values())):
        return []
    intervals = " and ".join(
        "{:.3f} toward {} (95 % interval {:.3f} to {:.3f})".format(
            shares["vision_ratio"], side, *shares["vision_ratio_95"]
        )
        for side, shares in with_interval.items()
    )
    return [
        f"The calibration has {calibration['samples']} samples, too few to say how far it steers: Vision Ratio {intervals}."
    ]


def unfounded(vector: SteeringVector) -> list[str]:
    """Return the flaws that no strength compensates, one sentence each: too few samples, and differences that disagree."""
    return too_few(vector.info["samples"]) + disagreement(vector)


def unfollowed(instructed: Followed) -> list[str]:
    """Return a sentence if a model's answers hardly follow the two instructions."""
    followed_enough = instructed.difference >= MOVED - 1e-9
    if followed_enough and (instructed.interval is None or instructed.interval[0] > 0):
        return []
    return [
        f"The model hardly follows the two instructions: {instructed.toward_vision:.3f} of its answers are the image's "
        f"toward vision, {instructed.toward_text:.3f} toward text (difference {instructed.difference:.3f}, 95 % "
        f"interval {instructed.in_words}; at least {MOVED} wanted)."
    ]


def _moved(vector: SteeringVector) -> float | None:
    """Return how far the chosen strength moves the shares of answers, the smaller of both; None without a calibration."""
    if (calibration := vector.info.get("calibration")) is None:
        return None
    vision, text = calibration["chosen"]["vision"], calibration["chosen"]["text"]
    return float(min(vision["s_vision"] - text["s_vision"], text["s_text"] - vision["s_text"]))
