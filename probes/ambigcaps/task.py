"""AmbigCaps' files (Li et al. 2021) and its two directions.

The files are rows with `image`, `en` and `tr`, or two texts with one caption per line, `NAME.en` and `NAME.tr`, with a third
file of the images' names. This form could not be compared with the published files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from probes.ambigcaps.samples import Translated, check_bleu, scores, tally
from probes.harness.comparison import SampleSet
from probes.harness.reading import text_of
from probes.image_qa import rows
from probes.image_qa.task import Task


def load(data: Sequence[Path], images: Path, left: list[str] | None = None) -> list[Translated]:
    """Return every caption in both directions.

    Rows that lack something are left out and added to `left`. Raises ValueError that names the invalid file and row, and if
    BLEU cannot be computed.
    """
    check_bleu()

    def both(row: Mapping[str, Any], number: int) -> list[Translated]:
        image, english, turkish = (rows.text(row, name) for name in ("image", "en", "tr"))
        place = rows.image(images, image)
        name = rows.named(place, number)
        return [
            Translated(place, "English", english, turkish, name),
            Translated(place, "Turkish", turkish, english, name),
        ]

    texts = {file.suffix: file for file in data if file.suffix in (".en", ".tr")}
    if not texts:
        return [one for file in data for pair in rows.made(file, rows.read(file), both, left) for one in pair]
    others = [file for file in data if file not in texts.values()]
    if len(texts) != 2 or len(others) != 1:
        raise ValueError("--data needs NAME.en, NAME.tr and a file of image names, one per line")
    files = {"image": others[0], "en": texts[".en"], "tr": texts[".tr"]}
    lines = {name: text_of(file).splitlines() for name, file in files.items()}
    if len({*map(len, lines.values())}) != 1:
        told = ", ".join(f"{files[name]} has {len(own)}" for name, own in lines.items())
        raise ValueError(f"--data needs as many lines in each file; {told}")
    table = [dict(zip(lines, row, strict=True)) for row in zip(*lines.values(), strict=True)]
    return [one for pair in rows.made(others[0], table, both, left) for one in pair]


def _parts(samples: Sequence[Translated]) -> list[SampleSet[Translated]]:
    return [
        SampleSet(
            f"{source} to {target}", [one for one in samples if one.source == source], Translated.chats, tally, scores,
            {}, setting=lambda sample: "all", cluster=lambda sample: sample.image,
        )
        for source, target in (("English", "Turkish"), ("Turkish", "English"))
    ]  # fmt: skip


TASK = Task(
    "AmbigCaps",
    load,
    _parts,
    metrics=("bleu",),
    share=None,
    reading="*bleu*: corpus BLEU of sacreBLEU's defaults, 0 to 100.",
    unit="captions",
    max_tokens=128,
)
