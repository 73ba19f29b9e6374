"""Held-out evaluation by free greedy generation: rows of (what, measured, target, n), as Markdown and JSON.

Everything but attention is measured through an `Answerer`, a callable from prompts to answers, so that plain
transformers (`PlainModel`) and the engine can be put to the same questions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from demo.evaluation.answering import Answerer, DemoPrompt, PlainModel, prompt
from demo.evaluation.report import Row, report
from demo.world import conflicts, questions, several, wordings
from demo.world.questions import SceneQuestion
from demo.world.scenes import Scene, random_scene, render
from probes.answering.letters import letter
from probes.conflicts.samples import ConflictSample
from probes.conflicts.shares import Outcome, Shares, outcome

PICTURE_SIZES = ((84, 84), (168, 168), (252, 252), (168, 126), (320, 240))
MAX_PICTURES = 4


def rng_for(seed: int, name: str) -> random.Random:
    """Return the random generator of a named set of questions."""
    return random.Random(f"held-out evaluation {seed} {name}")


def held_out_scene(rng: random.Random) -> Scene:
    """Draw a held-out scene with one to four shapes."""
    return random_scene(rng, rng.choice((1, 2, 2, 3, 3, 4)), held_out=True)


def show(rng: random.Random, scene: Scene) -> Image.Image:
    """Render a scene at a random size."""
    return render(scene, rng.choice(PICTURE_SIZES), rng)


def collect(
    count: int, make: Callable[[], tuple[Sequence[Scene], SceneQuestion | None]], rng: random.Random
) -> tuple[list[DemoPrompt], list[str]]:
    """Return `count` prompts with their right answers from a maker that may return no question."""
    prompts: list[DemoPrompt] = []
    gold: list[str] = []
    while len(prompts) < count:
        scenes, question = make()
        if question is not None:
            text, answer = question.turns[0]
            prompts.append(prompt([show(rng, scene) for scene in scenes], text))
            gold.append(answer)
    return prompts, gold


def accuracy(answer: Answerer, prompts: list[DemoPrompt], gold: list[str]) -> float:
    """Return the share of prompts that are answered exactly right."""
    answers = answer(prompts)
    return sum(a.strip() == g for a, g in zip(answers, gold, strict=True)) / len(gold)


def single_rows(answer: Answerer, count: int, seed: int) -> list[Row]:
    """Measure open questions about one picture, and how often an answerable one is refused."""
    rows, refused, count_asked = [], 0, 0
    for kind in (*wordings.FACT_KINDS, "describe"):
        rng = rng_for(seed, kind)

        def make(kind: str = kind, rng: random.Random = rng) -> tuple[list[Scene], SceneQuestion | None]:
            scene = held_out_scene(rng)
            question = (
                questions.description(rng, scene) if kind == "describe" else questions.open_question(rng, scene, kind)
            )
            return [scene], question

        prompts, gold = collect(count, make, rng)
        answers = [a.strip() for a in answer(prompts)]
        refused += sum("Sorry" in a for a in answers)
        count_asked += len(answers)
        right = sum(a == g for a, g in zip(answers, gold, strict=True)) / len(gold)
        rows.append(Row("one picture", kind, right, ">= 0.97", len(gold)))
    rows.append(Row("refusals", "of answerable questions", refused / count_asked, "<= 0.02", count_asked))
    return rows


def refusal_rows(answer: Answerer, count: int, seed: int) -> list[Row]:
    """Measure how often questions about absent things are refused."""
    rows = []
    nouns = {"trained nouns": wordings.NOUNS, "nouns never seen": wordings.HELD_OUT_NOUNS, "absent shapes": ()}
    for name, pool in nouns.items():
        rng = rng_for(seed, f"refusal {name}")

        def make(pool: Sequence[str] = pool, rng: random.Random = rng) -> tuple[list[Scene], SceneQuestion | None]:
            scene = held_out_scene(rng)
            key = rng.choice(pool) if pool else questions.absent_shape(rng, scene)
            text = questions.ask(rng, rng.choice(("color", "position")), str(key))
            return [scene], SceneQuestion("refuse", ((text, wordings.REFUSAL),))

        prompts, gold = collect(count, make, rng)
        rows.append(Row("refusals", f"of unanswerable ones: {name}", accuracy(answer, prompts, gold), ">= 0.97", count))
    return rows


def option_rows(answer: Answerer, count: int, seed: int) -> list[Row]:
    """Measure questions in the paper's form, two to five options, answered by the letter."""
    rows = []
    for number in (2, 3, 4, 5):
        rng = rng_for(seed, f"options {number}")

        def make(number: int = number, rng: random.Random = rng) -> tuple[list[Scene], SceneQuestion | None]:
            scene = held_out_scene(rng)
            fact = questions.pick_fact(rng, scene, [k for k in wordings.PICK_KINDS if len(wordings.POOLS[k]) >= number])
            if fact is None:
                return [scene], None
            choices = questions.fill_options(rng, scene, fact.kind, [fact.value], number)
            text = questions.option_text(questions.ask(rng, fact.kind, fact.key), choices)
            return [scene], SceneQuestion("options", ((text, wordings.OPTION_LETTERS[choices.index(fact.value)]),))

        prompts, gold = collect(count, make, rng)
        rows.append(Row("options", f"{number} options", accuracy(answer, prompts, gold), ">= 0.95", count))
    return rows


SEVERAL_KINDS = ("color", "shape", "position", "background", "letter", "number", "count")


def one_of_several(rng: random.Random, number: int, kind: str) -> tuple[list[Scene], SceneQuestion | None]:
    """Draw related scenes and a question of a kind about one of them."""
    scenes = several.related_scenes(rng, number, (1, 2, 2, 3), held_out=True)
    makers: dict[str, Callable[..., SceneQuestion | None]] = {
        "describe": several.describe_one,
        "which": several.which_picture,
        "options": lambda rng, scenes: several.options_of_one(rng, scenes, 2),
        "refuse": several.refusal_of_one,
    }
    return scenes, makers[kind](rng, scenes) if kind in makers else several.fact_of_one(rng, scenes, kind)


def several_rows(answer: Answerer, count: int, seed: int) -> list[Row]:
    """Measure questions to one of two to four pictures: facts (the target), then the other forms."""
    rows = []
    for number in range(2, MAX_PICTURES + 1):
        for kind in ("facts", "options", "which", "describe", "refuse"):
            rng = rng_for(seed, f"several {number} {kind}")

            def make(
                number: int = number, kind: str = kind, rng: random.Random = rng
            ) -> tuple[list[Scene], SceneQuestion | None]:
                return one_of_several(rng, number, rng.choice(SEVERAL_KINDS) if kind == "facts" else kind)

            prompts, gold = collect(count, make, rng)
            target = ">= 0.95" if kind == "facts" else ""
            rows.append(
                Row("several pictures", f"{number} pictures: {kind}", accuracy(answer, prompts, gold), target, count)
            )
    return rows


def difference_rows(answer: Answerer, count: int, seed: int) -> list[Row]:
    """Measure questions about the difference of two pictures."""
    rows = []
    for kind in several.DIFFERENCE_KINDS:
        rng = rng_for(seed, f"difference {kind}")

        def make(kind: str = kind, rng: random.Random = rng) -> tuple[list[Scene], SceneQuestion | None]:
            first, second, question = several.difference_pair(rng, kind, (1, 2, 2, 3), held_out=True)
            return [first, second], question

        prompts, gold = collect(count, make, rng)
        rows.append(Row("differences", kind, accuracy(answer, prompts, gold), ">= 0.85", count))
    return rows


def conflict_outcomes(
    answer: Answerer, samples: Sequence[ConflictSample], words: Sequence[str | None], context: bool = True
) -> list[Outcome]:
    """Return each sample's side under MC2's rule (asked in both orders).

    `words` are the instructions, one per sample.
    """
    prompts = []
    for swapped in (False, True):
        for sample, instruct in zip(samples, words, strict=True):
            text = questions.option_text(sample.question, sample.options(swapped))
            context_text = f"Text context: {sample.context}" if context else ""
            prompts.append(prompt([sample.picture()], conflicts.place(context_text, text, instruct)))
    ordered = [(sample, swapped) for swapped in (False, True) for sample in samples]
    letters = [letter(a, sample.options(way)) for a, (sample, way) in zip(answer(prompts), ordered, strict=True)]
    return [outcome(a, b) for a, b in zip(letters[: len(samples)], letters[len(samples) :], strict=True)]


def ratio_row(name: str, sides: Sequence[Outcome]) -> Row:
    """Return the row of the vision ratio of conflicts' outcomes."""
    ratio = Shares.of(sides).vision_ratio
    return Row("conflicts", name, -1.0 if ratio is None else ratio, "0.25..0.75", len(sides))


def conflict_rows(answer: Answerer, count: int, seed: int) -> list[Row]:
    """Measure conflicts with instructions (the paper's, then wordings never trained on), without, and one modality alone."""
    samples = conflicts.conflict_samples(count, seed)
    nothing: list[str | None] = [None] * count
    neutral = Shares.of(conflict_outcomes(answer, samples, nothing, context=False))
    rows = [Row("conflicts", "no context: answer of the picture", neutral.s_vision, "", count)]
    sides = conflict_outcomes(answer, samples, nothing)
    rows.append(ratio_row("plain: vision ratio", sides))
    rows.append(Row("conflicts", "plain: others", Shares.of(sides).s_others, "", count))
    for task in dict.fromkeys(sample.task for sample in samples):
        of_task = [side for side, sample in zip(sides, samples, strict=True) if sample.task == task]
        rows.append(ratio_row(f"plain, {task}: vision ratio", of_task))
    toward_text = Shares.of(conflict_outcomes(answer, samples, [wordings.TOWARD_TEXT] * count))
    toward_vision = Shares.of(conflict_outcomes(answer, samples, [wordings.TOWARD_VISION] * count))
    rows.append(Row("conflicts", "paper's instruction toward text", toward_text.s_text, ">= 0.99", count))
    rows.append(Row("conflicts", "paper's instruction toward vision", toward_vision.s_vision, ">= 0.99", count))
    subset = samples[: max(10, count // 4)]
    held_out: list[Row] = []
    for i, template in enumerate(wordings.HELD_OUT_INSTRUCTIONS):
        rng = rng_for(seed, f"wording {i}")
        text, vision = (
            Shares.of(conflict_outcomes(answer, subset, [wordings.instruction(rng, side, template) for _ in subset]))
            for side in ("text", "vision")
        )
        name = template.format(a="X", b="Y")
        held_out.append(Row("held-out wordings", name, (text.s_text + vision.s_vision) / 2, "", 2 * len(subset)))
    mean = sum(row.value for row in held_out) / len(held_out)
    n = sum(row.n for row in held_out)
    rows.append(Row("conflicts", "twenty wordings never trained on, mean", mean, ">= 0.9", n))
    return [*rows, *alone_rows(answer, samples), *held_out]


def alone_rows(answer: Answerer, samples: Sequence[ConflictSample]) -> list[Row]:
    """Measure the text context without the picture, and open conflicts (no options) without instruction."""
    rng = rng_for(0, "alone")
    prompts: list[DemoPrompt] = []
    gold: list[str] = []
    for sample in samples:
        options = [sample.answer_vision, sample.answer_text]
        rng.shuffle(options)
        text = questions.option_text(sample.question, options)
        prompts.append(prompt([], f"Text context: {sample.context}\n{text}"))
        gold.append(wordings.OPTION_LETTERS[options.index(sample.answer_text)])
    rows = [Row("conflicts", "context alone: answer of the text", accuracy(answer, prompts, gold), "", len(gold))]
    opened = [prompt([s.picture()], f"Text context: {s.context}\n{s.question}") for s in samples]
    answers = [a.strip() for a in answer(opened)]
    text_side = [a == s.context for a, s in zip(answers, samples, strict=True)]
    vision_side = [not t and s.answer_vision in a for a, s, t in zip(answers, samples, text_side, strict=True)]
    clear = sum(text_side) + sum(vision_side)
    rows.append(Row("conflicts", "open, plain: vision ratio", sum(vision_side) / max(1, clear), "0.25..0.75", clear))
    return rows


def held_out_questions(
    name: str, kinds: Sequence[str], number: int, count: int, seed: int
) -> tuple[list[DemoPrompt], list[str], list[int]]:
    """Return `count` prompts of the kinds, their right answers, and the pictures asked about, from 0.

    Each has `number` pictures and asks about one of them.
    """
    rng = rng_for(seed, name)
    prompts: list[DemoPrompt] = []
    gold: list[str] = []
    targets: list[int] = []
    while len(prompts) < count:
        scenes, question = one_of_several(rng, number, rng.choice(kinds))
        if question is not None and question.target is not None:
            text, answer = question.turns[0]
            prompts.append(prompt([show(rng, scene) for scene in scenes], text))
            gold.append(answer)
            targets.append(question.target)
    return prompts, gold, targets


def attention_rows(model: PlainModel, count: int, seed: int) -> list[Row]:
    """Measure attention accuracy on questions to one of several pictures (implicit-visual-misunderstanding, section 3)."""
    rows = []
    for number in range(2, MAX_PICTURES + 1):
        prompts, gold, targets = held_out_questions(f"attention {number}", SEVERAL_KINDS, number, count, seed)
        answers = [a.strip() for a in model(prompts)]
        sigma = model.image_attention(prompts, answers)
        right = [i for i, (a, g) in enumerate(zip(answers, gold, strict=True)) if a == g]
        best, name = best_focus([sigma[i] for i in right], [targets[i] for i in right])
        rows.append(Row("attention", f"{number} pictures: accuracy ({name})", best, ">= 0.8", len(right)))
    return rows


def best_focus(sigma: Sequence[Any], targets: Sequence[int]) -> tuple[float, str]:
    """Return the best of LND-N, M-LND-N and MC-LND-N over N (method: section 3); sigma entries are (layers, images)."""
    best = (0.0, "none")
    if not targets:
        return best
    for n in range(1, sigma[0].shape[0] + 1):
        hits = {"LND": 0, "M-LND": 0, "MC-LND": 0}
        for values, target in zip(sigma, targets, strict=True):
            last = values[-n:]
            focused = last.argmax(1)
            votes = [(int((focused == k).sum()), float(last[focused == k, k].sum())) for k in range(last.shape[1])]
            hits["LND"] += int(last.max(0).values.argmax()) == target
            hits["M-LND"] += int(last.mean(0).argmax()) == target
            hits["MC-LND"] += votes.index(max(votes)) == target
        for name, hit in hits.items():
            if hit / len(targets) > best[0]:
                best = (hit / len(targets), f"{name}-{n}")
    return best


def evaluate(answer: Answerer, count: int = 200, seed: int = 1) -> list[Row]:
    """Measure all rows that need answers only."""
    rows: list[Row] = []
    for part in (single_rows, option_rows, several_rows, conflict_rows, refusal_rows, difference_rows):
        rows += part(answer, count, seed)
    return rows


def targets(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that have a target."""
    return [row for row in rows if row.target]


def evaluate_checkpoint(
    checkpoint: Path, page: Path, count: int = 200, seed: int = 1, threads: int = 2
) -> tuple[list[Row], str]:
    """Measure a checkpoint with plain transformers; write `page` and a JSON file beside it, return rows and page."""
    model = PlainModel(checkpoint, threads)
    rows = evaluate(model, count, seed) + attention_rows(model, count, seed)
    text = report(rows, f"Embedded model: measured on held-out scenes (seed {seed}, greedy, plain transformers, fp32)")
    page.write_text(text)
    page.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows, text
