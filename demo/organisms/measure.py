"""Measurements of every organism, and of some organisms alone."""

from __future__ import annotations

import hashlib
import json
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from tqdm import tqdm

from demo import shipped
from demo.evaluation.answering import DemoPrompt, PlainModel
from demo.evaluation.evaluate import conflict_outcomes
from demo.organisms.attention import attention, share
from demo.organisms.report import report
from demo.training.recipes import ORGANISMS
from demo.world.awareness import sap_samples
from demo.world.conflicts import conflict_samples
from probes.answering.base import Chat, Reply
from probes.answering.versions import in_words, versions
from probes.conflicts.shares import Shares
from probes.mmsap import scoring
from probes.mmsap.samples import TITLES
from probes.reporting.report import Report

WATCHED = ("default", "unsupervised")
"""Organisms whose attention is measured."""
REFUSING = ("default", "refuser")
"""Organisms whose refusals are measured."""


def found_in(folder: Path) -> dict[str, Path]:
    """Return checkpoints by name: those that ship, overridden by the organisms that were trained in a folder."""
    trained = {name: folder / name / "checkpoint" for name in ORGANISMS}
    return shipped() | {name: one for name, one in trained.items() if (one / "model.safetensors").is_file()}


def identity(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's number of parameters, the hash of its weights, and its training's record."""
    weights = checkpoint / "model.safetensors"
    with safe_open(weights, "pt") as tensors:
        parameters = sum(int(np.prod(tensors.get_slice(name).get_shape())) for name in tensors.keys())  # noqa: SIM118
    training = json.loads((checkpoint / "helmsight.json").read_text()).get("training", {})
    return {"parameters": parameters, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()} | training


def awareness(model: PlainModel, count: int, seed: int) -> dict[str, Any]:
    """Return MM-SAP's scores by part, each question asked once.

    They are right answers (kk), right refusals (ku), both (sa), and answers without a refusal (answer_rate).
    """
    samples = sap_samples(count, seed)
    chats = [sample.chats(1, seed) for sample in samples]
    said = iter(model([_as_prompt(chat) for chat in chain(*chats)]))
    tallies = [
        scoring.tally(sample, [Reply(text) for text in islice(said, len(asked))], seed)
        for sample, asked in zip(samples, chats, strict=True)
    ]
    found: dict[str, Any] = {}
    for part, title in TITLES.items():
        some = [one for one, sample in zip(tallies, samples, strict=True) if sample.part == part]
        sums = {name: sum(one[name] for one in some) for name in some[0]}
        counted = {name: round(sums[scoring.SHARES[name].counted]) for name in ("kk", "ku", "sa", "answer_rate")}
        found[title] = {name: share(one, len(some)) for name, one in counted.items()}
    return found


def _as_prompt(chat: Chat) -> DemoPrompt:
    return DemoPrompt(
        [part["image"] for part in chat[0]["content"] if part["type"] == "image"], [dict(one) for one in chat]
    )


def measure_all(folder: Path, out: Path, count: int, seed: int, threads: int, *, quiet: bool = False) -> Report:
    """Measure every organism and write the report and its numbers into a folder; return the page.

    Results in a report there for the same weights and the same samples are reused.
    """
    about = {
        "Data": f"{count} conflicts, and as many questions about several pictures, of held-out scenes, seed {seed}",
        "Versions": in_words(versions()),
    }
    before = json.loads((out / "report.json").read_text()) if (out / "report.json").is_file() else {}
    kept = before["organisms"] if before.get("about") == about else {}
    found = {}
    for name, checkpoint in tqdm(found_in(folder).items(), desc="organisms", disable=quiet):
        known = identity(checkpoint)
        one = kept.get(name, {})
        if one.get("sha256") != known["sha256"]:
            one = _measured(name, PlainModel(checkpoint, threads), count, seed)
        found[name] = one | known
        page = report(about, found)
        page.write(out, {"about": about, "organisms": kept | found})  # a stopped run resumes from here
    page.write(out, {"about": about, "organisms": found})
    return page


def _measured(name: str, model: PlainModel, count: int, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {"preference": preference(model, count, seed)}
    if name in WATCHED:
        found["attention"] = attention(model, count, seed)
    if name in REFUSING:
        found["awareness"] = awareness(model, count, seed)
    return found


def preference(model: PlainModel, count: int, seed: int) -> dict[str, Any]:
    """Return how conflicts of picture and text are answered without instruction (modality-preference paper, section 3).

    The same questions are also asked without a text; there `s_vision` is the share of right answers.
    """
    samples = conflict_samples(count, seed)
    sides = {
        name: conflict_outcomes(model, samples, [None] * count, context=context)
        for name, context in (("conflict", True), ("picture_alone", False))
    }
    return {name: Shares.of(outcomes, intervals=True).to_json() for name, outcomes in sides.items()}
