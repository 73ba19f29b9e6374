"""Readings of the reports of `eval spd-faith` and `eval sage` for the rows of SPD-Faith Bench and SAGE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from probes.harness.comparison import BASELINE
from probes.image_pairs.metrics import TYPES
from probes.reproduce.items import CEILING, FLOOR, Figure, Found, Json, change, figure, is_below

STEPS = (BASELINE, "+ See", "+ Think", "+ Generate")
SUBSTANTIAL = 0.61
METHODS = ("SC", "SR", "API", "Zoom-Refine")


def measured(report: Json, name: str, part: str, setting: str = "all") -> Json:
    """Return the scores of a condition; `part` and `setting` as in the reports of the comparison."""
    scores: Json = report["conditions"][name][part][setting]
    return scores


def raised(scores: Json, metric: str) -> bool:
    """Return whether a metric lies above that of the plain answers: the interval of the difference is above 0.

    An undefined metric, as without claims, has no difference.
    """
    bounds = scores[metric].get("difference_95")
    return bounds is not None and bounds[0] > 0


def harder(metric: str) -> Callable[[Json], Found]:
    """Return a reading of a share by difficulty: hard above easy, with separate intervals."""

    def read(report: Json) -> Found:
        easy, medium, hard = (measured(report, BASELINE, "single", level) for level in ("easy", "medium", "hard"))
        rows = {"easy": easy, "medium": medium, "hard": hard}
        apart = is_below(easy[metric], hard[metric])
        ours = {name: figure(result[metric]) for name, result in rows.items()}
        most = max(result.value for result in ours.values())
        nothing = f"floor: {most:.3f} at most in all three" if most <= FLOOR else ""
        return Found.of(ours, apart, measured(report, BASELINE, "single")["samples"], nothing)

    return read


def _values(scores: Json, *metrics: str) -> dict[str, Figure]:
    return {name: figure(scores[name]) for name in metrics}


def gap(report: Json) -> Found:
    """Compare the detection of differences with the faithfulness of their descriptions."""
    several = measured(report, BASELINE, "several")
    apart = is_below(several["drf"], several["ds_detect"])
    metrics = ("dqr_ratio", "ds_detect", "tf1", "cf1", "cr", "drf")
    return Found.of(_values(several, *metrics), apart, several["samples"])


def quantity(report: Json) -> Found:
    """Compare DQR and DS as the tables define them: claimed over true, and whether any difference is claimed.

    The paper's figure prints 2/3 and 1.0 for two claims of three differences. By its equations DQR cannot exceed DS.
    """
    several = measured(report, BASELINE, "several")
    ours = _values(several, "dqr_ratio", "ds_detect", "dqr_exact", "ds_tolerance")
    fewer = is_below(several["dqr_ratio"], several["ds_detect"])
    return Found.of(ours, fewer, several["samples"])


def types(report: Json) -> Found:
    """Compare precision and recall of the types."""
    several = measured(report, BASELINE, "several")
    ours = _values(several, "tf1", "cf1", *(f"{kind}_{part}" for kind in TYPES for part in ("precision", "recall")))
    kinds = ("color", "remove")
    return Found.of(ours, all(_claims_fewer(several, kind) for kind in kinds), several["samples"])


def _claims_fewer(several: Json, kind: str) -> bool:
    """Return whether the interval of a type's precision lies above its recall's; a type never claimed has no precision."""
    return is_below(several[f"{kind}_recall"], several[f"{kind}_precision"])


def within(metric: str, least: float, most: float, *beside: str) -> Callable[[Json], Found]:
    """Return a reading of a mean over the pairs that have it: the interval lies in the range of the paper's models."""

    def read(report: Json) -> Found:
        several = measured(report, BASELINE, "several")
        bounds = several[metric]["value_95"]
        having = round(several[f"{metric}_pairs"]["value"] * several["samples"])
        inside = bounds is not None and least <= bounds[0] and bounds[1] <= most
        return Found.of(_values(several, metric, *beside), inside, having)

    return read


def methods(report: Json) -> Found:
    """Compare the gains over the plain answers in CR, of all pairs alike, and DRF."""
    names = ("SAGE", *METHODS)
    scores = {name: measured(report, name, "several") for name in names}
    gains = {f"{name} {metric}": change(scores[name][metric]) for name in names for metric in ("cr_all", "drf")}
    most = all(
        (gains[f"SAGE {metric}"].value or 0) > (gains[f"{name} {metric}"].value or 0)
        for name in METHODS
        for metric in ("cr_all", "drf")
    )
    sure = raised(scores["SAGE"], "cr_all") and raised(scores["SAGE"], "drf")
    return Found.of(gains, most and sure, scores["SAGE"]["samples"])


def perturbed(report: Json) -> Found:
    """Compare hints and hidden blocks with the plain answers."""
    names = (
        BASELINE,
        "hint",
        "wrong hint",
        "implicit hint",
        "25 % hidden",
        "50 % hidden",
        "75 % hidden",
        "100 % hidden",
    )
    scores = {name: measured(report, name, "single") for name in names}
    helped = raised(scores["hint"], "right") and raised(scores["implicit hint"], "right")
    flat = scores["75 % hidden"]["right"]["difference"] > -0.1
    ours = {name: figure(score["right"]) for name, score in scores.items()}
    plainly = ours[BASELINE].value
    nothing = (
        f"ceiling: {plainly:.3f} of the plain answers are right, so no hint can help" if plainly >= CEILING else ""
    )
    return Found.of(ours, helped and flat, scores["hint"]["samples"], nothing)


def vcd(report: Json) -> Found:
    """Read the gains of VCD in CR and DRF."""
    result = measured(report, "VCD", "several")
    ours = {metric: change(result[metric]) for metric in ("cr_all", "drf")}
    return Found.of(ours, raised(result, "cr_all") and raised(result, "drf"), result["samples"])


def agreed(report: Json) -> Found:
    """Read the agreement of the rules with the labels by hand: substantial from a kappa of 0.61 on (Landis, Koch 1977)."""
    row = report["agreement"]["claims"][0]
    return Found(row["kappa"], row["kappa_95"][0] > SUBSTANTIAL, row["kappa_95"], row["n"])


def contradicting(report: Json) -> Found:
    """Compare the traces of contradicting and consistent answers inside the model."""
    kinds = {kind: report["inside"][kind] for kind in ("contradicting", "consistent")}
    numbers = ("cosine", "divergence", "faithfulness")
    ours = {f"{kind}, {name}": figure(result[name]) for kind, result in kinds.items() for name in numbers}
    first, second = kinds.values()
    below = first["pairs"] > 0 and first["faithfulness"]["value_95"][1] < second["faithfulness"]["value_95"][0]
    clipped = first["pairs"] > 0 and not first["faithfulness"]["value"] and not second["faithfulness"]["value"]
    nothing = "floor: divergences above 1 make the score 0 on both sides" if clipped else ""
    return Found.of(ours, below, first["pairs"] + second["pairs"], nothing)


def drifting(report: Json) -> Found:
    """Compare the similarity of contradicting answers to "same?" and "different?" with that of consistent ones."""
    kinds = {kind: report["inside"][kind] for kind in ("contradicting", "consistent")}
    names = ("cosine", "last layer")
    ours = {f"{kind}, {name}": figure(result[name]) for kind, result in kinds.items() for name in names}
    first, second = kinds.values()
    below = first["pairs"] > 0 and first["last layer"]["value_95"][1] < second["last layer"]["value_95"][0]
    return Found.of(ours, below, first["pairs"] + second["pairs"])


def ablation(report: Json) -> Found:
    """Read CR of all pairs by stage; the paper's full method has the best value of every metric."""
    ours = {name: figure(measured(report, name, "differences")["cr_all"]) for name in STEPS}
    rising = all(later.value >= earlier.value for earlier, later in pairwise(ours.values()))
    full = measured(report, STEPS[-1], "differences")
    return Found.of(ours, rising and raised(full, "cr_all"), full["samples"])


def alone(run_condition: str, part: str, metric: str) -> Callable[[Json], Found]:
    """Return a reading of a condition's change of a metric."""

    def read(report: Json) -> Found:
        scores, plain = measured(report, run_condition, part), measured(report, BASELINE, part)[metric]["value"]
        gained = change(scores[metric])
        nothing = f"ceiling: {metric} is {plain:.3f} plainly" if plain >= CEILING else ""
        return Found(gained.value, raised(scores, metric), gained.interval, scores["samples"], nothing)

    return read


PEAKS: Mapping[str, tuple[str, str, tuple[str, str, str]]] = {
    "alpha": ("existence", "accuracy", (BASELINE, "See as transfer, alpha 0.1", "See as transfer, alpha 0.2")),
    "gamma": ("existence", "accuracy", (BASELINE, "Think, gamma 0.9", "Think, gamma 0.6")),
    "lambda": ("differences", "cr_all", (BASELINE, "Generate, lambda 0.5", "Generate, lambda 1")),
}
"""The part and metric of each setting, with its conditions: off, the published value, and the paper's strongest."""


def peaks(report: Json) -> Found:
    """Compare each setting's published value with off and with the strongest value."""
    ours: dict[str, Figure] = {}
    peaks_at_published = []
    for name, (part, metric, conditions) in PEAKS.items():
        off, published, strongest = (figure(measured(report, condition, part)[metric]) for condition in conditions)
        ours |= {f"{name} off": off, f"{name} published": published, f"{name} strongest": strongest}
        peaks_at_published.append(published.value > max(off.value, strongest.value))
    full = [name for name in PEAKS if ours[f"{name} off"].value >= CEILING]
    nothing = f"ceiling: without {' and '.join(full)} nothing is left to gain" if full else ""
    return Found.of(ours, all(peaks_at_published), measured(report, BASELINE, "existence")["samples"], nothing)
