"""`helmsight demo train | evaluate | scene | samples | conflicts`: the command line of the embedded model."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from demo.world.scenes import SIDE


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the `demo` command with its parts; each sets `func`, called with the parsed arguments."""
    demo = subparsers.add_parser("demo", help="the embedded default model: train it, evaluate it, draw its scenes")
    parts = demo.add_subparsers(dest="part", required=True, metavar="train|evaluate|scene|samples|conflicts")

    part = parts.add_parser("train", help="train from nothing, or resume; rerun the same command to go on")
    part.add_argument("--folder", type=Path, default=Path("build/demo"), help="the run's folder (default %(default)s)")
    part.add_argument("--steps", type=int, help="total steps; may be changed when resuming")
    part.add_argument("--decay", type=float, help="last share of the steps, in which the rate falls to 0 (default 0.3)")
    part.add_argument("--vision-steps", type=int, help="steps of the vision stage (default 700)")
    part.add_argument("--seed", type=int, help="decides weights and data (default 1)")
    part.add_argument("--ranks", type=int, help="data-parallel processes of one thread each (default 2; 1 on a GPU)")
    part.add_argument("--device", help="cpu or cuda (default cpu)")
    part.set_defaults(func=run_train)

    part = parts.add_parser("evaluate", help="measure a checkpoint on held-out scenes and write a report")
    part.add_argument("--checkpoint", type=Path, default=Path(__file__).parent / "checkpoint")
    part.add_argument("--count", type=int, default=200, help="questions per row (default %(default)s)")
    part.add_argument("--seed", type=int, default=1, help="seed of the held-out scenes (default %(default)s)")
    part.add_argument("--report", type=Path, default=Path(__file__).parent / "REPORT.md")
    part.add_argument("--threads", type=int, default=2)
    part.add_argument("--card", action="store_true", help="also put the measured rows in the checkpoint's model card")
    part.set_defaults(func=run_evaluate)

    part = parts.add_parser("scene", help="draw a scene and print its facts and a conflict about it")
    part.add_argument("--seed", type=int, default=1)
    part.add_argument("--size", type=int, nargs=2, default=(4 * SIDE, 4 * SIDE), metavar=("WIDTH", "HEIGHT"))
    part.add_argument("--out", type=Path, default=Path("scene.png"))
    part.set_defaults(func=run_scene)

    part = parts.add_parser("samples", help="draw the sample scenes that the playground offers")
    part.add_argument("--folder", type=Path, default=Path(__file__).parent / "checkpoint" / "samples")
    part.set_defaults(func=run_samples)

    part = parts.add_parser("conflicts", help="write held-out conflicts of picture and text as files, as MC2 has them")
    part.add_argument("--count", type=int, default=400, help="conflicts, the tasks in turn (default %(default)s)")
    part.add_argument("--seed", type=int, default=1, help="seed of the held-out scenes (default %(default)s)")
    part.add_argument("--folder", type=Path, default=Path("conflicts"), help="where to (default %(default)s)")
    part.set_defaults(func=run_conflicts)


def run_train(arguments: argparse.Namespace) -> int:
    from demo.training.options import TrainingOptions
    from demo.training.train import train

    names = ("folder", "steps", "decay", "vision_steps", "seed", "ranks", "device")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if given.get("device", "cpu") != "cpu":
        given.setdefault("ranks", 1)
    print(f"checkpoint: {train(TrainingOptions(**given))}")
    return 0


def run_evaluate(arguments: argparse.Namespace) -> int:
    from demo.evaluation.evaluate import evaluate_checkpoint, targets
    from demo.training.card import set_results

    rows, page = evaluate_checkpoint(
        arguments.checkpoint, arguments.report, arguments.count, arguments.seed, arguments.threads
    )
    print(page)
    if arguments.card:
        note = f"Held-out scenes, seed {arguments.seed}, greedy generation, plain transformers in float32."
        set_results(arguments.checkpoint / "README.md", targets(rows), note)
    return 0


def run_scene(arguments: argparse.Namespace) -> int:
    from demo.world.conflicts import place, random_conflict
    from demo.world.questions import ask, describe, option_text
    from demo.world.scenes import facts, random_scene, render
    from demo.world.wordings import TOWARD_TEXT, TOWARD_VISION

    rng = random.Random(f"scene {arguments.seed}")
    scene = random_scene(rng, held_out=True)
    conflict = random_conflict(rng, scene)
    render(scene, tuple(arguments.size)).save(arguments.out)
    shown: dict[str, Any] = {"picture": str(arguments.out), "description": describe(scene)}
    shown["facts"] = [f"{f.kind} {f.key}: {f.value}".replace(" :", ":") for f in facts(scene)]
    if conflict is not None:
        options = [conflict.fact.value, conflict.alternative]
        question = option_text(ask(rng, conflict.fact.kind, conflict.fact.key), options)
        shown["conflict"] = {
            "plain": place(conflict.context(), question, None),
            "toward text": place(conflict.context(), question, TOWARD_TEXT),
            "toward vision": place(conflict.context(), question, TOWARD_VISION),
            "answer of the picture": conflict.fact.value,
            "answer of the text": conflict.alternative,
        }
    print(json.dumps(shown, indent=2))
    return 0


def run_samples(arguments: argparse.Namespace) -> int:
    from demo.world.samples import write_samples

    files = write_samples(arguments.folder)
    print(f"{len(files)} files in {arguments.folder}")
    return 0


def run_conflicts(arguments: argparse.Namespace) -> int:
    from demo.world.conflicts import conflict_samples, write_conflicts

    files = write_conflicts(conflict_samples(arguments.count, arguments.seed), arguments.folder)
    print(f"{arguments.count} conflicts in {files[-1]}, their pictures in {arguments.folder / 'images'}")
    return 0
