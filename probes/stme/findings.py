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
    asking: Asking, answered: Mapping[str, Answered], controls: Mapping[str, PartAnswered[Any]]
) -> Json:  # fmt: skip
    """Return the data of each table or figure by name, as JSON; without measured attention its parts are left out."""
    observed = {name: _observe(asking, answers) for name, answers in answered.items()}
    plain = observed[BASELINE]
    blind = [bool(tally["counted"]) for tally in controls[BLIND].tallies]
    results: Json = {"which": controls[WHICH].measured(), "blind": controls[BLIND].measured()}
    if HIDDEN in controls:
        results["hidden"] = controls[HIDDEN].measured()
    if SHUFFLED in controls:
        results["shuffles"] = _group(_orders(asking, controls[SHUFFLED]), _shuffles)
        results["places"] = places(
            [*plain, *(answer for order in _orders(asking, controls[SHUFFLED]) for answer in order)]
        )
    if not looks(plain):
        return results
    if PATCHES in controls:
        results["patches"] = patches(controls[PATCHES])
    return results | {
        "attention": {name: _by_difficulty(answers, attention) for name, answers in observed.items()},
        "unseen_needed": {
            "answers": proportion(
                sum(answer.right for answer, b in zip(plain, blind, strict=True) if not b), blind.count(False)
            ),
            "attention": attention([answer for answer, b in zip(plain, blind, strict=True) if not b])["right"],
        },
        "anchor": anchored(plain),
        "needles": needles(plain),
        "convergence": _by_difficulty(plain, converges),
        "cases": cases(plain),
    }


def _observe(asking: Asking, answered: Answered) -> list[Seen]:
    return [
        Seen(sample, reply, asking.right(sample, reply), asking.look(sample, reply))
        for sample, (reply, *_) in zip(answered.part.samples, answered.replies, strict=True)
    ]


def _orders(asking: Asking, answered: Answered) -> list[list[Seen]]:
    """Return, for each order, all samples in it."""
    orders: list[list[Seen]] = [[] for _ in range(asking.shuffles)]
    for sample, replies in zip(answered.part.samples, answered.replies, strict=True):
        for order, moved, reply in zip(orders, asking.shuffled(sample), replies, strict=True):
            order.append(Seen(moved, reply, asking.right(moved, reply), asking.look(moved, reply)))
    return orders


def looks(answers: Iterable[Seen], right: bool | None = None) -> list[Look]:
    """Return the looks of all answers, or of the right or the wrong ones."""
    return [answer.look for answer in answers if answer.look is not None and right in (None, answer.right)]


def _by_difficulty(answers: Sequence[Seen], measure: Callable[[Sequence[Seen]], Json]) -> Json:
    parts = {"all": list(answers)}
    for answer in answers:
        parts.setdefault(answer.sample.difficulty, []).append(answer)
    return {name: measure(part) for name, part in parts.items()}


def _group(orders: Sequence[Sequence[Seen]], measure: Callable[[Sequence[Sequence[Seen]]], Json]) -> Json:
    groups = ("all", *dict.fromkeys(answer.sample.difficulty for answer in orders[0]))
    return {
        name: measure([[answer for answer in order if name in ("all", answer.sample.difficulty)] for order in orders])
        for name in groups
    }


def attention(answers: Sequence[Seen]) -> Json:
    """Return attention accuracy by metric and N, of right answers (table 1, appendix E) and of wrong ones (table 4).

    It also holds the chance level for right answers, and the four quadrants by M-LND over the model's own last layers and by
    the best point of the right answers' curves.
    """
    every, right, wrong = looks(answers), looks(answers, right=True), looks(answers, right=False)
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
    spreads: dict[str, list[float]] = {
        "answers": [float(np.mean([answer.right for answer in order])) for order in orders]
    }
    right = [looks(order, right=True) for order in orders]
    if all(right):
        best = [Curves.of(order_looks, len(order_looks[0].sigma)).to_json()["best"]["value"] for order_looks in right]
        spreads["attention_best"] = best
        spreads["attention"] = [
            float(np.mean([look.image == look.target for look in order_looks])) for order_looks in right
        ]
    return {
        name: {"mean": float(np.mean(values)), "sd": _deviation(values), "orders": values}
        for name, values in spreads.items()
    }


def _deviation(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def places(answers: Sequence[Seen]) -> Json:
    """Return the accuracy of answers, and of right answers' attention, by the target's place and number of pictures.

    Questions about an anchor, which have an additional picture, are left out.
    """
    groups: dict[tuple[int, int], list[Seen]] = {}
    for answer in answers:
        if not answer.sample.anchor:
            groups.setdefault((answer.sample.candidates, answer.sample.target), []).append(answer)
    return {
        f"{place} of {pictures}": {
            "answers": proportion(sum(answer.right for answer in answers), len(answers)),
            "attention": _hit(looks(answers, right=True)),
        }
        for (pictures, place), answers in sorted(groups.items())
    }


def _hit(looks_given: Sequence[Look]) -> Json:
    """Return the share of looks with the target as the focused picture, by M-LND over the model's own last layers."""
    return proportion(sum(look.image == look.target for look in looks_given), len(looks_given))


def anchored(answers: Sequence[Seen]) -> Json:
    """Return attention accuracy on questions about an anchor (equation 7, table 3).

    It is by the anchor's rows and by those of the text, of right answers and of all.
    """
    on_anchor = [answer for answer in answers if answer.sample.anchor]
    results: Json = {
        "samples": len(on_anchor),
        "answers": proportion(sum(answer.right for answer in on_anchor), len(on_anchor)),
    }
    for name, right in (("right", True), ("every", None)):
        kept_looks = looks(on_anchor, right)
        if kept_looks:
            text = [replace(look, sigma=look.text) for look in kept_looks if look.text is not None]
            layers = len(kept_looks[0].sigma)
            results[name] = {
                "image": Curves.of(kept_looks, layers).to_json(),
                "text": Curves.of(text, layers).to_json(),
            }
    return results


def needles(answers: Sequence[Seen]) -> Json:
    """Return attention accuracy of needles that were found: the answer is right, or reads other digits (table 5)."""
    on_needle = [answer for answer in answers if answer.sample.task == NEEDLE]
    right = [answer for answer in on_needle if answer.right or reads_digits(answer.sample, answer.reply.text)]
    return {"samples": len(on_needle), "found": len(right), **attention_of(looks(right))}


def attention_of(looks_given: Sequence[Look]) -> Json:
    """Return the curves of these looks, and the share by the model's own metric."""
    return {
        **Curves.of(looks_given, len(looks_given[0].sigma) if looks_given else 0).to_json(),
        "own": _hit(looks_given),
    }


def converges(answers: Sequence[Seen]) -> Json:
    """Return by layer the share of the look that is at the target, of right and of wrong answers (figure 3).

    For right answers it also holds, with intervals over answers, that of the last layer, and its rise from the first to the
    last third of the layers.
    """
    results: Json = {name: convergence(looks(answers, right)) for name, right in (("right", True), ("wrong", False))}
    relative = [look.share * look.sigma.shape[1] for look in looks(answers, right=True)]
    return results | ({"last": mean_of([curve[-1] for curve in relative]), "rise": rise(relative)} if relative else {})


def cases(answers: Sequence[Seen]) -> list[Json]:
    """Return a right answer that looks at the target, and one that does not (figure 3): the first with the most pictures."""
    examples = []
    for name, hit in (("on the target", True), ("elsewhere", False)):
        matching = [
            answer
            for answer in answers
            if answer.look and answer.right and (answer.look.image == answer.look.target) is hit
        ]
        if matching:
            example = max(matching, key=lambda answer: answer.sample.candidates)
            assert example.look is not None
            examples.append({
                "case": name, "sample": example.sample.id, "question": example.sample.texts[-1],
                "answer": example.reply.text,
                "target": example.look.target, "focused": example.look.image, "sigma": example.look.sigma.tolist(),
            })  # fmt: skip
    return examples
