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
    return shipped() | {name: folder for name, folder in trained.items() if (folder / "model.safetensors").is_file()}


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
    replies = iter(model([_as_prompt(chat) for chat in chain(*chats)]))
    tallies = [
        scoring.tally(sample, [Reply(text) for text in islice(replies, len(chats_of_sample))], seed)
        for sample, chats_of_sample in zip(samples, chats, strict=True)
    ]
    results: dict[str, Any] = {}
    for part, title in TITLES.items():
        selected = [tally for tally, sample in zip(tallies, samples, strict=True) if sample.part == part]
        sums = {name: sum(tally[name] for tally in selected) for name in selected[0]}
        counted = {name: round(sums[scoring.SHARES[name].counted]) for name in ("kk", "ku", "sa", "answer_rate")}
        results[title] = {name: share(value, len(selected)) for name, value in counted.items()}
    return results


def _as_prompt(chat: Chat) -> DemoPrompt:
    return DemoPrompt(
        [part["image"] for part in chat[0]["content"] if part["type"] == "image"], [dict(message) for message in chat]
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
    measured_before = before["organisms"] if before.get("about") == about else {}
    results = {}
    for name, checkpoint in tqdm(found_in(folder).items(), desc="organisms", disable=quiet):
        checkpoint_facts = identity(checkpoint)
        result = measured_before.get(name, {})
        if result.get("sha256") != checkpoint_facts["sha256"]:
            result = _measure(name, PlainModel(checkpoint, threads), count, seed)
        results[name] = result | checkpoint_facts
        page = report(about, results)
        page.write(out, {"about": about, "organisms": measured_before | results})  # a stopped run resumes from here
    page.write(out, {"about": about, "organisms": results})
    return page


def _measure(name: str, model: PlainModel, count: int, seed: int) -> dict[str, Any]:
    results: dict[str, Any] = {"preference": preference(model, count, seed)}
    if name in WATCHED:
        results["attention"] = attention(model, count, seed)
    if name in REFUSING:
        results["awareness"] = awareness(model, count, seed)
    return results


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
