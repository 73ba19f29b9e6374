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
from probes.image_qa.baselines import Instructed
from probes.image_qa.task import Task


def load(data: Sequence[Path], images: Path, left_out: list[str] | None = None) -> list[Translated]:
    """Return every caption in both directions.

    Rows that lack something are left out and added to `left_out`. Raises ValueError that names the invalid file and row,
    and if BLEU cannot be computed.
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
        return [
            sample for file in data for pair in rows.parse(file, rows.read(file), both, left_out) for sample in pair
        ]
    image_files = [file for file in data if file not in texts.values()]
    if len(texts) != 2 or len(image_files) != 1:
        raise ValueError("--data needs NAME.en, NAME.tr and a file of image names, one per line")
    files = {"image": image_files[0], "en": texts[".en"], "tr": texts[".tr"]}
    lines = {name: text_of(file).splitlines() for name, file in files.items()}
    if len({*map(len, lines.values())}) != 1:
        counts = ", ".join(f"{files[name]} has {len(file_lines)}" for name, file_lines in lines.items())
        raise ValueError(f"--data needs as many lines in each file; {counts}")
    table = [dict(zip(lines, row, strict=True)) for row in zip(*lines.values(), strict=True)]
    return [sample for pair in rows.parse(image_files[0], table, both, left_out) for sample in pair]


def _parts(samples: Sequence[Translated]) -> list[SampleSet[Translated]]:
    return [
        SampleSet(
            f"{source} to {target}", [sample for sample in samples if sample.source == source], Translated.chats,
            tally, scores, {}, setting=lambda sample: "all", cluster=lambda sample: sample.image,
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
    instructed=Instructed("Rely on the text of the caption rather than on the image content."),
)
