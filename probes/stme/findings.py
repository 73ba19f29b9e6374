"""Results beside the comparison of conditions: the contents of all the paper's tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probes.answering.base import Reply
from probes.harness.bootstrap import proportion
from probes.harness.comparison import BASELINE, PartAnswered
from probes.stme.answers import reads_digits
from probes.stme.attention import Curves, Look, convergence, halves, mean_of, quadrants, rise
from probes.stme.evaluate import BLIND, HIDDEN, PATCHES, SHUFFLED, WHICH, Answered, Asking
from probes.stme.samples import NEEDLE, TargetSample
from probes.stme.within import patches

Json = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """A sample with its answer and the answer's look; None if that was not measured."""

    sample: TargetSample
    reply: Reply
    right: bool
    look: Look | None


def findings(
    asked: Asking, answered: Mapping[str, Answered], controls: Mapping[str, PartAnswered[Any]]
) -> Json:  # fmt: skip
    """Return the data of each table or figure by name, as JSON; without measured attention its parts are left out."""
    seen = {name: _seen(asked, one) for name, one in answered.items()}
    plain = seen[BASELINE]
    blind = [bool(one["counted"]) for one in controls[BLIND].tallies]
    found: Json = {"which": controls[WHICH].measured(), "blind": controls[BLIND].measured()}
    if HIDDEN in controls:
        found["hidden"] = controls[HIDDEN].measured()
    if SHUFFLED in controls:
        found["shuffles"] = _grouped(_orders(asked, controls[SHUFFLED]), _shuffles)
        found["places"] = places([*plain, *(one for order in _orders(asked, controls[SHUFFLED]) for one in order)])
    if not looks(plain):
        return found
    if PATCHES in controls:
        found["patches"] = patches(controls[PATCHES])
    return found | {
        "attention": {name: _by_difficulty(own, attention) for name, own in seen.items()},
        "unseen_needed": {
            "answers": proportion(
                sum(one.right for one, b in zip(plain, blind, strict=True) if not b), blind.count(False)
            ),
            "attention": attention([one for one, b in zip(plain, blind, strict=True) if not b])["right"],
        },
        "anchor": anchored(plain),
        "needles": needles(plain),
        "convergence": _by_difficulty(plain, converges),
        "cases": cases(plain),
    }


def _seen(asked: Asking, answered: Answered) -> list[Seen]:
    return [
        Seen(sample, reply, asked.right(sample, reply), asked.look(sample, reply))
        for sample, (reply, *_) in zip(answered.part.samples, answered.replies, strict=True)
    ]


def _orders(asked: Asking, answered: Answered) -> list[list[Seen]]:
    """Return, for each order, all samples in it."""
    found: list[list[Seen]] = [[] for _ in range(asked.shuffles)]
    for sample, replies in zip(answered.part.samples, answered.replies, strict=True):
        for own, moved, reply in zip(found, asked.shuffled(sample), replies, strict=True):
            own.append(Seen(moved, reply, asked.right(moved, reply), asked.look(moved, reply)))
    return found


def looks(seen: Iterable[Seen], right: bool | None = None) -> list[Look]:
    """Return the looks of all answers, or of the right or the wrong ones."""
    return [one.look for one in seen if one.look is not None and right in (None, one.right)]


def _by_difficulty(seen: Sequence[Seen], measure: Callable[[Sequence[Seen]], Json]) -> Json:
    parts = {"all": list(seen)}
    for one in seen:
        parts.setdefault(one.sample.difficulty, []).append(one)
    return {name: measure(part) for name, part in parts.items()}


def _grouped(orders: Sequence[Sequence[Seen]], measure: Callable[[Sequence[Sequence[Seen]]], Json]) -> Json:
    groups = ("all", *dict.fromkeys(one.sample.difficulty for one in orders[0]))
    return {
        name: measure([[one for one in order if name in ("all", one.sample.difficulty)] for order in orders])
        for name in groups
    }


def attention(seen: Sequence[Seen]) -> Json:
    """Return attention accuracy by metric and N, of right answers (table 1, appendix E) and of wrong ones (table 4).

    It also holds the chance level for right answers, and the four quadrants by M-LND over the model's own last layers and by
    the best point of the right answers' curves.
    """
    every, right, wrong = looks(seen), looks(seen, right=True), looks(seen, right=False)
    if not every:
        return {"right": {"n": 0}, "wrong": {"n": 0}}
    layers = len(every[0].sigma)
    curves = Curves.of(right, layers)
    metric, n = curves.best
    return {
        "right": curves.to_json() | ({"halves": halves(right, layers)} if len(right) > 1 else {}),
        "wrong": Curves.of(wrong, layers).to_json(),
        "every": Curves.of(every, layers).to_json(),
        "chance": float(np.mean([1 / look.sigma.shape[1] for look in right])) if right else None,
        "quadrants": {"metric": "m_lnd", "layers": every[0].n, **quadrants(every, "m_lnd", every[0].n)},
        "quadrants_best": {"metric": metric, "layers": n, **quadrants(every, metric, n)},
    }


def _shuffles(orders: Sequence[Sequence[Seen]]) -> Json:
    """Return mean and sample standard deviation over the orders (table 2), i.e. with divisor orders - 1.

    They are those of the answers' accuracy, and of the attention's by the best metric and N of each order, as in the paper,
    and by the model's own.
    """
    found: dict[str, list[float]] = {"answers": [float(np.mean([one.right for one in order])) for order in orders]}
    right = [looks(order, right=True) for order in orders]
    if all(right):
        best = [Curves.of(own, len(own[0].sigma)).to_json()["best"]["value"] for own in right]
        found["attention_best"] = best
        found["attention"] = [float(np.mean([one.image == one.target for one in own])) for own in right]
    return {
        name: {"mean": float(np.mean(values)), "sd": _deviation(values), "orders": values}
        for name, values in found.items()
    }


def _deviation(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def places(seen: Sequence[Seen]) -> Json:
    """Return the accuracy of answers, and of right answers' attention, by the target's place and number of pictures.

    Questions about an anchor, which have an additional picture, are left out.
    """
    found: dict[tuple[int, int], list[Seen]] = {}
    for one in seen:
        if not one.sample.anchor:
            found.setdefault((one.sample.candidates, one.sample.target), []).append(one)
    return {
        f"{place} of {pictures}": {
            "answers": proportion(sum(one.right for one in own), len(own)),
            "attention": _hit(looks(own, right=True)),
        }
        for (pictures, place), own in sorted(found.items())
    }


def _hit(given: Sequence[Look]) -> Json:
    """Return the share of looks with the target as the focused picture, by M-LND over the model's own last layers."""
    return proportion(sum(look.image == look.target for look in given), len(given))


def anchored(seen: Sequence[Seen]) -> Json:
    """Return attention accuracy on questions about an anchor (equation 7, table 3).

    It is by the anchor's rows and by those of the text, of right answers and of all.
    """
    own = [one for one in seen if one.sample.anchor]
    found: Json = {"samples": len(own), "answers": proportion(sum(one.right for one in own), len(own))}
    for name, right in (("right", True), ("every", None)):
        given = looks(own, right)
        if given:
            text = [replace(look, sigma=look.text) for look in given if look.text is not None]
            layers = len(given[0].sigma)
            found[name] = {"image": Curves.of(given, layers).to_json(), "text": Curves.of(text, layers).to_json()}
    return found


def needles(seen: Sequence[Seen]) -> Json:
    """Return attention accuracy of needles that were found: the answer is right, or reads other digits (table 5)."""
    own = [one for one in seen if one.sample.task == NEEDLE]
    found = [one for one in own if one.right or reads_digits(one.sample, one.reply.text)]
    return {"samples": len(own), "found": len(found), **attention_of(looks(found))}


def attention_of(given: Sequence[Look]) -> Json:
    """Return the curves of these looks, and the share by the model's own metric."""
    return {**Curves.of(given, len(given[0].sigma) if given else 0).to_json(), "own": _hit(given)}


def converges(seen: Sequence[Seen]) -> Json:
    """Return by layer the share of the look that is at the target, of right and of wrong answers (figure 3).

    For right answers it also holds, with intervals over answers, that of the last layer, and its rise from the first to the
    last third of the layers.
    """
    found: Json = {name: convergence(looks(seen, right)) for name, right in (("right", True), ("wrong", False))}
    relative = [look.share * look.sigma.shape[1] for look in looks(seen, right=True)]
    return found | ({"last": mean_of([one[-1] for one in relative]), "rise": rise(relative)} if relative else {})


def cases(seen: Sequence[Seen]) -> list[Json]:
    """Return a right answer that looks at the target, and one that does not (figure 3): the first with the most pictures."""
    found = []
    for name, hit in (("on the target", True), ("elsewhere", False)):
        own = [one for one in seen if one.look and one.right and (one.look.image == one.look.target) is hit]
        if own:
            one = max(own, key=lambda each: each.sample.candidates)
            assert one.look is not None
            found.append({
                "case": name, "sample": one.sample.id, "question": one.sample.texts[-1], "answer": one.reply.text,
                "target": one.look.target, "focused": one.look.image, "sigma": one.look.sigma.tolist(),
            })  # fmt: skip
    return found
