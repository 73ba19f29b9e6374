"""CHAIR as a list of pictures to describe."""

from __future__ import annotations

from collections.abc import Sequence

from probes.chair import file
from probes.chair.samples import SHARES, Described, scores, tally
from probes.harness.comparison import SampleSet
from probes.image_qa.task import Task


def _parts(samples: Sequence[Described]) -> list[SampleSet[Described]]:
    return [SampleSet("CHAIR", samples, Described.chats, tally, scores, SHARES, setting=lambda sample: "all")]


TASK = Task(
    "CHAIR",
    file.load,
    _parts,
    metrics=("chair_s", "chair_i", "recall", "mentions", "words"),
    published=("instances_val2014.json", "captions_val2014.json"),
    share="chair_s",
    reading="*chair_s*: the share of descriptions that name an object that is not there. *chair_i*: the share of "
    "mentioned objects that are not there. *recall*: the share of the objects that are named. *mentions*, *words*: of a "
    "description.",
    unit="pictures",
    max_tokens=512,
)
