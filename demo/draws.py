"""The demo world's samples for the probes, by the name of the probe; probes do not import the world."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from demo.world.scenes import Habits
    from probes.alarm.samples import Checked
    from probes.chair.samples import Described
    from probes.conflicts.samples import ConflictSample
    from probes.faithfulness.samples import ForcedAnswerSample
    from probes.image_qa.yes_no import YesNo
    from probes.mme.samples import MmePair
    from probes.mmsap.samples import SapSample
    from probes.phd.samples import PhdSample
    from probes.sage.samples import Difference
    from probes.spd.samples import PicturePair
    from probes.stme.samples import TargetSample
    from probes.tallyqa.task import Counted

# Every command imports this file; the world's own modules are imported when samples are drawn.


def conflicts(count: int, seed: int) -> list[ConflictSample]:
    """Draw conflicts of picture and text over held-out scenes."""
    from demo.world.conflicts import conflict_samples

    return conflict_samples(count, seed)


def sage(
    questions: int, pairs: int, seed: int, noise: float, model: str
) -> tuple[list[YesNo], list[Difference], tuple[str, ...], str]:
    """Draw existence questions and pairs with differences, with the names of things and of the scenes' world.

    The questions' scenes break the habits of the world that a model was trained in, where its folder names one.
    """
    from demo.world.faithfulness import difference_samples, existence_samples
    from demo.world.scenes import SHAPES

    habits, scenes = _world(model)
    existence = existence_samples(questions, seed, noise=noise, habits=habits)
    return existence, difference_samples(pairs, seed, noise=noise), SHAPES, scenes


def pope(count: int, seed: int, noise: float, model: str) -> tuple[list[YesNo], str]:
    """Draw existence questions as those of `sage`, with the name of the scenes' world."""
    from demo.world.faithfulness import existence_samples

    habits, scenes = _world(model)
    return existence_samples(count, seed, noise=noise, habits=habits), scenes


def mme(count: int, seed: int, noise: float, model: str) -> tuple[list[MmePair], str]:
    """Draw pairs of questions for yes and no."""
    from demo.world.lists import mme_pairs

    return mme_pairs(count, seed, noise), "the demo world"


def chair(count: int, seed: int, noise: float, model: str) -> tuple[list[Described], str]:
    """Draw pictures to describe, which break the habits of the world that a model was trained in."""
    from demo.world.lists import described

    habits, scenes = _world(model)
    return described(count, seed, noise, habits), scenes


def phd(count: int, seed: int, noise: float, model: str) -> tuple[list[PhdSample], str]:
    """Draw questions for yes and no, plain and beside a text."""
    from demo.world.lists import phd_samples

    return phd_samples(count, seed, noise), "the demo world"


def tallyqa(count: int, seed: int, noise: float, model: str) -> tuple[list[Counted], str]:
    """Draw questions for a number."""
    from demo.world.lists import counted_samples

    return counted_samples(count, seed, noise), "the demo world"


def _world(model: str) -> tuple[Habits, str]:
    """Return the habits of the world that a model was trained in, and a description of scenes that break them.

    They are even where the model's folder names no world.
    """
    from demo.world.scenes import WORLDS

    about = Path(model, "helmsight.json")
    world = json.loads(about.read_text()).get("world", "even") if about.is_file() else "even"
    return WORLDS[world], "the demo world" + ("" if world == "even" else f" that break the habits of its {world}")


def spd(single: int, several: int, seed: int, noise: float) -> tuple[list[PicturePair], tuple[str, ...]]:
    """Draw pairs with one difference and pairs with several, with the names of things."""
    from demo.world.faithfulness import picture_pairs
    from demo.world.scenes import SHAPES

    return picture_pairs(single, several, seed, noise=noise), SHAPES


def stme(count: int, seed: int, noise: float) -> list[TargetSample]:
    """Draw questions about several pictures, one of which holds the answer."""
    from demo.world.targets import target_samples

    return target_samples(count, seed, noise=noise)


def mm_sap(count: int, seed: int) -> list[SapSample]:
    """Draw questions that a picture answers, that need what a model may not have learnt, and that no picture answers."""
    from demo.world.awareness import sap_samples

    return sap_samples(count, seed)


def faithfulness(count: int, seed: int, noise: float) -> list[ForcedAnswerSample]:
    """Draw questions with a right answer and a wrong one."""
    from demo.world.forced_answers import forced_answer_samples

    return forced_answer_samples(count, seed, noise=noise)


def alarm(count: int, seed: int, noises: Sequence[float]) -> list[Checked]:
    """Draw questions of several kinds, on pictures from clean to hardly readable."""
    from demo.world.checked import checked_samples

    return checked_samples(count, seed, noises)


DRAWS: dict[str, Callable[..., Any]] = {
    "conflicts": conflicts,
    "sage": sage,
    "pope": pope,
    "mme": mme,
    "chair": chair,
    "phd": phd,
    "tallyqa": tallyqa,
    "spd": spd,
    "stme": stme,
    "mm-sap": mm_sap,
    "faithfulness": faithfulness,
    "alarm": alarm,
}
