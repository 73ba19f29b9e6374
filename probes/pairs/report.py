"""The report of a vector from pairs: its data, direction and layers, and the effect of steering at the chosen layer."""

from __future__ import annotations

from typing import Any

from probes.answering.versions import in_words, versions
from probes.pairs.learners import FORMULAS
from probes.reporting import plots
from probes.reporting.report import Report
from probes.reporting.tables import Measured
from probes.vector.report import layers
from steering import SteeringVector

MOVES = "Yes: the pairs agree, and the direction moves answers that it was not built from both ways."
AGREES = (
    "The pairs agree. This only shows that they differ alike: pairs that differ in the same words always do. "
    "The effect of the direction on answers was not measured; `--score` measures it."
)


def report(vector: SteeringVector, model: str, data_from: str) -> tuple[Report, dict[str, Any]]:
    """Return the report, and the same as data; `data_from` is the origin of the pairs in words."""
    info, layer = vector.info, vector.layers[0]
    plus, minus = info["sides"]
    page = Report(f"Steering vector {vector.name} of {model}")
    page.facts({
        "Data": data_from, "Model": model, "A positive scale is toward": plus, "A negative scale is toward": minus,
        "Versions": in_words(versions()),
    })  # fmt: skip
    learner = info.get("learner", {"name": "mean"})
    page.text(f"{FORMULAS[learner['name']].format(plus=plus, minus=minus)}; states at the prompts' last token.")
    page.heading("Is there a direction?")
    measured = "calibration" in info
    page.text("\n".join(f"- {doubt}" for doubt in info["doubts"]) or (MOVES if measured else AGREES))
    page.table(
        ["what", "value"],
        [
            ("different pairs", info["samples"]),
            ("agreement of the pairs at the chosen layer (1 = all alike)", info["agreement"][layer]),
            ("agreement of as many pairs that have nothing in common", info["samples"] ** -0.5),
        ],
    )
    if (held_out := learner.get("held_out")) is not None:
        page.text(
            f"Learned from three quarters of the pairs, the direction of each layer was measured on the other "
            f"{held_out['pairs']}, which chose the layer; then it was learned from all pairs."
        )
        auroc = held_out["auroc"]
        page.table(
            ["AUROC of the sides' held-out states along the direction (0.5 = chance)", "pairs"],
            [(None if auroc is None else Measured(auroc[0], (auroc[1], auroc[2])), held_out["pairs"])],
        )
    layers(page, vector)
    _weights(page, vector)
    if "calibration" in info:
        _calibration(page, info["calibration"], (plus, minus))
    data = {
        "name": vector.name, "kind": vector.kind, "model": model, "data": data_from, "versions": versions(),
        "fingerprint": vector.fingerprint, "layers": list(vector.layers), "weight": vector.weight.tolist(),
        "mean_abs": vector.mean_abs.tolist(), "std": vector.std.tolist(), "doubts": info["doubts"], "info": info,
    }  # fmt: skip
    return page, data


def _weights(page: Report, vector: SteeringVector) -> None:
    page.heading("Weight")
    if vector.info.get("learner", {}).get("name") == "iti":
        page.text(
            "Strength 1.0 adds one sigma, the deviation of the states along the direction, so that strength is the paper's "
            f"alpha. At layer {vector.layers[0]} sigma is {float(vector.direction[vector.layers[0]].norm()):.4g}, and "
            f"strength 1.0 is {vector.info['published']:.4g} of the mean size of a state."
        )
        return
    note = (
        "no answers were scored, so strength 1.0 is the published weight and NOT calibrated: try small strengths first"
    )
    if "calibration" in vector.info:
        note = f"strength 1.0 is {vector.info['calibration']['factor']:g} of it, by the calibration below"
    page.text(
        "The published weight (modality-preference paper, equation 2) scales the direction to the norm of the states, here "
        f"those of both sides' prompts; {note}."
    )
    states, sizes = vector.info["magnitudes"]["states"]["instructed"], vector.info["magnitudes"]["direction"]["queries"]
    page.table(
        ["layer", "mean |h|", "mean |v(q)|", "published weight"],
        [
            (layer, state, size, state / size if size > 0 else None)
            for layer, (state, size) in enumerate(zip(states, sizes, strict=True))
        ],
    )


def _calibration(page: Report, calibration: dict[str, Any], sides: tuple[str, str]) -> None:
    (low, high), factor, rule = calibration["range"], calibration["factor"], calibration["score"]
    budget = ", ".join(f"{name} {value:g}" for name, value in calibration["budget"].items())
    page.heading("Calibration")
    page.text(
        f"Strength 1.0 is {factor:g} of the published weight at layer {calibration['layer']}; strengths from {low:g} to "
        f"{high:g} stay within the damage budget ({budget}) on {calibration['samples']} questions of pairs that the vector "
        f"was not built from. An answer counts for a side if it {rule} {_WITH[rule]} that side and not that of the other "
        f"one. Answers {'are' if calibration['targets_reached'] else 'are NOT'} moved; "
        f"{'within' if calibration['within_budget'] else 'NOT within'} the budget."
    )
    curve = calibration["curve"]
    page.plot(
        "effect",
        plots.curves(
            [point["strength"] for point in curve],
            {
                f"{side!r}, {way} it": [point[way][own] for point in curve]
                for own, side in zip(("toward", "away"), sides, strict=True)
                for way in ("toward", "away")
            },
            xlabel="strength (calibrated)",
            ylabel="share of answers",
            other_x=("strength (published)", factor),
            marks={1.0: "default"},
        ),
        "Share of answers of each side by strength, steered toward the first side and away from it",
    )
    plain = calibration["baseline"]["plain"]
    page.table(
        ["strength", "published", *(f"+: {side}" for side in sides), *(f"-: {side}" for side in sides),
         "neither, the worse of both", "repetition"],
        [
            (0.0, 0.0, *(plain[own] for own in ("toward", "away")) , *(plain[own] for own in ("toward", "away")),
             plain["others"], calibration["baseline"]["repetition"]),
            *(
                (point["strength"], point["dose"],
                 *(point[way][own] for way in ("toward", "away") for own in ("toward", "away")),
                 max(point[way]["others"] for way in ("toward", "away")), point["repetition"])
                for point in curve
            ),
        ],
    )  # fmt: skip


_WITH = {"holds": "the text of", "begins": "with the text of"}
