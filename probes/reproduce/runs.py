"""The commands that measure the rows, each run once for all its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from probes.reproduce.models import DEFAULT, ORGANISMS, PRIOR


@dataclass(frozen=True)
class Run:
    """A command, with its sample counts in `full` and `quick`.

    place: the options for its folder, which is "{out}"; another run's is "{NAME}". steers: it steers by the vector that
    `probe` built, if the model is not an embedded one. fixed: it names its model itself. timed: it measures time and
    memory, with nothing beside it. model: the embedded model that it measures unless another one is named.
    """

    words: Sequence[str]
    full: Sequence[str] = ()
    quick: Sequence[str] = ()
    place: Sequence[str] = ("--out", "{out}")
    steers: bool = False
    fixed: bool = False
    timed: bool = False
    model: str = DEFAULT

    def command(
        self, name: str, folder: Path, *, quick: bool, model: str | None, loading: Sequence[str] = ()
    ) -> list[str]:
        """Return its words on the command line; `folder` holds one folder for each run, `loading` is added to them."""
        words = [*self.words, *(self.quick if quick else self.full)]
        if model is None and self.model == PRIOR:
            words += ["--model", PRIOR]
        if model is not None and not self.fixed:
            words += ["--model", model, *(("--vector", "{probe}/vector.safetensors") if self.steers else ())]
        if not self.fixed:
            words += loading
        folders = {run: str(folder / run) for run in RUNS} | {"out": str(folder / name)}
        return [word.format_map(folders) if word[:1] == "{" else word for word in (*words, *self.place)]


RUNS: Mapping[str, Run] = {
    "probe": Run(
        ("probe",), ("--samples", "128"), ("--samples", "32", "--no-calibrate"),
        place=("--report", "{out}", "--out", "{out}/vector.safetensors", "--replace", "--force"),
    ),
    "mc2": Run(
        ("eval", "mc2"), ("--limit", "400", "--random-directions", "20"), ("--limit", "40"), steers=True
    ),
    "mc2-plain": Run(("eval", "mc2", "--conditions", "plain"), ("--limit", "1200"), ("--limit", "24")),
    "mc2-lens": Run(
        ("eval", "mc2", "--conditions", "plain", "instruct", "steer", "--lens"), ("--limit", "100"), ("--limit", "8"),
        steers=True,
    ),
    "mc2-case": Run(
        ("eval", "mc2", "--conditions", "instruct", "steer", "both", "--wording", "case"), ("--limit", "200"),
        ("--limit", "8"),
        steers=True,
    ),
    "mc2-samples": Run(
        ("eval", "mc2", "--conditions", "plain", "steer", "--strength", "0.5", "--ablate", "samples"),
        ("--limit", "200"), ("--limit", "16"),
        steers=True,
    ),
    "mc2-tasks": Run(
        ("eval", "mc2", "--conditions", "plain", "steer", "--strength", "0.5", "--ablate", "tasks"),
        ("--limit", "200"), ("--limit", "16"),
        steers=True,
    ),
    "mc2-strength": Run(
        ("eval", "mc2", "--conditions", "plain", "steer", "--ablate", "strength"), ("--limit", "200"), ("--limit", "16"),
        steers=True,
    ),
    "mc2-latency": Run(
        ("eval", "mc2", "--conditions", "plain", "steer", "--ablate", "latency"), ("--limit", "100"), ("--limit", "16"),
        steers=True, timed=True,
    ),
    "mc2-auto": Run(
        ("eval", "mc2", "--conditions", "plain", "steer", "--auto"), ("--limit", "200"),
        ("--limit", "16", "--severity", "0.5"),
        steers=True,
    ),
    "organisms": Run(("demo", "organisms"), ("--count", "200"), ("--count", "24"), fixed=True, model=ORGANISMS),
    "spd-faith": Run(
        (
            "eval", "spd-faith", "--noise", "70", "--conditions", "SAGE", "VCD", "SC", "SR", "API", "Zoom-Refine", "*hint",
            "*hidden",
        ),
        ("--limit", "120", "--several", "40"), ("--limit", "6", "--several", "2"),
    ),
    "sage": Run(
        ("eval", "sage", "--conditions", "+ See", "+ Think", "+ Generate"),
        ("--limit", "300", "--pairs", "60"), ("--limit", "8", "--pairs", "3"), model=PRIOR,
    ),
    "sage-sweep": Run(
        (
            "eval", "sage", "--sweep", "--conditions", "See as transfer, alpha 0.[12]",
            "Think, gamma 0.[69]", "Generate, lambda 0.5", "Generate, lambda 1",
        ),
        ("--limit", "300", "--pairs", "60"), ("--limit", "8", "--pairs", "3"), model=PRIOR,
    ),
    "faithfulness": Run(("eval", "faithfulness"), ("--limit", "200"), ("--limit", "12")),
    "alarm": Run(("eval", "alarm"), ("--limit", "900"), ("--limit", "240")),
    "pope": Run(
        ("eval", "pope", "--conditions", "SAGE", "VCD", "ICD", "opera", "AGLA"), ("--limit", "300"), ("--limit", "12"),
        model=PRIOR,
    ),
    "mme": Run(
        ("eval", "mme", "--noise", "70", "--conditions", "SAGE", "VCD", "ICD"), ("--limit", "150"), ("--limit", "10")
    ),
    "chair": Run(
        ("eval", "chair", "--conditions", "SAGE", "VCD", "ICD"), ("--limit", "240"), ("--limit", "6"), model=PRIOR
    ),
    "phd": Run(("eval", "phd", "--conditions", "toward vision"), ("--limit", "300"), ("--limit", "24"), steers=True),
    "tallyqa": Run(
        ("eval", "tallyqa", "--noise", "70", "--conditions", "toward vision"), ("--limit", "200"), ("--limit", "8"),
        steers=True,
    ),
    "stme": Run(("eval", "stme"), (), ("--limit", "18", "--shuffles", "2")),
    "mm-sap": Run(
        ("eval", "mm-sap", "--conditions", "refusal prompt", "toward*"), ("--limit", "120"),
        ("--limit", "18", "--runs", "2"),
        steers=True,
    ),
}  # fmt: skip
