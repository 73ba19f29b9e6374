"""The commands of this room: `helmsight probe` builds a vector, `helmsight eval mc2` measures one.

What needs torch is imported when a command runs, so that `helmsight --help` stays quick.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probes.faithfulness import Difference, Existence
    from probes.mc2 import Sample
    from steering import Engine, SteeringVector

    DemoSamples = Callable[[int, int], Sequence[Sample]]
    DemoFaithfulness = Callable[[int, int, float], tuple[Sequence[Existence], Sequence[Difference], Sequence[str]]]

PROBE_SEEDS = 1_000_000_000
"""Added to the seed when a probe draws demo samples, so that an evaluation's small seeds never meet them again."""

VECTOR = "modality-preference"


def register(
    subparsers: Any,
    *,
    demo_samples: DemoSamples | None = None,
    demo_faithfulness: DemoFaithfulness | None = None,
    default_model: str | Path | None = None,
) -> None:
    """Add the commands to a parser's subparsers; each sets `func`, which takes the arguments and returns a status.

    `demo_samples(count, seed)` draws conflicts where no MC2 file is given, `demo_faithfulness(count, seed,
    noise)` existence questions, pairs with a difference and the names of objects; this room does not know the demo world.
    """
    _register_probe(subparsers, demo_samples, default_model)
    benchmarks = _register_eval(subparsers, demo_samples, default_model)
    if demo_faithfulness is not None:
        _register_eval_sage(benchmarks, demo_faithfulness, default_model)


def _register_probe(subparsers: Any, demo_samples: DemoSamples | None, default_model: str | Path | None) -> None:
    parser = subparsers.add_parser(
        "probe",
        help="build a modality-preference vector for a model",
        description="Build a steering vector from conflicting samples, calibrate its dose on others, and save it.",
    )
    _add_common(parser, default_model)
    parser.add_argument(
        "--samples", type=_positive, default=128, metavar="N", help="probe samples (default %(default)s)"
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only samples of these tasks")
    parser.add_argument("--layers", type=int, nargs="+", metavar="L", help="only consider these layers, counted from 0")
    parser.add_argument("--name", default=VECTOR, help="name of the vector (default %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="where to save it (default: MODEL/vectors/NAME.safetensors)")
    parser.add_argument(
        "--calibrate", action=argparse.BooleanOptionalAction, default=True,
        help="find the layer and dose that steer both ways with the least damage",
    )  # fmt: skip
    parser.add_argument(
        "--calibration-samples", type=_positive, default=64, metavar="N", help="samples for that (default %(default)s)"
    )
    parser.add_argument(
        "--calibrate-sage", action="store_true",
        help="measure the thresholds of SAGE's Think instead, on --samples prompts, and keep them in MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-sinks", action="store_true",
        help="measure which places of images attract attention anyway instead, and keep that in MODEL",
    )  # fmt: skip
    parser.set_defaults(func=lambda arguments: _guarded(_probe, arguments, demo_samples))


def _register_eval(subparsers: Any, demo_samples: DemoSamples | None, default_model: str | Path | None) -> Any:
    parser = subparsers.add_parser("eval", help="run a benchmark")
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    mc2 = benchmarks.add_parser(
        "mc2",
        help="modality preference on conflicts, plain and steered",
        description="Ask conflicting samples in both option orders: plainly, steered toward vision and toward text.",
    )
    _add_common(mc2, default_model)
    mc2.add_argument("--limit", type=_positive, default=400, metavar="N", help="samples (default %(default)s)")
    mc2.add_argument("--json", metavar="FILE", help="write the shares here")
    mc2.add_argument("--vector", default=VECTOR, metavar="NAME|FILE", help="vector to steer with (default %(default)s)")
    mc2.add_argument("--strength", type=float, default=1.0, help="1.0 is the calibrated dose (default %(default)s)")
    mc2.add_argument("--instruct", action="store_true", help="also measure the two instructions")
    mc2.add_argument("--random-directions", type=int, default=0, metavar="K", help="controls of the same dose")
    mc2.set_defaults(func=lambda arguments: _guarded(_eval_mc2, arguments, demo_samples))
    return benchmarks


def _register_eval_sage(benchmarks: Any, samples: DemoFaithfulness, default_model: str | Path | None) -> None:
    sage = benchmarks.add_parser(
        "sage",
        help="SAGE stage by stage: existence questions and differences of two pictures",
        description="Ask held-out questions of the demo world, or POPE's, plainly, with SAGE's stages, one more at a time, "
        "and with the contrastive decoders that the paper compares it with.",
    )
    _add_model(sage, default_model)
    sage.add_argument("--limit", type=_positive, default=500, metavar="N", help="samples of each (default %(default)s)")
    sage.add_argument("--sweep", action="store_true", help="also each stage alone with several settings")
    sage.add_argument("--noise", type=float, default=0.0, metavar="SD",
        help="noise on the demo world's pictures, standard deviation on the scale of 0 to 255 (default none)",
    )  # fmt: skip
    sage.add_argument("--pope", nargs="+", metavar="FILE", help="POPE's question files in place of the demo world")
    sage.add_argument("--images", metavar="DIR", help="the COCO images of --pope")
    sage.add_argument("--json", metavar="FILE", help="write the scores here")
    sage.add_argument("--markdown", metavar="FILE", help="write the tables here")
    sage.set_defaults(func=lambda arguments: _guarded(_eval_sage, arguments, samples))


def _add_common(parser: argparse.ArgumentParser, default_model: str | Path | None) -> None:
    _add_model(parser, default_model)
    parser.add_argument("--mc2", metavar="JSON", help="MC2's samples (default: conflicts of the demo world)")
    parser.add_argument("--images", metavar="DIR", help="the COCO images of --mc2")


def _add_model(parser: argparse.ArgumentParser, default_model: str | Path | None) -> None:
    parser.add_argument(
        "--model", default=default_model, required=default_model is None, metavar="PATH",
        help="checkpoint folder or hub name" + (" (default: the embedded model)" if default_model else ""),
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default %(default)s)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default %(default)s)")
    parser.add_argument("--threads", type=_positive, metavar="N", help="CPU threads")
    parser.add_argument(
        "--slots", type=_positive, default=16, metavar="N", help="prompts in a batch (default %(default)s)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _guarded(command: Callable[..., int], arguments: argparse.Namespace, samples: Any) -> int:
    """Run a command; what a user can put right is one line on standard error and status 1, not a traceback."""
    from steering import SteeringError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        return command(arguments, samples)
    except (SteeringError, ValueError, OSError) as error:
        print(f"helmsight: {error}", file=sys.stderr)
        return 1


def _calibrate(arguments: argparse.Namespace, demo_samples: DemoSamples | None) -> int:
    from probes.calibration import calibrate_sinks, calibrate_think

    folder = Path(arguments.model)
    if not folder.is_dir():
        raise ValueError(f"--model {arguments.model}: the calibration is kept in the model's folder, and this is none")
    samples = _samples(arguments, demo_samples, arguments.samples, PROBE_SEEDS + arguments.seed)
    measure = calibrate_sinks if arguments.calibrate_sinks else calibrate_think
    calibration = measure(_engine(arguments), samples, arguments.quiet)
    path = calibration.save(folder)
    if arguments.calibrate_sinks:
        print(f"{path}: attention to places of {calibration.images} images, greatest by layer, in average patches")
        for layer, places in enumerate(calibration.sinks or ()):
            print(f"layer {layer:>3}  {max(max(row) for row in places):.2f}")
        return 0
    print(f"{path}: divergence on {calibration.tokens} tokens of {calibration.samples} prompts")
    for layer, quantiles in enumerate(calibration.divergence or ()):
        print(f"layer {layer:>3}  0.9 quantile {quantiles[90]:.4f}")
    return 0


def _probe(arguments: argparse.Namespace, demo_samples: DemoSamples | None) -> int:
    from probes.build import build
    from probes.calibrate import calibrate
    from steering.vectors import NAME

    if arguments.calibrate_sage or arguments.calibrate_sinks:
        return _calibrate(arguments, demo_samples)
    if not NAME.fullmatch(arguments.name):
        raise ValueError(f"--name {arguments.name!r} must match {NAME.pattern}")
    out = Path(arguments.out or Path(arguments.model) / "vectors" / f"{arguments.name}.safetensors")
    held_back = arguments.calibration_samples if arguments.calibrate else 0
    samples = _samples(arguments, demo_samples, arguments.samples + held_back, PROBE_SEEDS + arguments.seed)
    if len(samples) < arguments.samples + held_back:
        logging.getLogger(__name__).warning("Only %d samples: fewer than asked for.", len(samples))
        held_back = min(held_back, len(samples) // 3)
    used = samples[: len(samples) - held_back]
    engine = _engine(arguments)
    vector = build(
        engine, used, name=arguments.name, layers=arguments.layers, seed=arguments.seed, quiet=arguments.quiet
    )
    if held_back:
        vector = calibrate(engine, vector, samples[len(used) :], layers=arguments.layers, quiet=arguments.quiet)
    vector.save(out)
    _print_vector(vector, out)
    return 0


def _eval_mc2(arguments: argparse.Namespace, demo_samples: DemoSamples | None) -> int:
    from probes.evaluate import evaluate, print_table

    samples = _samples(arguments, demo_samples, arguments.limit, arguments.seed)
    engine = _engine(arguments)
    vector = _vector(arguments.vector, arguments.model)
    evaluation = evaluate(
        engine, vector, samples, strength=arguments.strength, instruct=arguments.instruct,
        random_directions=arguments.random_directions, seed=arguments.seed, quiet=arguments.quiet,
    )  # fmt: skip
    if arguments.json:
        write_json(arguments.json, evaluation.to_json())
    print_table(
        evaluation, f"{vector.name}, strength {arguments.strength:g}: {len(samples)} samples, seed {arguments.seed}"
    )
    return 0


def _eval_sage(arguments: argparse.Namespace, draw: DemoFaithfulness) -> int:
    from probes.faithfulness import as_markdown, evaluate, stages

    existence, differences, categories = _faithfulness_samples(arguments, draw)
    engine = _engine(arguments)
    report = evaluate(engine, stages(arguments.sweep), existence, differences, categories, arguments.quiet)
    tables = as_markdown(
        report,
        f"SAGE on {engine.mllm.name}: {len(existence)} existence questions, {len(differences)} pairs of pictures"
        + (f" with noise {arguments.noise:g}" if arguments.noise else "")
        + f", seed {arguments.seed}, 95 % intervals",
    )
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.markdown:
        Path(arguments.markdown).write_text(tables)
    print(tables)
    return 0


def _faithfulness_samples(
    arguments: argparse.Namespace, draw: DemoFaithfulness
) -> tuple[Sequence[Existence], Sequence[Difference], Sequence[str]]:
    """POPE's questions where files are given, else the demo world's, with its pairs and the names of its objects."""
    if not arguments.pope:
        return draw(arguments.limit, arguments.seed, arguments.noise)
    from probes import pope

    if not arguments.images:
        raise ValueError("--pope needs --images, the folder of COCO val2014")
    found = pope.load(arguments.pope, arguments.images)
    random.Random(arguments.seed).shuffle(found)
    return found[: arguments.limit], [], ()


def write_json(path: str | Path, report: dict[str, Any]) -> None:
    """Write a report atomically: a reader sees the old file or the whole new one."""
    from steering.files import write_atomically

    write_atomically(path, (json.dumps(report, indent=2) + "\n").encode())


def _samples(
    arguments: argparse.Namespace, demo_samples: DemoSamples | None, count: int, seed: int
) -> Sequence[Sample]:
    """`count` samples (fewer where a file has fewer), drawn by the seed from the MC2 file or the demo world."""
    from probes import mc2

    tasks = set(getattr(arguments, "tasks", None) or ())
    if arguments.mc2:
        if not arguments.images:
            raise ValueError("--mc2 needs --images, the folder of COCO 2014")
        found = mc2.load(arguments.mc2, arguments.images)
        random.Random(arguments.seed).shuffle(found)
    elif demo_samples is None:
        raise ValueError("--mc2 is needed: there is no demo world here to draw conflicts from")
    else:
        # Tasks come in turn, so a draw of several times the count holds enough of any one of them.
        found = list(demo_samples(count * 8 if tasks else count, seed))
    known = {sample.task for sample in found}
    if tasks - known:
        raise ValueError(f"--tasks: unknown {', '.join(sorted(tasks - known))}; there are {', '.join(sorted(known))}")
    chosen = [sample for sample in found if not tasks or sample.task in tasks]
    return chosen[:count]


def _engine(arguments: argparse.Namespace) -> Engine:
    import steering

    mllm = steering.load(arguments.model, device=arguments.device)
    return steering.Engine(mllm, slots=arguments.slots, threads=arguments.threads)


def _vector(wanted: str, model: str | Path) -> SteeringVector:
    from steering import SteeringVector, VectorStore

    if Path(wanted).is_file():
        return SteeringVector.load(wanted)
    return VectorStore(Path(model) / "vectors").get(wanted)


def _print_vector(vector: SteeringVector, path: Path) -> None:
    info = vector.info
    print(f"{path}: {vector.name}, {info['samples']} pairs, layers by score {info['ranking']}")
    if "calibration" not in info:
        print(
            f"layer {vector.layers[0]}, published weight {float(vector.weight[vector.layers[0]]):.4g}, not calibrated"
        )
        return
    calibration = info["calibration"]
    chosen, low_high = calibration["chosen"], "{:g} to {:g}".format(*calibration["range"])
    print(
        f"layer {calibration['layer']}, strength 1.0 = {calibration['factor']:g} of the published weight, range {low_high}; "
        f"Vision Ratio {calibration['baseline']['plain']['vision_ratio']} plain, {chosen['vision']['vision_ratio']} toward "
        f"vision, {chosen['text']['vision_ratio']} toward text"
    )
