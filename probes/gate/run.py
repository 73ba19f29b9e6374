"""A run of `helmsight vectors build --gate`, which reads examples and builds, judges, reports and saves a condition."""

from __future__ import annotations

import logging
from dataclasses import replace

from probes.gate.build import build, doubtful, too_few
from probes.gate.file import different, load
from probes.gate.report import report
from probes.harness.options import check_writable
from probes.pairs.run import PairsOptions

_log = logging.getLogger(__name__)


def run(options: PairsOptions) -> None:
    """Build, judge, report and save a condition from the examples in `options.pairs`.

    Raises ValueError if there are doubts about it, unless `force`; for too few examples before the model is loaded.
    """
    for folder in (options.out.parent, options.folder):
        check_writable(folder)
    read = load(options.pairs)
    examples = different(read, options.pairs)
    if len(examples) < len(read):
        _log.warning("%d lines of %s repeat other lines and are left out.", len(read) - len(examples), options.pairs)
    sides = {example.holds for example in examples}
    doubts = too_few(examples)
    options.refuse(doubts)
    if len(sides) < 2 or min(sum(example.holds is side for example in examples) for side in sides) < 4:
        raise ValueError(f'{options.pairs} must hold at least 4 different examples under "when" and 4 under "not"')
    engine = options.model.engine(options.quiet)
    vector = build(
        engine, examples, name=options.name, layers=options.layers, learner=options.learner,
        seed=options.seed, quiet=options.quiet,
    )  # fmt: skip
    doubts += doubtful(vector)
    vector = replace(vector, info=vector.info | {"doubts": doubts, "reliable": not doubts})
    page, data = report(vector, engine.mllm.name, f"{len(examples)} different examples of {options.pairs.name}")
    options.save(vector, doubts, page, data)
    gate = vector.info["gate"]
    print(
        f"{options.out}: {vector.name}, a condition; layer {gate['layer']}, {gate['measure']} above {gate['threshold']:.4g}"
    )
    if doubts:
        print("NOT RELIABLE: " + " ".join(doubts))
    if gate["auroc"] is not None:
        print(
            "on other examples: AUROC {:.3f} ({:.3f} to {:.3f})".format(*gate["auroc"])
            + ', open for {:.0%} ({:.0%} to {:.0%}) of "when"'.format(*gate["open_when"])
            + ' and {:.0%} ({:.0%} to {:.0%}) of "not"'.format(*gate["open_not"])
        )
