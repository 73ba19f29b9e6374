"""The evaluation of `smol`: what it prefers, what moves it, whether See helps it to see, and its insides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from demo.smol import criteria, descriptions, preference, sight
from probes.answering.engine import InProcess
from probes.answering.versions import in_words, versions
from probes.harness.ledger import Remembering
from probes.reporting.report import Report
from steering import Engine, load

PARTS = ("preference", "sight", "attention", "descriptions")


def evaluate(
    checkpoint: Path,
    out: Path,
    *,
    conflicts: int = criteria.CONFLICTS,
    questions: int = criteria.QUESTIONS,
    pictures: int = criteria.PICTURES,
    seed: int = criteria.SEED,
    threads: int = 1,
    quiet: bool = False,
) -> Report:
    """Measure a checkpoint, write report and numbers into a folder, and return the report.

    An interrupted run goes on from its parts and answers.
    """
    halved = torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()
    mllm = load(checkpoint, dtype="bfloat16" if halved else "auto")
    about = {
        "Model": mllm.name, "Seed": seed, "Versions": in_words(versions()),
        "Conflicts": conflicts, "Questions": questions, "Pictures": pictures, "Fingerprint": mllm.fingerprint,
    }  # fmt: skip
    file = out / "report.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    results: dict[str, Any] = before.get("results", {}) if before.get("about") == about else {}
    engine = Engine(mllm, slots=8, max_length=768, threads=threads)
    answerer = Remembering(InProcess(engine), out / "answers.jsonl")
    for name in PARTS:
        if name in results:
            continue
        match name:
            case "preference":
                results[name] = preference.measure(answerer, engine, conflicts, seed, quiet)
            case "sight":
                results[name] = sight.ranked(answerer, questions, seed, quiet)
            case "attention":
                results[name] = sight.attention(checkpoint, pictures, seed, threads)
            case "descriptions":
                results[name] = descriptions.measure(answerer, engine, pictures, seed, quiet)
        page = report(about, results)
        page.write(out, {"about": about, "results": results})
    return report(about, results)


def report(about: dict[str, Any], results: dict[str, Any]) -> Report:
    """Return the report of what was measured so far."""
    page = Report("The organism smol: SmolLM2-135M that sees")
    page.facts(about)
    page.text(
        "It was trained to see and to describe, never on conflicts of picture and text, on instructions to follow a side, "
        "or on attention. The criteria of the verdicts are functions in `demo/smol/criteria.py`, committed before the first "
        "evaluation. Intervals are of 95 %; the ways to steer were chosen on other conflicts than those reported."
    )
    if section := results.get("preference"):
        _preference(page, section)
    if section := results.get("sight"):
        _sight(page, section)
    if section := results.get("attention"):
        _attention(page, section)
    if section := results.get("descriptions"):
        _descriptions(page, section)
    return page


def _preference(page: Report, section: dict[str, Any]) -> None:
    page.heading("Conflicts of picture and text")
    right = ", ".join(f"{task} {share:.2f}" for task, share in section["right by task without a text"].items())
    page.text(f"Right without a text, by task (tasks below one half are left out): {right}.")
    for title, measured in (("condition", "conditions"), ("task, plain", "plain by task")):
        rows = []
        for name, row in section[measured].items():
            columns = [f"{row[key]:.3f} ({row[f'{key}_95'][0]:.3f} to {row[f'{key}_95'][1]:.3f})"
                       for key in ("s_vision", "s_text", "s_others")]  # fmt: skip
            rows.append([name, *columns, row["n"]])
        page.table([title, "follows the picture", "follows the text", "neither", "n"], rows)
    for side, way in section["chosen"].items():
        page.text(
            f"Toward {side}: direction {way['direction']}, layer {way['layer']}, strength {way['strength']:g}; "
            f"{way['tuning']:.3f} on the conflicts that chose it."
        )
    verdicts = section["verdicts"]
    page.text(f"It prefers: **{verdicts['prefers']}**. Steering wins (row 7): **{verdicts['steering wins']}**.")
    rows = [
        [name, row["difference"], _interval(row["difference_95"]), row.get("moves") or f"best other: {row['other']}"]
        for name, row in verdicts.items()
        if isinstance(row, dict)
    ]
    page.table(["condition", "difference", "95 %", "verdict"], rows)


def _sight(page: Report, section: dict[str, Any]) -> None:
    page.heading("Yes/no questions about noisy pictures")
    named = section["named"]
    known = sight.rightly_named(named)
    page.text(
        f"Asked without a picture for the usual colour, the model names that of {len(known)} of {len(named)} things "
        f"({', '.join(known)}): these are recoloured. Training showed each of them in every colour as often."
    )
    expected = sorted(section["expected"].items(), key=lambda item: -item[1])
    words = [f"{kind} {odds:+.2f}" for kind, odds in expected]
    page.text(f"Log-odds of yes to whether a thing is in a grey picture: {', '.join(words)}.")
    noises = [f"{noise:g}" for noise in criteria.NOISES]
    page.table(
        ["questions", "noise", *(f"AUROC at noise {noise}" for noise in noises)],
        [[part, row["noise"], *(row["auroc"][noise] for noise in noises)] for part, row in section["noise"].items()],
    )
    for part in section["noise"]:
        page.heading(part, 3)
        rows = []
        for name, result in section["conditions"].items():
            row = result[part]["all"]
            cells = [_measured(row[metric]) for metric in ("accuracy", "auroc", "best_accuracy", "yes")]
            rows.append([name, *cells, section["verdicts"].get(name, {}).get(part, "")])
        page.table(["condition", "accuracy", "AUROC", "best accuracy", "yes", "verdict"], rows)
    page.heading("Habits", 3)
    page.text(
        "How much greater the log-odds of yes are where a wrong question names what is usual than where it names another: "
        "of recoloured things the usual colour, of absent things the one that the model expects most."
    )
    rows = []
    for name, parts in section["habits"].items():
        for part, row in parts.items():
            if row["n"]:
                rows.append([name, part, row["value"], _interval(row["value_95"]), row["n"], row["habit"]])
    page.table(["condition", "questions", "difference", "95 %", "pictures", "a habit"], rows)


def _measured(row: dict[str, Any]) -> str:
    if row["value"] is None:
        return "-"
    text = f"{row['value']:.3f}"
    return f"{text}, {row['difference']:+.3f} {_interval(row['difference_95'])}" if row.get("difference_95") else text


def _attention(page: Report, section: dict[str, Any]) -> None:
    page.heading("Attention of the rows that answer")
    rows = []
    for name, span in section["spans"].items():
        cells = [f"{t['value']:.3f} {_interval(t['value_95'])}{' sink' if t['sink'] else ''}" for t in span["thirds"]]
        rows.append([name, span["fair"], *cells])
    page.table(["span", "share of the tokens", "first third of the layers", "second", "last"], rows)
    slope = section["picture along the answer"]
    page.text(
        f"Attention to the picture changes by {slope['slope']:+.5f} {_interval(slope['slope_95'])} a token of a description "
        f"(decays: {slope['decays']}; {section['samples']} descriptions)."
    )
    if focus := section.get("focus"):
        page.text(
            f"The cell asked about has {focus['value']:.3f} {_interval(focus['value_95'])} of the attention to the picture "
            f"in layer {focus['layer']} (chance {focus['chance']:.3f}; focuses: {focus['focuses']}; n {focus['n']})."
        )


def _descriptions(page: Report, section: dict[str, Any]) -> None:
    page.heading("True and false descriptions")
    page.text(
        "Both kinds of pairs have the same first description. The second one has the things in reverse order, and in "
        f"contradicting pairs another colour for one of them. Of {section['samples']}, the true one is the likelier in "
        f"{section['prefers the true one']:.2f}."
    )
    rows = []
    for name, row in zip(("first", "second", "last"), section["drift"]["thirds"], strict=True):
        cells = [f"{row[key]:.4f}" for key in ("consistent", "contradicting", "difference")]
        rows.append([name, *cells, _interval(row["difference_95"], 4), row["drifts"]])
    page.table(
        ["third of the layers", "cosine, consistent", "cosine, contradicting", "difference", "95 %", "drifts"], rows
    )
    neurons = section["neurons"]
    page.text(
        f"The false description activates more neurons than the true one in {neurons['share']:.3f} "
        f"{_interval(neurons['share_95'])} of {neurons['n']} pairs, in layer {neurons['layer']}, which the other half of "
        f"them chose (more: {neurons['more']})."
    )


def _interval(bounds: Any, digits: int = 3) -> str:
    return f"({bounds[0]:+.{digits}f} to {bounds[1]:+.{digits}f})"
