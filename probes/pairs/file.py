"""Pairs of prompts from a JSONL file, with one object per line.

An object holds the messages of a prompt "toward" a side and of one "away" from it, or instead of a prompt the file of hidden
states that the readout `states` returned for it. To score answers it also has a "question", and in "expect" the text of
either side's answer. Any error in a file is reported with its line number before a
model is loaded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors

from probes.answering.base import Chat
from steering.pictures import opened

T = TypeVar("T")
Rule = Literal["holds", "begins"]
"""The rule by which an answer belongs to a side: it holds, or begins with, the side's text."""

ROLES = ("system", "user", "assistant")
KEYS = {"toward", "away", "question", "expect"}
SHOWN = '{"toward": [messages], "away": [messages]}'
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,(.*)", re.DOTALL)


@dataclass(frozen=True)
class PairedPrompt:
    """A chat whose pictures are files or encoded bytes, not yet decoded: thousands of pairs need no memory."""

    messages: tuple[Mapping[str, Any], ...]

    def chat(self) -> Chat:
        """Return the chat in the Hugging Face format, with its pictures decoded."""
        return [_decoded(message) for message in self.messages]

    @property
    def pictures(self) -> list[str]:
        """A digest of each picture."""
        contents = (message["content"] for message in self.messages)
        parts = [part for content in contents if not isinstance(content, str) for part in content]
        return [part["digest"] for part in parts if part["type"] == "image"]

    @property
    def digest(self) -> str:
        """A digest of all that the model reads: a picture counts by its bytes, wherever they lie."""
        text = json.dumps(self.messages, sort_keys=True, default=lambda _: None)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class KeptStates:
    """The hidden states of a prompt, in a safetensors file with a tensor "states", (layers, d) or (layers, positions, d)."""

    file: Path
    digest: str

    pictures: ClassVar[Sequence[str]] = ()

    def read(self) -> torch.Tensor:
        """Return the states (layers, d) in float32, the mean over positions."""
        states = load_tensors(self.file.read_bytes())["states"].float()
        return states if states.ndim == 2 else states.mean(1)

    @classmethod
    def of(cls, source: str, place: str, folder: Path) -> KeptStates:
        """Return the states of a file; raise ValueError, naming the place, where it holds none of every layer."""
        file = folder / Path(source).expanduser()
        if not file.is_file():
            raise ValueError(f"'{place}.states': there is no file {file}")
        try:
            with safe_open(file, "pt") as opened:
                shape = opened.get_slice("states").get_shape()
                layers = json.loads((opened.metadata() or {}).get("layers", "null"))
        except (SafetensorError, ValueError):
            raise ValueError(f"'{place}.states': {file} is no safetensors file with a tensor 'states'") from None
        if len(shape) not in (2, 3) or 0 in shape:
            raise ValueError(f"'{place}.states': {file} has states of shape {shape}, not (layers, positions, d)")
        if layers is not None and layers != list(range(shape[0])):
            raise ValueError(f"'{place}.states': {file} has layers {layers}; states of all layers are needed, in order")
        kept = cls(file, hashlib.sha256(file.read_bytes()).hexdigest())
        if not torch.isfinite(kept.read()).all():
            raise ValueError(f"'{place}.states': {file} has states that are not finite numbers")
        return kept


@dataclass(frozen=True)
class Check:
    """A question, and the text of either side's answer."""

    question: PairedPrompt
    toward: str
    away: str

    def side(self, answer: str, rule: Rule) -> Literal["toward", "away"] | None:
        """Return the side of an answer; None if it is neither's, or both's."""
        toward, away = (_matches(answer, text, rule) for text in (self.toward, self.away))
        if toward == away:
            return None
        return "toward" if toward else "away"


@dataclass(frozen=True)
class PromptPair:
    """Two prompts that ask for opposite sides; `line` is their line in the file."""

    line: int
    toward: PairedPrompt | KeptStates
    away: PairedPrompt | KeptStates
    test: Check | None = None

    @property
    def digest(self) -> str:
        return f"{self.toward.digest} {self.away.digest}"


def load(path: Path) -> list[PromptPair]:
    """Return the pairs of a file, skipping empty lines; raise ValueError that names the line of the first invalid one."""
    return read_lines(path, _pair, "pairs", SHOWN)


def read_lines(path: Path, read: Callable[[int, object, Path], T], items: str, shown: str) -> list[T]:
    """Return what `read` makes of each line's number, its JSON and the file's folder.

    Empty lines are skipped. Raises ValueError that names the first invalid line; `items` and `shown` say what a file holds.
    """
    parsed = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    parsed.append(read(number, json.loads(line), path.parent))
                except UnicodeDecodeError:
                    raise ValueError(f"{path}, line {number}: it is not UTF-8 text") from None
                except json.JSONDecodeError as error:
                    why = f"it is not JSON ({error.msg} at column {error.colno}); write {shown}, a line each"
                    raise ValueError(f"{path}, line {number}: {why}") from None
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not parsed:
        raise ValueError(f"{path} holds no {items}: write {shown}, a line each")
    return parsed


def different(pairs: Iterable[PromptPair]) -> list[PromptPair]:
    """Return the pairs without duplicates, keeping the first of each."""
    return list({pair.digest: pair for pair in reversed(list(pairs))}.values())[::-1]


def _pair(number: int, row: object, folder: Path) -> PromptPair:
    if not isinstance(row, dict):
        raise ValueError(f"it must be an object: {SHOWN}")
    if missing := [key for key in ("toward", "away") if key not in row]:
        raise ValueError(f"{missing[0]!r} is missing: {SHOWN}")
    if unknown := sorted(row.keys() - KEYS):
        raise ValueError(f"{unknown[0]!r} is unknown; there are {', '.join(sorted(KEYS))}")
    toward, away = (_side(row[key], key, folder) for key in ("toward", "away"))
    if toward.digest == away.digest:
        raise ValueError("both sides are the same")
    return PromptPair(number, toward, away, _test(row, folder))


def _side(value: object, place: str, folder: Path) -> PairedPrompt | KeptStates:
    match value:
        case {"states": str(source), **others} if not others:
            return KeptStates.of(source, place, folder)
    return prompt_of(value, place, folder)


def _test(row: Mapping[str, Any], folder: Path) -> Check | None:
    if ("question" in row) != ("expect" in row):
        raise ValueError("'question' and 'expect' need each other")
    if "question" not in row:
        return None
    expect = row["expect"]
    match expect:
        case {"toward": str(first), "away": str(other)} if first.strip() and other.strip() and len(expect) == 2:
            toward, away = first.strip(), other.strip()
        case _:
            raise ValueError('\'expect\' must be {"toward": text, "away": text}')
    if toward.casefold() == away.casefold():
        raise ValueError("'expect' is the same for both sides")
    return Check(prompt_of(row["question"], "question", folder), toward, away)


def prompt_of(value: object, place: str, folder: Path) -> PairedPrompt:
    """Return the prompt of a line's JSON, a list of messages or a text; raises ValueError that names the place."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place!r} must be a list of messages, or the user's text as a string")
    messages = tuple(_message(message, f"{place}[{i}]", folder) for i, message in enumerate(value))
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last message of {place!r} must be the user's: states are read where the answer begins")
    return PairedPrompt(messages)


def _message(value: object, place: str, folder: Path) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != {"role", "content"} or value["role"] not in ROLES:
        raise ValueError(f"'{place}' must have a 'role' of {', '.join(ROLES)} and a 'content', nothing else")
    content = value["content"]
    if isinstance(content, str) and content.strip():
        return {"role": value["role"], "content": content}
    if not isinstance(content, list) or not content:
        raise ValueError(f"'{place}.content' must be a string or a list of parts, not empty")
    parts = [_part(part, f"{place}.content[{i}]", folder) for i, part in enumerate(content)]
    return {"role": value["role"], "content": parts}


def _part(value: object, place: str, folder: Path) -> dict[str, Any]:
    match value:
        case {"type": "text", "text": str(text), **others} if not others:
            return {"type": "text", "text": text}
        case {"type": "image", "image": str(source), **others} if not others:
            return _picture(source, place, folder)
        case {"type": "image_url", "image_url": {"url": str(source)}, **others} if not others:
            return _picture(source, place, folder)
    raise ValueError(
        f'\'{place}\' must be {{"type": "text", "text": ...}} or {{"type": "image", "image": path or data: URL}}'
    )


def _picture(source: str, place: str, folder: Path) -> dict[str, Any]:
    """Return a part with the picture's source, decoded once to check that it can be."""
    if source[:5].lower() == "data:":
        header = _DATA_URL.fullmatch(source)
        try:
            data: Path | bytes = base64.b64decode(header[1], validate=True) if header else b""
        except binascii.Error:
            data = b""
        shown = "the data: URL"
        if not data:
            raise ValueError(f"'{place}': a data: URL must be data:image/...;base64, followed by base64")
    elif source[:8].lower().startswith(("http://", "https://")):
        raise ValueError(f"'{place}': remote images are not fetched; name a file, or give a data: URL")
    else:
        data = folder / Path(source).expanduser()
        shown = str(data)
        if not data.is_file():
            raise ValueError(f"'{place}': there is no file {shown}")
    try:
        return {"type": "image", "source": _Source(data), "digest": _checked(data)}
    except OSError as error:
        raise ValueError(f"'{place}': {shown}: {error.strerror or error}") from None
    except ValueError:
        raise ValueError(f"'{place}': {shown} holds no readable image") from None


@dataclass(frozen=True)
class _Source:
    """A picture's file or bytes, which does not enter a prompt's digest."""

    data: Path | bytes


@lru_cache(maxsize=4096)
def _checked(data: Path | bytes) -> str:
    content = data if isinstance(data, bytes) else data.read_bytes()
    opened(content)
    return hashlib.sha256(content).hexdigest()


@lru_cache(maxsize=16)
def _opened(data: Path | bytes) -> Any:
    """Open a picture; it is cached briefly, because both sides of a pair mostly show the same one."""
    return opened(data)


def _decoded(message: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(message["content"], str):
        return dict(message)
    parts = [
        {"type": "image", "image": _opened(part["source"].data)} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _matches(answer: str, text: str, rule: Rule) -> bool:
    escaped = re.escape(text)
    words = rf"(?<!\w){escaped}(?!\w)"
    if rule == "begins":
        return re.match(rf"\W*?{words}", answer, re.IGNORECASE) is not None
    return re.search(words, answer, re.IGNORECASE) is not None
