"""Rendering of a chat by the model's template, with the spans of its messages' texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steering.errors import RequestError
from steering.model.mllm import MLLM
from steering.prompt.characters import MARK, as_json
from steering.prompt.chat import is_context_line
from steering.prompt.spans import CONTEXT


@dataclass(frozen=True)
class TemplateOptions:
    """The chat template's arguments besides the messages.

    `functions` are those that it describes to the model, `variables` others that it reads, by name. With `continues` the
    prompt ends with the last message, so that the answer goes on from it.
    """

    functions: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False


PLAIN = TemplateOptions()


@dataclass(frozen=True)
class SpannedText:
    """A text part of a message of a role, with the span that its plain lines belong to."""

    text: str
    span: int
    role: str


Rendered = tuple[str, list[tuple[int, int, int, str]]]
"""A rendered chat and its text spans: (start, end, span, role), the first two in characters."""


def render(
    mllm: MLLM,
    chat: list[dict[str, Any]],
    parts: Sequence[SpannedText],
    options: TemplateOptions,
    special: re.Pattern[str],
) -> Rendered:
    """Render a chat and find its text spans; raise RequestError where the template refuses it, or leaves a text out.

    Some templates lose the text of a list of parts, others that of a string: messages of one text are tried in both forms.
    """
    variables = mllm.chat.variables
    if unread := [name for name in options.variables if name not in variables]:
        allowed = ", ".join(sorted(variables)) or "nothing"
        raise RequestError(
            f"'chat_template_kwargs.{unread[0]}' is no variable that the model's chat template reads; it reads: {allowed}.",
            param=f"chat_template_kwargs.{unread[0]}",
            code="unknown_parameter",
        )
    inputs = as_json(options.functions, special), as_json(options.variables, special), options.continues
    try:
        return _rendered_with_spans(mllm, chat, parts, inputs)
    except RequestError:
        strings = [
            {**message, "content": content[0]["text"] if content else ""}
            if len(content := message["content"]) <= 1 and all("text" in part for part in content)
            else message
            for message in chat
        ]
        if strings == chat:
            raise
        return _rendered_with_spans(mllm, strings, parts, inputs)


def rendered(render: Callable[..., str], *inputs: Any) -> str:
    """Return the template's rendering of a chat; raise RequestError where it refuses the chat."""
    try:
        return render(*inputs)
    except Exception as error:  # a template may raise anything about the chat's form
        raise RequestError(f"The model's chat template refuses these messages: {error}", param="messages") from error


def _rendered_with_spans(
    mllm: MLLM, chat: list[dict[str, Any]], parts: Sequence[SpannedText], inputs: tuple[Any, ...]
) -> Rendered:
    text = rendered(mllm.chat.render, chat, *inputs)
    return text, list(_text_spans(mllm, chat, parts, text, inputs))


def _text_spans(
    mllm: MLLM, chat: list[dict[str, Any]], parts: Sequence[SpannedText], text: str, inputs: tuple[Any, ...]
) -> Iterator[tuple[int, int, int, str]]:
    """Yield (start, end, span, role), in characters of the rendered text, for every line of every text part.

    The chat is rendered a second time with marks in place of the texts; the pieces between the marks are the template's own,
    whatever the users wrote.
    """
    numbers = iter(range(len(parts)))

    def marked(content: Any) -> Any:
        if isinstance(content, str):
            return f"{MARK[0]}{next(numbers)}{MARK[1]}"
        return [part if part["type"] == "image" else {**part, "text": marked(part["text"])} for part in content]

    form = [{**message, "content": marked(message["content"])} for message in chat]
    pieces = re.split(f"{MARK[0]}(\\d+){MARK[1]}", rendered(mllm.chat.render_form, json.dumps([form, *inputs])))
    if missing := {number for number, part in enumerate(parts) if part.text.strip()} - set(map(int, pieces[1::2])):
        raise RequestError(
            f"The model's chat template leaves out the text {parts[min(missing)].text.strip()[:40]!r}.",
            param="messages",
        )
    position = _after(text, pieces[0], 0)
    for number, piece in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
        part, role = parts[number].text.strip(), parts[number].role  # templates may trim a text
        start = position = _after(text, part, position) - len(part)
        for line in part.splitlines(keepends=True):
            span = parts[number].span
            if span != CONTEXT and is_context_line(role, line):
                span, line_end = CONTEXT, position + len(line.rstrip("\n"))
            else:
                line_end = position + len(line)
            yield position, line_end, span, role
            position += len(line)
        position = _after(text, piece, start + len(part))


def _after(text: str, piece: str, position: int) -> int:
    """Return the end of `piece`, which must begin at `position`, apart from white space."""
    start = text.find(piece, position)
    if start < 0 or text[position:start].strip():
        raise RequestError(
            "The model's chat template changes the text of messages; it cannot be laid out.", param="messages"
        )
    return start + len(piece)
