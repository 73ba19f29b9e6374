"""The rows of the implicit visual misunderstanding paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.harness.bootstrap import proportion
from probes.reproduce.items import Figure, Found, Item, Json, figure

RUN = "stme"
LEAST_NEEDLES = 0.836
"""The least attention accuracy on needles that were found, over the paper's models (Table 5)."""


def _plain(found: Json, setting: str = "all") -> Json:
    """Return the metrics of plain answers."""
    return dict(found["conditions"]["baseline"]["samples"][setting])


def _attention(found: Json, setting: str = "all") -> Json:
    return dict(found["attention"]["baseline"][setting])


def _above(high: Mapping[str, Any], low: Mapping[str, Any]) -> bool:
    """Return whether the interval of a share lies above that of another."""
    return bool(high["value_95"][0] > low["value_95"][1])


def _factor(found: Json) -> Found:
    last = found["convergence"]["all"]["last"]
    return Found(last["value"], last["value_95"][0] > 1, last["value_95"], last["n"])


def _metrics(found: Json) -> Found:
    plain, chance = _plain(found), _attention(found)["chance"]
    own = {"LND": plain["attention_lnd"], "M-LND": plain["attention"], "MC-LND": plain["attention_mc_lnd"]}
    ours = {name: figure(one) for name, one in own.items()} | {"chance": Figure(chance)}
    return Found.of(ours, all(one["value_95"][0] > chance for one in own.values()), _attention(found)["right"]["n"])


def _misunderstandings(found: Json) -> Found:
    """Return the share of misunderstandings, and the effects of hiding the target and the focused picture."""
    ivm, hidden = _plain(found)["ivm"], found["hidden"].get("right, elsewhere")
    ours = {"looks elsewhere": figure(ivm)}
    if hidden is not None:
        ours |= {"of these changed by hiding the target": figure(hidden["other"])}
        ours |= {"by hiding the focused picture": figure(hidden["focused"])}
    return Found.of(ours, ivm["value_95"][0] > 0, _plain(found)["samples"])


def _answers(found: Json) -> Found:
    easy, hard = (_plain(found, name)["answers"] for name in ("easy", "hard"))
    return Found.of({"easy": figure(easy), "hard": figure(hard)}, _above(easy, hard), _plain(found)["samples"])


def _table(found: Json) -> Found:
    easy, hard = (_attention(found, name)["right"]["best"] for name in ("easy", "hard"))
    ours = {"easy": figure(easy), "hard": figure(hard)}
    return Found.of(ours, _above(easy, hard), easy["n"] + hard["n"])


def _orders(found: Json) -> Found:
    ours: dict[str, float] = {}
    smaller = []
    for setting in ("easy", "hard"):
        own = found["shuffles"][setting]
        attention, answers = own["attention_best"]["sd"], own["answers"]["sd"]
        ours |= {f"{setting}: attention, deviation": attention, f"{setting}: answers, deviation": answers}
        smaller.append(attention < answers)
    return Found(ours, all(smaller), n=_plain(found)["samples"])


def _anchor(found: Json) -> Found:
    image, text = (found["anchor"]["every"][rows]["best"] for rows in ("image", "text"))
    ours = {"image to image": figure(image), "text to image": figure(text)}
    return Found.of(ours, _above(image, text), image["n"])


def _converges(found: Json) -> Found:
    rise = found["convergence"]["all"]["rise"]
    return Found(rise["value"], rise["value_95"][0] > 0, rise["value_95"], rise["n"])


def _named(found: Json) -> Found:
    best, named = _attention(found)["right"]["best"], found["which"]["all"]["share"]
    ours = {"attention": figure(best), "named": figure(named)}
    return Found.of(ours, _above(best, named), found["which"]["all"]["samples"])


def _patches(found: Json) -> Found:
    rise = found["patches"]["rise"]
    return Found(rise["value"], rise["value_95"][0] > 0, rise["value_95"], rise["n"])


def _quadrants(found: Json) -> Found:
    plain = _plain(found)
    right, wrong = plain["attention"], plain["attention_wrong"]
    return Found.of({"right": figure(right), "wrong": figure(wrong)}, _above(right, wrong), plain["samples"])


def _needles(found: Json) -> Found:
    best = found["needles"]["best"]
    return Found(best["value"], best["value_95"][0] >= LEAST_NEEDLES, best["value_95"], best["n"])


def _curves(found: Json) -> Found:
    own = _attention(found)["right"]
    ours: dict[str, Figure] = {}
    both = []
    for name, values in own["curves"].items():
        first, best, last = (
            proportion(round(value * own["n"]), own["n"]) for value in (values[0], max(values), values[-1])
        )
        rows = {f"{name} at 1": first, f"{name}, best": best, f"{name} at all": last}
        ours |= {words: figure(one) for words, one in rows.items()}
        both.append(_above(best, first) and _above(best, last))
    return Found.of(ours, any(both), own["n"])


def _blind(found: Json) -> Found:
    blind, answers = found["blind"]["all"]["share"], _plain(found)["answers"]
    ours = {"blind": figure(blind), "with pictures": figure(answers)}
    return Found.of(ours, _above(answers, blind), _plain(found)["samples"])


ITEMS = (
    Item(
        29, "ivm", "attention factor (Eq. 1, 2, 8-10)", "even in early layers, on the target in deep ones (section 2.1)",
        RUN, _factor, "in the last layer right answers look at the target more than evenly: the interval lies above 1",
    ),
    Item(
        30, "ivm", "layer-focused picture; LND, M-LND, MC-LND (Eq. 3-5)", "the differences are marginal (section 2.3)", RUN,
        _metrics, "the interval of each metric lies above guessing",
    ),
    Item(
        31, "ivm", "implicit misunderstandings", "4.8 % of Qwen2VL-7B's right answers to hard tasks (Table 1)", RUN,
        _misunderstandings, "some right answers look at another picture than the target",
    ),
    Item(
        32, "ivm", "STME, answers", "Qwen2VL-7B 95.2 % easy, 86.7 % hard (Table 1)", RUN, _answers,
        "easy tasks are answered right more often, the intervals apart",
    ),
    Item(
        33, "ivm", "attention accuracy by series and size (Table 1, Fig. 5)",
        "Qwen2VL-7B 100 % easy, 95.2 % hard (Table 1); one model here, another with --model", RUN, _table,
        "it is higher on easy tasks than on hard ones, the intervals apart",
    ),
    Item(
        34, "ivm", "five orders of the pictures (Table 2)", "deviation .7 of attention, 4.5 of answers (Table 2)", RUN,
        _orders, "attention deviates less than answers, on easy and on hard tasks",
    ),
    Item(
        35, "ivm", "rows of an anchor against rows of the text (Eq. 7, Table 3)", "Qwen2VL-7B 99.6 against 97.7 % (Table 3)",
        RUN, _anchor, "the anchor's rows find the target more often, the intervals apart; of all answers, right or not",
    ),
    Item(
        36, "ivm", "attention by layer and picture (Fig. 3, 10-13)", "attention converges on the target (Fig. 3)", RUN,
        _converges, "the look at the target is more in the last third of the layers than in the first, interval above 0",
    ),
    Item(
        37, "ivm", "the model told to name the picture (Fig. 4)", "all three metrics significantly higher (section 2.3)",
        RUN, _named, "the intervals of attention accuracy and of the named picture are apart",
    ),
    Item(
        38, "ivm", "patch factor (Eq. 6, Fig. 6)", "attention moves to the region of the answer (Fig. 6)", RUN, _patches,
        "the look at the place of the answer is more in the last third of the layers than in the first, interval above 0",
    ),
    Item(
        39, "ivm", "four quadrants (Fig. 9, Table 4)", "Qwen2VL-2B 58.2 % of wrong answers, 82.3 % of right (Tables 4, 2)",
        RUN, _quadrants, "wrong answers look at the target less often, the intervals apart",
    ),
    Item(
        40, "ivm", "needles that were found (Table 5)", "83.6 to 100 %, Qwen2VL-7B 100 (Table 5)", RUN, _needles,
        "the interval of those that look at the target lies above 83.6 %, the least there",
    ),
    Item(
        41, "ivm", "curves over N (Appendix E)", "they rise, then fall (Fig. 14-21)", RUN, _curves,
        "at its best N a metric is above itself at N = 1 and with all layers, the intervals apart",
    ),
    Item(
        42, "ivm", "questions answered without pictures", "such ones were left out (section 2.2)", RUN, _blind,
        "the interval without pictures lies below that with them",
    ),
    Item(
        43, "ivm", "queries, keys and values in 32 bits (Appendix C.1)", "raised for models on Qwen2",
        why="scores that are read are products in float32 whatever the model's dtype, and the embedded model is float32 "
        "anyway: there is nothing to compare",
    ),
    Item(
        44, "ivm", "resolution by the number of pictures (Appendix C.1)", "256 to 426 tokens a picture",
        why="`eval stme --data` scales pictures so; the embedded model sees every picture at one size",
    ),
    Item(
        45, "ivm", "GPT-4o's check of reasoning", "all of Qwen2VL-7B's right ones (section 2.3)",
        why="needs GPT-4o, and answers that reason",
    ),
)  # fmt: skip
