"""The report of `helmsight eval faithfulness`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.answering.versions import in_words
from probes.faithfulness.evaluate import LAYERED, SIDES, SPANS
from probes.harness.missing import left_out
from probes.reporting import plots
from probes.reporting.report import Report
from probes.reporting.tables import Measured

TITLES = {
    "mha_cosine": "cos(h_in, h_mid): states before and after attention (Figure 8b)",
    "ffn_cosine": "cos(h_mid, h_out): states before and after the FFN (Figure 8b)",
    "mha_norm": "|update of attention|",
    "ffn_norm": "|update of the FFN|",
    "update_norm": "|update of the layer|",
    "kl": "KL(attention's update || FFN's), nats (equation 23)",
    "neuron_ratio": "share of active neurons (equations 19 to 22, Figure 22)",
    "gate_ratio": "share of open gates",
}
READING = """\
Both answers to every question are forced, and read while they are generated. Differences are the unfaithful answer's value
minus the faithful one's, means over samples with 95 % bootstrap intervals, not corrected for the number of layers."""


def report(about: Mapping[str, Any], results: Mapping[str, Any]) -> Report:
    """Return the report of a run; `results` are those of `evaluate`, by their parts."""
    page = Report(f"Faithful and unfaithful answers on {about['model']}")
    page.facts(
        {"Data": about["data"], **left_out(about), "Model": about["model"], "Versions": in_words(about["versions"])}
    )
    page.text(READING)
    read = results["read"]
    page.text(
        f"{read['samples']} samples. The faithful answer is the more probable one in {100 * read['prefers_faithful']:.1f} % "
        "of them."
    )
    _scalars(page, read["scalars"], read["maps"])
    for name in LAYERED:
        if read["by_layer"][name] is not None:
            _by_layer(page, name, read["by_layer"][name])
    _separated(page, results["separated"])
    _shares(page, read["shares_by_layer"])
    _decay(page, read["decay"])
    if results.get("apart"):
        _apart(page, results["apart"])
    return page


def _scalars(page: Report, scalars: Mapping[str, Any], maps: Mapping[str, Any]) -> None:
    page.heading("The answers")
    rows: list[list[object]] = []
    logprob = scalars["logprob"]
    rows.append(["log-probability of a token, nats", *(_moment(logprob[side]) for side in SIDES), None])
    for name, what in (("vision_share", "attention to the images, share"), ("vision_slope", "its slope a token")):
        if (scalar := scalars[name]) is not None:
            change = Measured(scalar["difference"][0], scalar["difference_95"][0], signed=True)
            rows.append([what, scalar["faithful"][0], scalar["unfaithful"][0], change])
    page.table(["", *SIDES, "difference"], rows)
    page.text(
        f"For faithful answers, the strongest fifth of the patches holds {_in_words(maps['attention'])} of the attention "
        f"and {_in_words(maps['activation'])} of the token activation map (a flat map: 0.2); the two correlate at "
        f"{_in_words(maps['agreement'])}."
    )


def _in_words(moment: Mapping[str, Any]) -> str:
    return (
        "-"
        if moment["mean"] is None
        else f"{moment['mean']:.3f} ({moment['mean_95'][0]:.3f} to {moment['mean_95'][1]:.3f})"
    )


def _moment(moment: Mapping[str, Any]) -> Measured | None:
    return None if moment["mean"] is None else Measured(moment["mean"], moment["mean_95"])


def _by_layer(page: Report, name: str, readout: Mapping[str, Any]) -> None:
    page.heading(TITLES[name], 3)
    layers = range(len(readout["difference"]))
    intervals = [(low, high) for low, high in readout["difference_95"]]
    page.plot(
        name.replace("_", "-"),
        plots.curves(layers, {"unfaithful - faithful": readout["difference"]}, xlabel="layer", ylabel="difference",
                     intervals={"unfaithful - faithful": intervals}),
        f"{TITLES[name]}: unfaithful minus faithful answers, by layer.",
    )  # fmt: skip
    page.table(
        ["layer", *SIDES, "difference"],
        [
            [layer, readout["faithful"][layer], readout["unfaithful"][layer],
             Measured(readout["difference"][layer], readout["difference_95"][layer], signed=True)]
            for layer in layers
        ],
    )  # fmt: skip


def _separated(page: Report, separated: Mapping[str, Any]) -> None:
    if not separated:
        return
    page.heading("What tells the two apart")
    page.text(
        "The share of pairs in which the unfaithful answer has the greater number, measured on one half of the samples, "
        "in the layer that separates the other half best; 0.5 is chance."
    )
    rows = [
        [TITLES[name], result["layer"], Measured(result["share"], result["share_95"]), result["n"]]
        for name, result in separated.items()
    ]
    page.table(["readout", "layer", "share", "n"], rows)


def _shares(page: Report, shares: Mapping[str, Any]) -> None:
    if any(sides is None for sides in shares.values()):
        return
    page.heading("Attention by layer (Figures 7, 17 to 20)")
    series = {f"{span}, {side}": sides[side] for span, sides in shares.items() for side in SIDES}
    layers = range(len(next(iter(series.values()))))
    page.plot(
        "shares", plots.curves(layers, series, xlabel="layer", ylabel="share of attention"),
        "Shares of attention of generated tokens in every layer, means over tokens.",
    )  # fmt: skip


def _decay(page: Report, decay: Mapping[str, Any]) -> None:
    steps = min(decay[side]["steps"] for side in SIDES)
    if not steps:
        return
    page.heading("Attention by generated token (Figures 7, 17 to 20)")
    series = {f"{span}, {side}": decay[side][span][:steps] for span in SPANS for side in SIDES}
    page.plot(
        "decay", plots.curves(range(1, steps + 1), series, xlabel="generated token", ylabel="share of attention"),
        "Shares of attention to the images, to the text before them, and to the rest of the prompt.",
    )  # fmt: skip
    page.table(["token", *series], [[step + 1, *(values[step] for values in series.values())] for step in range(steps)])


def _apart(page: Report, apart: Mapping[str, Any]) -> None:
    page.heading("Semantic drift (Figures 8a and 21)")
    page.text(
        "The cosine similarity of two answers' mean states: of the faithful and the unfaithful answer to a question, and of "
        "faithful answers to different questions of one kind."
    )
    layers = range(len(next(iter(apart.values()))["mean"]))
    means = {name: similarity["mean"] for name, similarity in apart.items()}
    intervals = {name: [(low, high) for low, high in similarity["mean_95"]] for name, similarity in apart.items()}
    page.plot(
        "drift",
        plots.curves(layers, means, xlabel="layer", ylabel="cosine similarity", intervals=intervals),
        "Cosine similarity of two answers' mean states by layer.",
    )  # fmt: skip
    rows = [
        [layer, *(Measured(similarity["mean"][layer], similarity["mean_95"][layer]) for similarity in apart.values())]
        for layer in layers
    ]
    page.table(["layer", *apart], rows)
