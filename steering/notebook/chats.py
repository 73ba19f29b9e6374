"""The chats that a processor rendered within a block, so that the tokens of a prompt lead back to its messages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers.image_utils import load_image

from steering.prompt.layout import Prompt

KEPT = 16
"""The number of chats that are remembered."""
SOURCES = ("image", "url", "path", "base64")
"""The keys under which a part of a message may hold its image."""

Chat = list[dict[str, Any]]


class SeenChats:
    """The chats that a processor rendered, the latest last, with their images.

    A chat whose images are given beside its text is complete once the processor is called with both.
    """

    def __init__(self) -> None:
        self.complete: list[Chat] = []
        self._prompts: dict[int, Prompt] = {}  # by the id of a complete chat
        self._waiting: OrderedDict[str, Chat] = OrderedDict()  # by the rendered text

    @contextmanager
    def watching(self, processor: Any) -> Iterator[None]:
        """Remember what this processor renders within the block."""
        plain, watcher = type(processor), self

        def apply_chat_template(self: Any, conversation: Any, *args: Any, **options: Any) -> Any:
            rendered = plain.apply_chat_template(self, conversation, *args, **options)
            watcher.rendered(conversation, rendered)
            return rendered

        def call(self: Any, images: Any = None, text: Any = None, *args: Any, **options: Any) -> Any:
            watcher.called(text, images)
            return plain.__call__(self, images, text, *args, **options)

        own = {"apply_chat_template": apply_chat_template, "__call__": call, "__module__": plain.__module__}
        processor.__class__ = type(plain.__name__, (plain,), own)  # of this processor alone
        try:
            yield
        finally:
            processor.__class__ = plain

    def rendered(self, conversation: Any, text: Any) -> None:
        """Note a chat, or several, and its text; `text` is anything else where it was tokenized at once."""
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        chats = [chat_of(messages) for messages in (conversation if several else [conversation])]
        texts = [text] if isinstance(text, str) else text if isinstance(text, list) else []
        for number, chat in enumerate(chats):
            if not any(True for _ in _empty(chat)):
                self._keep(chat)
            elif number < len(texts) and isinstance(texts[number], str):
                self._waiting[texts[number]] = chat
                if len(self._waiting) > KEPT:
                    self._waiting.popitem(last=False)

    def called(self, text: Any, images: Any) -> None:
        """Note the images that the processor is given with texts that it rendered before."""
        pictures = list(_flat(images))
        for item in [text] if isinstance(text, str) else text if isinstance(text, Sequence) else []:
            chat = self._waiting.get(item) if isinstance(item, str) else None
            if chat is None:
                continue
            count = sum(1 for _ in _empty(chat))
            if count > len(pictures):
                return
            own, pictures = iter(pictures[:count]), pictures[count:]
            self._keep([{**message, "content": _filled(message["content"], own)} for message in chat])

    def prompt(self, chat: Chat, build: Callable[[Chat], Prompt]) -> Prompt:
        """Return the prompt of a complete chat, which is built once."""
        if id(chat) not in self._prompts:
            self._prompts[id(chat)] = build(chat)
        return self._prompts[id(chat)]

    def _keep(self, chat: Chat) -> None:
        self.complete = [*self.complete[-KEPT + 1 :], chat]
        ids = set(map(id, self.complete))
        self._prompts = {key: prompt for key, prompt in self._prompts.items() if key in ids}


def chat_of(messages: Sequence[Mapping[str, Any]]) -> Chat:
    """Return messages in the form of `steering.Request`, with loaded images; an image without a source stays empty."""
    return [
        {**message, "content": _filled(message["content"], iter(()))} if message.get("content") else dict(message)
        for message in messages
    ]


def _filled(content: Any, pictures: Iterator[Any]) -> Any:
    """Return a message's content with images in place, those without a source from `pictures`."""
    if isinstance(content, str):
        return content
    return [_image(part, pictures) if part.get("type") in ("image", "image_url") else dict(part) for part in content]


def _image(part: Mapping[str, Any], pictures: Iterator[Any]) -> dict[str, Any]:
    source: Any = next((part[key] for key in SOURCES if part.get(key) is not None), part.get("image_url"))
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        source = next(pictures, None)
    others = {name: value for name, value in part.items() if name not in (*SOURCES, "image_url", "type")}
    return {"type": "image", **({} if source is None else {"image": load_image(source)}), **others}


def _empty(chat: Chat) -> Iterator[Mapping[str, Any]]:
    """Yield the images of a chat that are not known yet."""
    for message in chat:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] == "image" and "image" not in part:
                yield part


def _flat(images: Any) -> Iterator[Any]:
    """Yield images that may be nested by prompt."""
    if isinstance(images, Iterable) and not isinstance(images, str | bytes) and not hasattr(images, "__array__"):
        for image in images:
            yield from _flat(image)
    elif images is not None:
        yield images
