"""Packing: groups of questions become rows of tokens in which the questions about one picture share its prefix.

A group's prefix (system message, pictures) is branch 0; its questions are branches 1, 2, ... that see the prefix and
themselves. A batch depends only on (seed, rank, index, plan), so a run can be resumed exactly.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from demo.model.tokenizer import IMAGE_TOKEN, TURN_END, TURN_START, VISION_END, VISION_START
from demo.training.curriculum import TYPES, Plan, TaskGroup, make_group
from demo.world.questions import SceneQuestion
from demo.world.scenes import SIDE, Scene, Size, render, render_array, squash

IMAGE_TOKENS = 9
TYPE_INDEX = {name: i for i, name in enumerate(TYPES)}
# Sizes at which training scenes are drawn before the squash to 84 x 84: mostly as they are, else larger or oblong.
SIZES: tuple[Size, ...] = ((84, 84),) * 6 + (
    (168, 168),
    (168, 168),
    (252, 252),
    (126, 84),
    (168, 126),
    (126, 168),
    (160, 90),
)
# Targets of a token's attention: where to read, where else to read (the second picture, or the context's claim),
# which option to pick, and, for tokens of a second picture, the same cell of the first to compare with.
READ, SECOND, PICK, COMPARE = range(4)
LOOKS = 4
# Keys of tokens to look at: picture tokens are 9 * picture + cell, marks in the user's text are negative.
SAID, PICKED, INSTRUCTED = -1, -2, -3
SIDES = ("text", "vision")
Look = tuple[int | None, int | None, int | None]  # read, second, pick
NOWHERE: Look = (None, None, None)


@dataclass(frozen=True)
class Shape:
    """The fixed sizes of a batch."""

    rows: int = 7
    tokens: int = 192
    pictures: int = 20
    answers: int = 480
    questions: int = 64


@dataclass
class Tokens:
    """A stretch of tokens with the training targets of each."""

    ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    picture: list[int] = field(default_factory=list)  # 9 * picture + cell, -1 for text
    answer: list[bool] = field(default_factory=list)
    asks: list[bool] = field(default_factory=list)  # question and answer rows of the image-attention factor
    look: list[Look] = field(default_factory=list)
    marks: dict[int, int] = field(default_factory=dict)  # SAID, PICKED, INSTRUCTED -> token
    next: int = 0  # the next position

    def __len__(self) -> int:
        return len(self.ids)


class Packer:
    """Turns groups into packed batches with a tokenizer."""

    def __init__(self, tokenizer: Any, shape: Shape = Shape(), sight: int = SIDE) -> None:
        self.shape, self.sight = shape, sight
        self.image_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        self.encode = functools.lru_cache(200_000)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def batch(self, seed: int, rank: int, index: int, plan: Plan) -> dict[str, Any]:
        """Return the batch `index` of a rank: numpy arrays, see `Rows`, plus `kinds` (questions,) type numbers."""
        rng = random.Random(f"train {seed} {rank} {index}")
        rows = Rows(self.shape)
        while rows.add(rng, self, make_group(rng, plan)):
            pass
        return rows.arrays()

    def prefix(self, group: TaskGroup) -> Tokens:
        tokens = Tokens()
        if group.system:
            self._text(tokens, f"{TURN_START}system\n{group.system}{TURN_END}\n")
        self._text(tokens, f"{TURN_START}user\n")
        if not group.text_first:
            self._pictures(tokens, len(group.scenes))
        return tokens

    def branch(self, group: TaskGroup, question: SceneQuestion, start: int) -> Tokens:
        """Return the question's turns after the prefix, without the very last token, which is only predicted."""
        tokens = Tokens(next=start)
        look = self._look(question)
        for i, (text, answer) in enumerate(question.turns):
            if i:
                self._text(tokens, f"\n{TURN_START}user\n")
            end = None if question.instructed is None else question.instructed[0]
            marks = {SAID: question.said, PICKED: question.pick, INSTRUCTED: end}
            self._add_marked(tokens, text, marks if i == 0 else {})
            if i == 0 and group.text_first:
                self._pictures(tokens, len(group.scenes))
            mark = len(tokens)
            self._text(tokens, f"{TURN_END}\n{TURN_START}assistant\n", look=look)
            tokens.look[mark - 1] = look
            for piece, cell in question.spans or ((answer, None),):
                where = look if question.spans is None else (self._token(question.target, cell), None, None)
                tokens.look[-1] = where  # the row before predicts the piece's first token
                self._text(tokens, piece, answer=True, asks=True, look=where)
            self._text(tokens, TURN_END, answer=True, asks=True)
        return tokens

    @staticmethod
    def _token(target: int | None, cell: int | None) -> int | None:
        return None if cell is None else (target or 0) * IMAGE_TOKENS + cell

    def _look(self, question: SceneQuestion) -> Look:
        pick = None if question.pick is None else PICKED
        if question.pair_cells is not None:
            first, second = question.pair_cells
            return first, IMAGE_TOKENS + second, pick
        return self._token(question.target, question.cell), None if question.said is None else SAID, pick

    def _add_marked(self, tokens: Tokens, text: str, marks: dict[int, int | None]) -> None:
        """Add a user text and note the tokens that end at the marks; marks never fall inside a token."""
        marked = 0
        for end, name in sorted((end, name) for name, end in marks.items() if end is not None):
            self._text(tokens, text[marked:end], asks=True)
            tokens.marks[name] = len(tokens) - 1
            marked = end
        self._text(tokens, text[marked:], asks=True)

    def _text(
        self,
        tokens: Tokens,
        text: str,
        answer: bool = False,
        asks: bool = False,
        look: Look = NOWHERE,
    ) -> None:
        ids = self.encode(text)
        tokens.ids += ids
        tokens.positions += [(tokens.next + i,) * 3 for i in range(len(ids))]
        tokens.next += len(ids)
        tokens.picture += [-1] * len(ids)
        tokens.answer += [answer] * len(ids)
        tokens.asks += [asks] * len(ids)
        tokens.look += [look] * len(ids)

    def _pictures(self, tokens: Tokens, count: int) -> None:
        for k in range(count):
            self._text(tokens, (f"Picture {k + 1}: " if count > 1 else "") + VISION_START)
            for cell in range(IMAGE_TOKENS):
                tokens.ids.append(self.image_id)
                tokens.positions.append((tokens.next, tokens.next + cell // 3, tokens.next + cell % 3))
                tokens.picture.append(k * IMAGE_TOKENS + cell)
                tokens.answer.append(False)
                tokens.asks.append(False)
                tokens.look.append(NOWHERE)
            tokens.next += 3
            self._text(tokens, VISION_END)


class Rows:
    """A batch being filled. All token arrays are (rows, tokens)."""

    def __init__(self, shape: Shape) -> None:
        size = (shape.rows, shape.tokens)
        self.shape = shape
        self.row = self.column = self.groups = 0
        self.data = {
            "ids": np.zeros(size, np.int64),
            "positions": np.zeros((3, *size), np.int64),
            "group": np.full(size, -1, np.int64),  # -1 is padding
            "branch": np.zeros(size, np.int64),  # 0 is the group's prefix
            "slot": np.full(size, -1, np.int64),  # 9 * picture of the batch + cell, -1 for text
            "ordinal": np.zeros(size, np.int64),  # which picture of the conversation, from 1
            "asks": np.full(size, shape.questions, np.int64),  # question whose sigma this row counts for
            "look": np.full((LOOKS, *size), -1, np.int64),  # column to attend to
            "side": np.full(size, -1, np.int64),  # the side of the instruction that ends here, as in SIDES
        }
        self.pixels: list[np.ndarray] = []
        self.source: list[int] = []
        self.label: list[int] = []
        self.weight: list[float] = []
        self.question: list[int] = []  # the question of each answer token
        self.kinds: list[int] = []
        self.target: list[int] = []

    def add(self, rng: random.Random, packer: Packer, group: TaskGroup) -> bool:
        """Add a group; return False when the batch is full."""
        shape = self.shape
        if len(self.pixels) + len(group.scenes) > shape.pictures:
            return False
        prefix = packer.prefix(group)
        first_slot = IMAGE_TOKENS * len(self.pixels)
        columns: dict[int, int] = {}
        branch_number = 0
        for question in group.questions:
            branch = packer.branch(group, question, prefix.next)
            length = len(branch) - 1
            if len(prefix) + length > shape.tokens:
                continue
            if len(self.kinds) >= shape.questions or len(self.label) + sum(branch.answer) > shape.answers:
                return self._finish(rng, packer, group, branch_number)
            if branch_number == 0 or self.column + length > shape.tokens:
                if self.column + len(prefix) + length > shape.tokens:
                    self.row, self.column = self.row + 1, 0
                if self.row >= shape.rows:
                    return self._finish(rng, packer, group, branch_number)
                self.groups += 1
                columns = self._write(prefix, len(prefix), 0, first_slot, {}, None)
                branch_number = 0 if branch_number == 0 else branch_number
            branch_number += 1
            self._write(branch, length, branch_number, first_slot, columns, question)
        if branch_number:
            self.pixels += [picture(rng, scene, packer.sight) for scene in group.scenes]
        return True

    def _finish(self, rng: random.Random, packer: Packer, group: TaskGroup, used: int) -> bool:
        if used:
            self.pixels += [picture(rng, scene, packer.sight) for scene in group.scenes]
        return False

    def _write(
        self,
        tokens: Tokens,
        length: int,
        branch: int,
        first_slot: int,
        shared: dict[int, int],
        question: SceneQuestion | None,
    ) -> dict[int, int]:
        """Copy a stretch to the current place; return the columns of its picture tokens (and of the shared ones)."""
        row, start = self.row, self.column
        span = slice(start, start + length)
        data = self.data
        data["ids"][row, span] = tokens.ids[:length]
        data["positions"][:, row, span] = np.array(tokens.positions[:length]).T
        data["group"][row, span] = self.groups
        data["branch"][row, span] = branch
        columns = dict(shared)
        for i, token in enumerate(tokens.picture[:length]):
            if token >= 0:
                columns[token] = start + i
                data["slot"][row, start + i] = first_slot + token
                data["ordinal"][row, start + i] = token // IMAGE_TOKENS + 1
                if IMAGE_TOKENS <= token < 2 * IMAGE_TOKENS:  # the second picture compares with the first
                    data["look"][COMPARE, row, start + i] = columns[token - IMAGE_TOKENS]
        columns |= {name: start + i for name, i in tokens.marks.items()}
        if question is not None:
            if question.instructed is not None:
                data["side"][row, columns[INSTRUCTED]] = SIDES.index(question.instructed[1])
            number = len(self.kinds)
            answers = sum(tokens.answer)
            for i in range(length):
                if tokens.asks[i]:
                    data["asks"][row, start + i] = number
                for head, at in enumerate(tokens.look[i]):
                    if at is not None:
                        data["look"][head, row, start + i] = columns[at]
                if tokens.answer[i + 1]:
                    self.source.append(row * self.shape.tokens + start + i)
                    self.label.append(tokens.ids[i + 1])
                    self.weight.append(answers**-0.5)
                    self.question.append(number)
            self.kinds.append(TYPE_INDEX[question.kind])
            several = len({t // IMAGE_TOKENS for t in columns if t >= 0}) > 1 and len(question.turns) == 1
            self.target.append(-1 if question.target is None or not several else question.target)
        self.column += length
        return columns

    def arrays(self) -> dict[str, Any]:
        shape = self.shape
        pixels = np.zeros((shape.pictures, 36, 588), np.uint8)
        if self.pixels:
            pixels[: len(self.pixels)] = np.stack(self.pixels)

        def padded(values: list, size: int, fill: int, kind: type) -> np.ndarray:
            return np.array(values + [fill] * (size - len(values)), kind)

        return self.data | {
            "pixels": pixels,
            "source": padded(self.source, shape.answers, 0, np.int64),
            "label": padded(self.label, shape.answers, 0, np.int64),
            "weight": padded(self.weight, shape.answers, 0, np.float32),  # 0 marks padding
            "question": padded(self.question, shape.answers, shape.questions, np.int64),
            "target": padded(self.target, shape.questions, -1, np.int64),
            "kinds": padded(self.kinds, shape.questions, -1, np.int64),
        }


def picture(rng: random.Random, scene: Scene, sight: int = SIDE) -> np.ndarray:
    """Return a jittered training picture as patches (36, 588) uint8.

    It is drawn at some size, squashed to `sight` pixels a side, resized by the processor to 84, and cut up.
    """
    size = rng.choice(SIZES)
    if size == (sight, sight):
        return patches(render_array(scene, size, rng))
    return patches(np.asarray(squash(squash(render(scene, size, rng), sight))))


def patches(picture: np.ndarray) -> np.ndarray:
    """Cut (84, 84, 3) uint8 into (36, 588): 14-pixel patches, the four that merge into one token next to each other."""
    blocks = picture.transpose(2, 0, 1).reshape(3, 3, 2, 14, 3, 2, 14)  # c, row, inner row, y, column, inner column, x
    return np.ascontiguousarray(blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(36, 588))
