"""The sample sizes, the grids and the criteria of the verdicts on `smol`, written before the evaluation that they judge.

Each criterion is a function of intervals alone; `helmsight demo smol` applies them and prints the verdicts with the numbers.
Those on conflicts, yes/no questions and attention are older than the first evaluation, whose seed was 1, and those on
descriptions than the second, whose seed was 2. The noise and those on habits came with the present model, and are older than
its evaluation, whose seed is 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Bounds = Sequence[float]

SEED = 3
CONFLICTS, QUESTIONS, PICTURES = 96, 160, 40
"""The numbers of conflicts, of questions of each kind, and of pictures whose attention and states are read."""
LAYERS = (0.25, 0.45)
"""The layers that steering is tried in, as shares of the depth; besides the best ranked one."""
STRENGTHS = (0.5, 1.0)
"""The strengths that steering is tried with, in units of the residual stream's norm."""
ALPHAS = (0.1, 0.3)
"""The strengths of See."""
NOISES = (0.0, 20.0, 40.0, 60.0, 80.0)
"""The standard deviations, of 0 to 255, of the noise of pictures that yes/no questions are about; training had none."""
AUROC = 0.8
"""Of the noises, each kind of question gets the one whose plain AUROC is nearest to this, on questions of another seed."""
TUNING = 0.5
"""The number of those questions, as a share of those reported."""
LEARNT = 0.5
"""The least share of a kind's questions, asked without a text, that must be right for its conflicts to count."""
ATTENTION_THIRDS = 3
"""Layers are read in thirds: shallow, middle, deep."""


def preference(vision_ratio_95: Bounds | None) -> Literal["vision", "text", "neither"]:
    """Return the side that the model prefers: the interval of S_v / (S_v + S_t) excludes a half."""
    if vision_ratio_95 is None or vision_ratio_95[0] <= 0.5 <= vision_ratio_95[1]:
        return "neither"
    return "vision" if vision_ratio_95[0] > 0.5 else "text"


def moved(difference_95: Bounds) -> Literal["toward", "away", "not seen"]:
    """Return whether a condition moves answers toward its side, compared with plain ones on the same samples."""
    if difference_95[0] > 0:
        return "toward"
    return "away" if difference_95[1] < 0 else "not seen"


def steering_wins(over_best_other: Sequence[Bounds], over_random: Sequence[Bounds]) -> bool:
    """Return the verdict on row 7: better than the best of instruction, chain of thought and four-shot, on both sides.

    The same strength along random directions must not do as well. All are paired differences, and must be above 0.
    """
    return all(bounds[0] > 0 for bounds in (*over_best_other, *over_random))


def ranking(auroc_95: Bounds | None, accuracy_95: Bounds | None) -> str:
    """Return what an intervention does to yes/no questions, from its differences to plain answers.

    Only the order of the questions tells whether it sees better; accuracy alone also changes with a threshold.
    """
    if auroc_95 is None or accuracy_95 is None:
        return "undefined"
    if auroc_95[0] > 0:
        return "ranks better"
    if auroc_95[1] < 0:
        return "ranks worse"
    if accuracy_95[0] <= 0 <= accuracy_95[1]:
        return "no difference seen"
    return "a shift of the threshold"


def is_habit(difference_95: Bounds) -> bool:
    """Return whether wrong questions about what is usual are answered yes more readily than others about the same picture.

    The interval is that of the difference of their log-odds of yes.
    """
    return difference_95[0] > 0


def is_sink(share_95: Bounds, fair: float) -> bool:
    """Return whether a span draws more attention than its share of the tokens seen, `fair`."""
    return share_95[0] > fair


def decays(slope_95: Bounds) -> bool:
    """Return whether attention to the picture falls along an answer: the slope per token lies below 0."""
    return slope_95[1] < 0


def focuses(share_95: Bounds, chance: float) -> bool:
    """Return whether the cell that is asked about draws more than its part of the attention to the picture.

    The layer is chosen on other samples.
    """
    return share_95[0] > chance


def drifts(difference_95: Bounds) -> bool:
    """Return whether contradicting descriptions are less alike inside than consistent ones (SPD-Faith, Figure 8a).

    The interval is that of the cosine of contradicting pairs minus that of consistent ones.
    """
    return difference_95[1] < 0


def more_neurons(share_95: Bounds) -> bool:
    """Return whether a false description activates more neurons than the true one in most pairs (SPD-Faith, section 4.3).

    The layer is chosen on other samples.
    """
    return share_95[0] > 0.5
