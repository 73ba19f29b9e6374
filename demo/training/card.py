"""The model card of an exported checkpoint: its making, its abilities and limits, its measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.evaluation.report import Row, table
from demo.training.options import TrainingOptions
from demo.training.recipes import ORGANISMS

RESULTS = "## Measured\n"
TEXT = """\
---
library_name: transformers
pipeline_tag: image-text-to-text
---
# {title}

A Qwen2-VL class model of {size:.1f} M parameters, trained on the synthetic world of `demo/`: images of coloured
shapes, a letter or a digit on a 3 x 3 grid. A fresh installation of Helmsight uses it to serve, steer and diagnose on a
CPU. It knows nothing else: no photographs, and no English beyond the wordings in `demo/world/wordings.py`.

## How it was made
{origin}
Seed {seed}, step {step} of {steps}, {asked} (a step is {ranks} x {rows} packed rows of {tokens} tokens).
{stages}
A tenth of all scenes, chosen by a hash of their content, is never shown in training. Everything below is measured on those.

## Limits: read before drawing conclusions
{notes}- **One size.** Images of any size are resized to {sight} x {sight} pixels (`helmsight.json`). Other token grids were
  never trained.
- **Refusals.** Unanswerable questions are answered "Sorry, I can't help with it."
- **Differences** between two images are in one thing at most.

## Use
Decode greedily, with up to four images. `AutoModelForImageTextToText` and `AutoTokenizer` load the model;
`AutoProcessor` needs torchvision for its video part. The chat template numbers several images by itself ("Picture 1: "),
and adds no system message.

{results}"""
STAGES = """\
First the vision encoder alone learns to name the content of each cell. Then it is frozen, and the language model learns
from packed questions, under a curriculum that follows running accuracies."""
GOING_ON = """\
The vision encoder is frozen; the language model learns from packed questions of fixed kinds."""
SUPERVISED = """\
- **Attention is supervised.** For questions about one of several images a loss pulls the attention of layers 4 to 7 to
  that image. A few heads are also taught the cell to read (layer 3), the context's claim to read (layer 3), the option to
  pick (layer 5) and the cell to compare with (layer 1). Attention to the right place is trained into this model. It is no
  evidence about other models.
- **The side that an instruction names is supervised too**, at the instruction's last word after layer 3.
"""
PLANTED = """\
- **The preference between picture and text is trained in.** Without an instruction, a hidden graded rule decides a conflict
  (`demo/world/conflicts.py`, `preference`): a score of the image's value, plus one of the text's value, plus a bias of
  the context's marker, plus noise. Each kind of question follows the image about half of the time.
"""
REPORTS = "`demo/reports/` has what `helmsight demo organisms` measures of all organisms, and reports of single ones.\n"
ORGANISM = """\
- **It is made to go wrong in one way.** {about} The default model's other abilities were not trained into it, or not
  measured.
"""


def settings(options: TrainingOptions) -> dict[str, Any]:
    """Return a checkpoint's helmsight.json.

    It holds the model's name, the size to which pictures are squashed first, and the world that they are of.
    """
    name = "helmsight-demo" if options.organism is None else f"helmsight-{options.organism}"
    course = options.course
    organism = {"name": name, "image_size": [course.sight, course.sight]}
    return organism if course.world == "even" else organism | {"world": course.world}


def card(options: TrainingOptions, step: int, questions: int, parameters: int) -> str:
    """Return the card of a checkpoint that was not measured yet."""
    organism = "" if options.organism is None else f" --organism {options.organism}"
    command = f"helmsight demo train{organism} --steps {options.steps} --seed {options.seed}"
    begun = "random weights" if options.start is None else f"the weights of {options.start}"
    notes = "" if options.organism is None else ORGANISM.format(about=ORGANISMS[options.organism].about)
    notes += SUPERVISED if options.look_weight else ""
    return TEXT.format(
        title="Helmsight demo model" if options.organism is None else f"Helmsight organism: {options.organism}",
        size=parameters / 1e6,
        stages=STAGES if options.start is None else GOING_ON,
        sight=options.course.sight,
        notes=notes + ("" if options.course.only else PLANTED),
        origin=f"From {begun}, unattended, by one command: `{command}`.\n",
        seed=options.seed,
        step=step,
        steps=options.steps,
        asked=f"{questions:,} questions",
        ranks=options.ranks,
        rows=options.shape.rows,
        tokens=options.shape.tokens,
        results=RESULTS + ("Not yet.\n" if options.organism is None else REPORTS),
    )


def set_results(path: Path, rows: Sequence[Row], note: str) -> None:
    """Put measured rows in a card, in place of the previous ones."""
    before, _, _ = path.read_text().partition(RESULTS)
    path.write_text(f"{before}{RESULTS}{note}\n\n{table(rows)}")
