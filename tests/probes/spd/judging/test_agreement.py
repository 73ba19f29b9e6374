"""Agreement of judges: kappa by hand, and what the rules read of the labelled cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from probes.image_pairs.coco import CATEGORIES
from probes.image_pairs.faithfulness import Faithfulness
from probes.spd.judging.agreement import NONE, agreement, compared_by, found_by, kappa
from probes.spd.judging.cases import CLAIMS, PAIRED
from probes.spd.judging.rules import Statement, ruled
from probes.spd.scoring import Verdict


def test_kappa_by_hand() -> None:
    # Cohen's own layout: 20 and 15 agree, 5 and 10 do not; .7 agree, .5 by chance.
    first = ["yes"] * 25 + ["no"] * 25
    second = ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
    result = kappa(first, second)
    assert (result["agreed"], result["kappa"]) == (pytest.approx(0.7), pytest.approx(0.4))
    low, high = result["kappa_95"]
    assert 0.1 < low < 0.4 < high < 0.7
    assert kappa(first, first)["kappa"] == 1
    assert kappa(["a", "b"] * 8, ["b", "a"] * 8)["kappa"] == pytest.approx(-1)
    assert kappa(["a"] * 4, ["a"] * 4) == {"agreed": 1.0, "kappa": None, "kappa_95": None}


def test_the_cases_have_every_label_often_enough() -> None:
    assert min(Counter(finding for *_, finding in CLAIMS).values()) >= 3
    assert set(Counter(label for *_, label in PAIRED).values()) == {6}


def test_rules_agree_where_they_can_read_and_never_take_one_claim_for_another() -> None:
    agreements = agreement()
    assert {label: [(row["first"], row["second"], row["n"]) for row in rows] for label, rows in agreements.items()} == {
        "claims": [("by hand", "by rules", 30)],
        "pairs of claims": [("by hand", "by rules", 18)],
    }
    assert agreements["claims"][0]["agreed"] == 24 / 30
    assert agreements["pairs of claims"][0]["agreed"] == 13 / 18

    def rules(statements: Sequence[Statement]) -> list[Verdict]:
        return [ruled(statement, CATEGORIES) for statement in statements]

    for labelled, judged in ((CLAIMS, found_by(rules)), (PAIRED, compared_by(rules))):
        for (*_, label), by_rules in zip(labelled, judged, strict=True):
            assert by_rules in (label, NONE)  # worded as no rule knows


def test_a_judge_stands_beside_the_rules_on_the_cases_that_it_judged() -> None:
    def silent(statements: Sequence[Statement]) -> list[Verdict]:
        return [Verdict(None, None) for _ in statements]

    def half(statements: Sequence[Statement]) -> list[Verdict]:
        """Judge every second case as the first label of all, and give no verdict on the others."""
        return [
            Verdict(("consistent",), Faithfulness(1, {}, False)) if i % 2 else Verdict(None, None)
            for i in range(len(statements))
        ]

    none = {"agreed": None, "kappa": None, "kappa_95": None}
    for label, n in (("claims", 30), ("pairs of claims", 18)):
        rows = agreement(silent)[label]
        assert [(row["first"], row["second"], row["n"]) for row in rows] == [
            ("by hand", "by rules", n), ("by hand", "by the judge", 0), ("by rules", "by the judge", 0),
        ]  # fmt: skip
        assert {name: rows[1][name] for name in none} == {name: rows[2][name] for name in none} == none
    rows = agreement(half)["claims"]
    assert [row["n"] for row in rows] == [30, 15, 15]
    assert rows[1]["agreed"] == sum(finding == "faithful" for *_, finding in CLAIMS[1::2]) / 15
