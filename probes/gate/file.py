"""Examples of a condition from a JSONL file, with one object per line.

An object holds the messages of a prompt under "when", where the condition should hold, or under "not", where it should not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from probes.pairs.file import PairedPrompt, prompt_of, read_lines

SHOWN = '{"when": [messages]} or {"not": [messages]}'


@dataclass(frozen=True)
class GateExample:
    """A prompt for which the condition should hold, or should not."""

    prompt: PairedPrompt
    holds: bool


def load(path: Path) -> list[GateExample]:
    """Return the examples of a file; raise ValueError that names the line of the first invalid one."""
    return read_lines(path, _example, "examples", SHOWN)


def different(examples: Iterable[GateExample], path: Path) -> list[GateExample]:
    """Return the examples without duplicates; raise ValueError where a prompt stands on both sides."""
    sides: dict[str, GateExample] = {}
    for example in examples:
        if sides.setdefault(example.prompt.digest, example).holds is not example.holds:
            raise ValueError(f'{path}: a prompt stands under "when" and under "not"')
    return list(sides.values())


def _example(number: int, row: object, folder: Path) -> GateExample:
    if not isinstance(row, dict) or len(row) != 1 or next(iter(row)) not in ("when", "not"):
        raise ValueError(f"it must be an object with one of the keys 'when' and 'not': {SHOWN}")
    ((key, value),) = row.items()
    return GateExample(prompt_of(value, key, folder), key == "when")
