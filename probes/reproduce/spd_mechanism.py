"""SPD-Faith Bench's findings inside models (its sections 4.1 to 4.3 and appendix D).

They are read from `eval faithfulness` and `eval alarm`.
"""

from __future__ import annotations

from probes.reproduce.items import Figure, Found, Item, Json, figure


def _failures(report: Json) -> Found:
    scores = report["parts"]["all"]["auroc"]
    flags = {name: scores[name] for name in ("perceptual_blindness", "dissociation")}
    above_chance = all(flag["alike_95"][0] > 0.5 for flag in flags.values())
    ours = {name: figure(flag, "alike") for name, flag in flags.items()}
    return Found.of(ours, above_chance, report["parts"]["all"]["answers"])


def _map(report: Json) -> Found:
    """Read the activation at the place of the answer, which is known for the samples of `eval stme`."""
    ratio = report["patches"]["said"]
    return Found(ratio["value"], ratio["value_95"][0] > 1, ratio["value_95"], ratio["n"])


def _attention(report: Json) -> Found:
    read = report["read"]
    system, slope = read["shares_by_layer"]["system"]["faithful"], read["scalars"]["vision_slope"]
    third = len(system) // 3
    shallow, deep = sum(system[:third]) / third, sum(system[-third:]) / third
    ours = {"system, shallow layers": shallow, "system, deep layers": deep, "slope of vision": slope["faithful"][0]}
    decay = read["decay"]["faithful"]["vision"]
    return Found(ours, shallow > deep and slope["faithful"][0] < 0 and decay[-1] < decay[0], n=read["samples"])


def _sublayers(report: Json) -> Found:
    """Read whether the FFN's greatest fall, in its layer, is beyond zero, and greater than attention's greatest."""
    ffn, mha = (report["read"]["by_layer"][name] for name in ("ffn_cosine", "mha_cosine"))
    layer = min(range(len(ffn["difference"])), key=lambda index: ffn["difference"][index])
    deepest = min(range(len(mha["difference"])), key=lambda index: mha["difference"][index])
    ours = {
        "layer": Figure(layer),
        "ffn": Figure(ffn["difference"][layer], ffn["difference_95"][layer]),
        "mha": Figure(mha["difference"][deepest], mha["difference_95"][deepest]),
    }
    falls = ffn["difference_95"][layer][1] < 0 and ours["ffn"].value < ours["mha"].value
    return Found.of(ours, falls, report["read"]["samples"])


def _neurons(report: Json) -> Found:
    """Read the half of the pairs that did not choose the layer.

    The layer is the one that best separates the other half: the greatest of all layers would be above 0 in one run of five
    by chance.
    """
    ratio, parted = report["read"]["by_layer"]["neuron_ratio"], report["separated"]["neuron_ratio"]
    layer = parted["layer"]
    ours = {
        "layer": Figure(layer),
        "more in the unfaithful one": figure(parted, "share"),
        "difference": Figure(ratio["difference"][layer], ratio["difference_95"][layer]),
    }
    deep = layer >= len(ratio["difference"]) // 3
    return Found.of(ours, deep and parted["share_95"][0] > 0.5, parted["n"])


MECHANISM = (
    Item(
        74,
        "spd",
        "two failures, seen in attention and token activation maps (Fig. 6, 14 to 16)",
        "cases (section 4.1)",
        "alarm",
        _failures,
        "both flags tell wrong answers from right ones to alike questions: the AUROC's interval lies above 0.5",
    ),
    Item(
        75,
        "spd",
        "token activation map (equations 17 and 18)",
        "maps that light up where the said thing is (Fig. 6)",
        "stme",
        _map,
        "the answer's maps are stronger where in the picture the answer is than elsewhere: the interval lies above 1",
    ),
    Item(
        76,
        "spd",
        "attention by layer and by token (Fig. 7, 17 to 20)",
        "shallow layers stare at the system prompt, and attention to the picture falls token by token (section 4.2)",
        "faithfulness",
        _attention,
        "the system prompt has more in the first third of the layers than in the last, and the picture's share falls",
        embedded="floor: the template has no system prompt, and nothing stands before the picture but a few marks",
    ),
    Item(
        78,
        "spd",
        "sublayers (Fig. 8b)",
        "the FFN's similarity falls for unfaithful answers, attention's does not (section 4.3)",
        "faithfulness",
        _sublayers,
        "where the FFN's cosine falls most, the interval of the fall is below 0 and it is deeper than attention's deepest",
    ),
    Item(
        79,
        "spd",
        "neurons of faithful and unfaithful answers (Fig. 22, equations 19 to 22)",
        "unfaithful answers activate more neurons in middle and deep layers (appendix D.4)",
        "faithfulness",
        _neurons,
        "in a middle or deep layer, which one half of the pairs chose, more neurons in over half of the others: interval "
        "above 0.5",
    ),
)
