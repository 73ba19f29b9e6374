"""A model's chat template: its rendering, and the variables that it reads and a request may set."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.processing_utils import ProcessorMixin

GIVEN = frozenset(
    {
        "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "unk_token",
        "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens", "raise_exception",
        "strftime_now", "dict", "namespace", "range", "lipsum", "cycler", "joiner",
    }
)  # fmt: skip
"""Names that a template is always given: the chat, functions, special tokens."""
ARGUMENTS = frozenset(inspect.signature(ProcessorMixin.apply_chat_template).parameters) - {"documents", "kwargs"}
"""Names that choose how a template is applied; `documents` are passed on to it."""
RESERVED_VARIABLES = GIVEN | ARGUMENTS
"""Names that `Request.chat_template_kwargs` cannot set."""
NOTHING: Mapping[str, Any] = MappingProxyType({})

REASONING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Tags around reasoning in published chat templates."""


class ChatTemplate:
    """The chat template of a processor, read from it at each use."""

    def __init__(self, processor: Any):
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)

    @property
    def _templates(self) -> list[Any]:
        """The templates of processor and tokenizer; some models have several by name."""
        templates = (getattr(owner, "chat_template", None) for owner in (self._processor, self._tokenizer))
        return [template for template in templates if template]

    @property
    def text(self) -> str:
        """The template; "" where there is none, or several."""
        first = next(iter(self._templates), "")
        return first if isinstance(first, str) else ""

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """The tags that the template names around reasoning, None if it names none."""
        return next(((begin, end) for begin, end in REASONING if begin in self.text and end in self.text), None)

    @property
    def takes_reasoning(self) -> bool:
        """True if the template has a place for the reasoning of earlier answers, as `reasoning_content` of a message."""
        return "reasoning_content" in self.text

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template looks up and that a request may set, such as `enable_thinking`."""
        template = getattr(self._processor, "chat_template", None)
        applied = template.get("default") if isinstance(template, Mapping) else template
        try:
            return variables_of(str(applied or "")) - frozenset(self._tokenizer.special_tokens_map)
        except TemplateSyntaxError:  # applying it will raise the same error
            return frozenset()

    def render(
        self,
        chat: list[dict[str, Any]],
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] = NOTHING,
        continues: bool = False,
    ) -> str:
        """Return the prompt that the template renders for a chat.

        The chat is to be answered or, if `continues`, its last message is to be continued. Raises whatever the template
        raises. variables: by name, others that it looks up.
        """
        options = {**variables, **({"tools": [*tools]} if tools else {})}
        return str(
            self._processor.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues, **options
            )
        )

    @cached_property
    def render_form(self) -> Callable[[str], str]:
        """A cached form of `render`, whose arguments are a list in JSON.

        Results are kept, for chats that differ in nothing but their texts, unless the template reads the time.
        """

        def rendered(form: str) -> str:
            return self.render(*json.loads(form))

        return rendered if "strftime_now" in str(self._templates) else lru_cache(maxsize=64)(rendered)


class _Generation(Extension):
    """Parses the tag by which transformers marks what an assistant generated."""

    tags = {"generation"}  # noqa: RUF012 -- as its base has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Return the names that a template looks up, as vLLM does, without `RESERVED_VARIABLES`.

    Raises jinja2's TemplateSyntaxError where it is no template.
    """
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", _Generation])
    return frozenset(find_undeclared_variables(environment.parse(template))) - RESERVED_VARIABLES
