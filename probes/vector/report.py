"""The report of a probe: the layers, the chosen one, and the effect and cost of steering at it."""

from __future__ import annotations

from typing import Any

from probes.answering.versions import in_words, versions
from probes.conflicts.samples import SIDES
from probes.conflicts.words import INSTRUCTIONS
from probes.reporting import plots
from probes.reporting.report import Report
from probes.vector.agreement import Agreement, name_of
from probes.vector.build import Recipe
from probes.vector.projection import Projection
from probes.vector.verdict import Followed
from steering import SteeringVector


def report(
    vector: SteeringVector,
    model: str,
    data_from: str,
    instructed: Followed,
    doubts: list[str],
    projection: Projection | None,
    agreement: Agreement | None = None,
) -> tuple[Report, dict[str, Any]]:
    """Return the report, and the same as data; `data_from` is the origin of the samples in words."""
    info, recipe = vector.info, Recipe.of(vector)
    page = Report(f"Steering vector {vector.name} of {model}")
    page.facts({
        "Data": data_from,
        "Tasks": ", ".join(info["tasks"]),
        "Model": model,
        "Instructions": f"{INSTRUCTIONS[recipe.wording]}, word for word",
        "Versions": in_words(versions()),
    })  # fmt: skip
    page.text(
        f"{info['samples']} pairs of prompts that differ in the instruction only, seed {info['seed']}. v = mean over the "
        f"pairs of h(text) - h(vision) at the prompt's {_token(recipe.position)}."
    )
    page.heading("Is there a direction?")
    page.text("\n".join(f"- {doubt}" for doubt in doubts) if doubts else "Yes: nothing speaks against it.")
    for warning in info.get("warnings", ()):
        page.text(warning)
    page.table(
        ["what", "value"],
        [
            ("agreement of the pairs at the chosen layer (1 = all alike)", info["agreement"][vector.layers[0]]),
            ("vision answers, instructed toward vision", instructed.toward_vision),
            ("vision answers, instructed toward text", instructed.toward_text),
            ("difference", instructed.difference),
            ("its 95 % interval", instructed.in_words),
            ("samples asked, in both orders of the options", instructed.n),
        ],
    )
    layers(page, vector)
    if agreement is not None:
        _agreement(page, agreement)
    _weights(page, vector, recipe)
    if projection is not None:
        _states(page, vector, projection)
    if "calibration" in info:
        _calibration(page, info["calibration"])
    data = {
        "name": vector.name, "model": model, "data": data_from, "versions": versions(),
        "fingerprint": vector.fingerprint, "layers": list(vector.layers),
        "mean_abs": vector.mean_abs.tolist(), "std": vector.std.tolist(), "weight": vector.weight.tolist(),
        "instructed": instructed.to_json(), "doubts": doubts, "info": info,
    }  # fmt: skip
    if projection is not None:
        about: dict[str, Any] = {"explained": list(projection.explained), "centres": projection.centres()}
        data["projection"] = about | projection.shifts()
    if agreement is not None:
        data["agreement"] = agreement.to_json()
    return page, data


def _token(position: int) -> str:
    return "last token" if position == -1 else f"token {position}, counted from its end"


def layers(page: Report, vector: SteeringVector) -> None:
    """Add the plots and the table of all layers."""
    info, chosen = vector.info, vector.layers
    page.heading("Layers")
    page.text(
        "Ranked by the held-out pairs; the deviation is that of the pairs' differences along the direction."
        if info.get("learner", {}).get("held_out")
        else "Chosen by mean and deviation: a direction is good where mean |v| is large and differs little between samples. "
        "Layers whose pairs disagree come last."
    )
    mean, std = vector.mean_abs.tolist(), vector.std.tolist()
    page.plot("layers", plots.layers(mean, std, chosen), "Mean |v| of each layer and its deviation over samples")
    page.plot("ranking", plots.ranking(info["score"], chosen), "Layers by mean / deviation")
    ranking = info["ranking"]
    page.table(
        ["layer", "mean |v|", "deviation", "mean / deviation", "agreement", "rank"],
        [
            (layer, mean[layer], _of_several(info, std[layer]), _of_several(info, info["score"][layer]),
             info["agreement"][layer], ranking.index(layer) + 1 if layer in ranking else None)
            for layer in range(len(mean))
        ],
    )  # fmt: skip


def _of_several(info: dict[str, Any], value: float) -> float | None:
    """Return a deviation, or a quotient with one; None for a single pair, which has none."""
    return value if info["samples"] > 1 else None


def _agreement(page: Report, agreement: Agreement) -> None:
    page.heading("Other wordings and positions")
    page.text(
        f"Cosine of the direction with that of this probe's wording and position ({name_of(agreement.own)}), all from "
        f"{agreement.n} samples. Columns differ in the instruction toward the text and in the token that is read (-1 "
        "the last, -2 the one before it)."
    )
    others = [key for key in agreement.cosines if key != agreement.own]
    page.table(
        ["layer", *map(name_of, others)],
        [(layer, *row) for layer, row in enumerate(zip(*(agreement.cosines[key] for key in others), strict=True))],
    )


def _weights(page: Report, vector: SteeringVector, recipe: Recipe) -> None:
    page.heading("Weight (equation 2)")
    states, sizes = (vector.info["magnitudes"][name] for name in ("states", "direction"))
    page.text(
        "The published weight scales the direction to the norm of the states. The direction's norm is the mean over the "
        "queries of |v(q)|, or the norm of their mean, which is smaller where queries disagree. The states are those of "
        f"plain or of instructed prompts. Here: {_READINGS[recipe.size]} and {recipe.states} states; weights are in "
        "published units."
    )
    readings = [(size, state) for size in sizes for state in states]
    page.table(
        ["layer", *(f"mean |h|, {name}" for name in states), *_READINGS.values(),
         *(f"{_READINGS[size]} and {state}: weight" for size, state in readings)],
        [
            (layer, *(states[name][layer] for name in states), *(sizes[name][layer] for name in sizes),
             *(_over(states[state][layer], sizes[size][layer]) for size, state in readings))
            for layer in range(len(vector.direction))
        ],
    )  # fmt: skip


_READINGS = {"queries": "mean |v(q)|", "mean": "|mean v|"}


def _over(state: float, size: float) -> float | None:
    return state / size if size > 0 else None


def _states(page: Report, vector: SteeringVector, projection: Projection) -> None:
    page.heading(f"States after layer {vector.layers[0]}")
    page.text(
        "Each point is the state of a prompt at the probed token, on the first two principal components of all settings "
        "together; the large marks are the settings' centres."
    )
    page.plot("states", plots.states(projection.points, projection.explained), "States by setting")
    centres = projection.centres()
    x, y = centres["plain"]
    page.table(
        ["setting", "centre, first", "centre, second", "distance from plain"],
        [(name, a, b, ((a - x) ** 2 + (b - y) ** 2) ** 0.5) for name, (a, b) in centres.items()],
    )


def _calibration(page: Report, calibration: dict[str, Any]) -> None:
    low, high = calibration["range"]
    factor = calibration["factor"]
    budget = ", ".join(f"{name} {value:g}" for name, value in calibration["budget"].items())
    page.heading("Calibration")
    page.text(
        f"Strength 1.0 is {factor:g} of the published weight at layer {calibration['layer']}, so {factor:g} in published "
        f"units; strengths from {low:g} to {high:g} ({low * factor:g} to {high * factor:g} published) stay within the "
        f"damage budget ({budget}) on {calibration['samples']} samples the vector was not built from. "
        f"Targets {'reached' if calibration['targets_reached'] else 'NOT reached'}; "
        f"{'within' if calibration['within_budget'] else 'NOT within'} the budget."
    )
    page.text(_side_effect(calibration))
    curve = calibration["curve"]
    strengths = [point["strength"] for point in curve]
    axes: dict[str, Any] = {
        "xlabel": "strength (calibrated)", "other_x": ("strength (published)", factor), "marks": {1.0: "default"},
    }  # fmt: skip
    page.plot(
        "effect",
        plots.curves(
            strengths,
            {f"toward {side}": [point[side]["vision_ratio"] for point in curve] for side in SIDES},
            ylabel="Vision Ratio",
            **axes,
        ),
        "Effect by strength",
    )
    damages = {
        "others' share": [max(point[side]["s_others"] for side in SIDES) for point in curve],
        "accuracy, image only": [point["image_accuracy"] for point in curve],
        "accuracy, context only": [point["context_accuracy"] for point in curve],
        "KL (nats)": [point["kl"] for point in curve],
        "repetition": [point["repetition"] for point in curve],
    }
    page.plot(
        "damage",
        plots.curves(strengths, damages, ylabel="share, or nats", **axes),
        "Damage by strength, the worse of both directions",
    )
    base = calibration["baseline"]
    page.table(
        ["strength", "published", "Vision Ratio toward vision", "toward text", *damages,
         "context only, steered toward vision"],
        [
            (0.0, 0.0, base["plain"]["vision_ratio"], base["plain"]["vision_ratio"], base["plain"]["s_others"],
             base["image_accuracy"], base["context_accuracy"], 0.0, base["repetition"], base["context_accuracy"]),
            *(
                (strength, strength * factor, *(point[side]["vision_ratio"] for side in SIDES),
                 *(values[i] for values in damages.values()), _less(base["context_accuracy"], point["cross_fall"]))
                for i, (strength, point) in enumerate(zip(strengths, curve, strict=True))
            ),
        ],
    )  # fmt: skip


def _side_effect(calibration: dict[str, Any]) -> str:
    """Return the sentences on the accuracy that the budget bounds, and on the one that it does not."""
    before, fall = calibration["baseline"]["context_accuracy"], calibration["chosen"]["cross_fall"]
    lost = "was not measured" if fall is None else f"is {before - fall:.3f} at strength 1.0, {before:.3f} unsteered"
    return (
        "The budget bounds the accuracy without a conflict where the modality that is asked for is there: with the image "
        "alone, steered toward either side, and with the context alone, steered toward text. It does not bound one side "
        f"effect: the accuracy with the context alone, steered toward vision, {lost}."
    )


def _less(baseline: float, fall: float | None) -> float | None:
    return None if fall is None else baseline - fall
