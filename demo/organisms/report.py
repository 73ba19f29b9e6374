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
        [_row(name, found) for name, found in organisms.items()],
    )
    page.text("\n".join(f"- **{name}**: {ORGANISMS[name].about}" for name in organisms if name in ORGANISMS))
    _conflicts(page, organisms)
    _sizes(page, organisms)
    _attention(page, organisms)
    _awareness(page, organisms)
    return page


def _row(name: str, found: Found) -> tuple[object, ...]:
    conflict, alone = _conflict(found), found["preference"]["picture_alone"]
    spent = found["parameters"], found.get("questions"), found.get("minutes")
    right = Measured(alone["s_vision"], alone["s_vision_95"])
    return (name, *spent, right, _ratio(conflict), _decided(conflict), found["sha256"][:12])


def _ratio(conflict: Found) -> Measured:
    return Measured(conflict["vision_ratio"], conflict.get("vision_ratio_95"))


def _decided(conflict: Found) -> int:
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
    found = {share: _conflict(organisms[f"conflicts-{share}"]) for share in shares}
    page.table(
        ("% of conflicts", "vision ratio", "decided", "neither"),
        [(share, _ratio(one), _decided(one), one["s_others"]) for share, one in found.items()],
    )
    series = {"after training": [one["vision_ratio"] for one in found.values()]}
    if "default" in organisms:
        series["before"] = [_conflict(organisms["default"])["vision_ratio"]] * len(shares)
    intervals = {"after training": [one.get("vision_ratio_95") for one in found.values()]}
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


def _conflict(found: Found) -> Found:
    return found["preference"]["conflict"]


def _attention(page: Report, organisms: Mapping[str, Found]) -> None:
    looked = {name: found["attention"] for name, found in organisms.items() if found.get("attention")}
    if not looked:
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
                name, _measured(one["answered"]), one["metric"], _measured(one["attention_accuracy"]),
                *(_measured(one["changed"][which]) for which in ("focused", "another")), one["attention_accuracy"]["n"],
            )
            for name, one in looked.items()
        ],
    )  # fmt: skip
    wrong = {name: one["changed_where_wrong"] for name, one in looked.items() if one["changed_where_wrong"]}
    if wrong:
        page.text(
            "Right answers whose focused image is not the one asked about (the paper's implicit misunderstandings):"
        )
        page.table(
            ("organism", "change: focused hidden", "change: the one asked about hidden", "n"),
            [
                (name, *(_measured(one[which]) for which in ("focused", "asked about")), one["focused"]["n"])
                for name, one in wrong.items()
            ],
        )


def _awareness(page: Report, organisms: Mapping[str, Found]) -> None:
    asked = {name: found["awareness"] for name, found in organisms.items() if found.get("awareness")}
    if not asked:
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
            (name, part, *(_measured(one[metric]) for metric in ("kk", "ku", "answer_rate")), one["kk"]["n"])
            for name, parts in asked.items()
            for part, one in parts.items()
        ],
    )


def _measured(share: Found) -> Measured:
    return Measured(share["value"], share["value_95"])
