"""The page of `helmsight demo organisms`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from demo.training.recipes import ORGANISMS, SHARES, SIZES
from probes.reporting import plots
from probes.reporting.report import Report
from probes.reporting.tables import Measured

Found = Mapping[str, Any]
"""The measurements of an organism, by name."""


def report(about: Mapping[str, str], organisms: Mapping[str, Found]) -> Report:
    """Return the page with the measurements of each organism, and the series that several of them form."""
    page = Report("The embedded organisms")
    page.facts(about)
    page.text(
        "`helmsight demo train --organism NAME` trains each organism, unattended and seeded, and `helmsight demo "
        "organisms` measures it. Vision ratio: of the conflicts of image and text that are answered alike in both orders of "
        "their options, the share that follows the image. Right: the share of the same questions that is answered rightly "
        "in both orders without a text; a model that was not taught to choose options decides few. Intervals are Wilson's "
        "of 95 %. Minutes are of one core that other programs shared."
    )
    page.table(
        ("organism", "parameters", "questions", "minutes", "right", "vision ratio", "decided", "sha256"),
        [_row(name, results) for name, results in organisms.items()],
    )
    page.text("\n".join(f"- **{name}**: {ORGANISMS[name].about}" for name in organisms if name in ORGANISMS))
    _conflicts(page, organisms)
    _sizes(page, organisms)
    _attention(page, organisms)
    _awareness(page, organisms)
    return page


def _row(name: str, results: Found) -> tuple[object, ...]:
    conflict, alone = _conflict(results), results["preference"]["picture_alone"]
    spent = results["parameters"], results.get("questions"), results.get("minutes")
    right = Measured(alone["s_vision"], alone["s_vision_95"])
    return (name, *spent, right, _ratio(conflict), _count_decided(conflict), results["sha256"][:12])


def _ratio(conflict: Found) -> Measured:
    return Measured(conflict["vision_ratio"], conflict.get("vision_ratio_95"))


def _count_decided(conflict: Found) -> int:
    return round((conflict["s_vision"] + conflict["s_text"]) * conflict["n"])


def _conflicts(page: Report, organisms: Mapping[str, Found]) -> None:
    shares = [share for share in SHARES if f"conflicts-{share}" in organisms]
    if len(shares) < 2:
        return
    page.heading("Share of conflict data in the training")
    page.text(
        "As in the modality-preference paper (figure 3, middle), a trained model continues with questions of which some "
        "have a text that contradicts the image, and the image is right. The line is the default model, from which all "
        "start."
    )
    conflicts = {share: _conflict(organisms[f"conflicts-{share}"]) for share in shares}
    page.table(
        ("% of conflicts", "vision ratio", "decided", "neither"),
        [
            (share, _ratio(conflict), _count_decided(conflict), conflict["s_others"])
            for share, conflict in conflicts.items()
        ],
    )
    series = {"after training": [conflict["vision_ratio"] for conflict in conflicts.values()]}
    if "default" in organisms:
        series["before"] = [_conflict(organisms["default"])["vision_ratio"]] * len(shares)
    intervals = {"after training": [conflict.get("vision_ratio_95") for conflict in conflicts.values()]}
    figure = plots.curves(
        [float(share) for share in shares], series, xlabel="share of conflict data (%)", ylabel="vision ratio",
        intervals=intervals,
    )  # fmt: skip
    page.plot("conflicts", figure, "Vision ratio against the share of conflict data")


def _sizes(page: Report, organisms: Mapping[str, Found]) -> None:
    sizes = [name for name in SIZES if name in organisms]
    if len(sizes) < 2:
        return
    page.heading("Sizes")
    page.table(
        ("organism", "parameters", "right", "vision ratio", "neither"),
        [
            (
                *_row(name, organisms[name])[:2],
                *_row(name, organisms[name])[4:6],
                _conflict(organisms[name])["s_others"],
            )
            for name in sizes
        ],
    )


def _conflict(results: Found) -> Found:
    return results["preference"]["conflict"]


def _attention(page: Report, organisms: Mapping[str, Found]) -> None:
    attended = {name: results["attention"] for name, results in organisms.items() if results.get("attention")}
    if not attended:
        return
    page.heading("The image that an answer rests on")
    page.text(
        "Questions about one of three images; only rightly answered ones count. The metric "
        "(implicit-visual-misunderstanding paper, section 3) that is best on the first half of them determines the "
        "focused image; the second half is measured. Then the same question is asked again with the focused image, or "
        "another one at random, replaced by gray. Where attention shows which image was used, only hiding the focused one "
        "changes answers."
    )
    page.table(
        ("organism", "answered rightly", "metric", "attention accuracy", "change: focused hidden", "change: another", "n"),
        [
            (
                name, _as_measured(results["answered"]), results["metric"], _as_measured(results["attention_accuracy"]),
                *(_as_measured(results["changed"][image]) for image in ("focused", "another")),
                results["attention_accuracy"]["n"],
            )
            for name, results in attended.items()
        ],
    )  # fmt: skip
    wrong = {
        name: results["changed_where_wrong"] for name, results in attended.items() if results["changed_where_wrong"]
    }
    if wrong:
        page.text(
            "Right answers whose focused image is not the one asked about (the paper's implicit misunderstandings):"
        )
        page.table(
            ("organism", "change: focused hidden", "change: the one asked about hidden", "n"),
            [
                (name, *(_as_measured(changes[image]) for image in ("focused", "asked about")), changes["focused"]["n"])
                for name, changes in wrong.items()
            ],
        )


def _awareness(page: Report, organisms: Mapping[str, Found]) -> None:
    answered = {name: results["awareness"] for name, results in organisms.items() if results.get("awareness")}
    if not answered:
        return
    page.heading("Refusals")
    page.text(
        "MM-SAP's parts in the demo world (`helmsight eval mm-sap` measures more), each question once. kk: answered "
        "rightly. ku: rightly refused. answered: not refused. Questions that no image answers have other wordings than "
        "those that the refuser was trained on, and things that are never seen did not occur in training."
    )
    page.table(
        ("organism", "part", "kk", "ku", "answered", "n"),
        [
            (name, part, *(_as_measured(scores[metric]) for metric in ("kk", "ku", "answer_rate")), scores["kk"]["n"])
            for name, parts in answered.items()
            for part, scores in parts.items()
        ],
    )


def _as_measured(share: Found) -> Measured:
    return Measured(share["value"], share["value_95"])
