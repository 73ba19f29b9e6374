"""Checkpoints whose chat templates tell of tools: what those of published models write, shortened."""

from __future__ import annotations

import functools
from pathlib import Path

from tests.families.building import build
from tests.families.parts import content, prompt

FAMILY = "qwen2_5_vl"
_CONTENT = content("<|vision_start|><|image_pad|><|vision_end|>")
_FIRST = content("", of="messages[0].content")

HERMES = """\
{%- if message.content or not loop.first -%}{{- '\\n' }}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
"""
GLM = """\
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for k, v in call.function.arguments.items() -%}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{- v | tojson if v is not string else v }}{{- '</arg_value>\\n' }}
{%- endfor -%}
{{- '</tool_call>' }}
"""
_NINE = """\
{%- if call.id is not defined or call.id | length != 9 -%}{{- raise_exception('ids of length 9') }}{%- endif -%}
"""
MISTRAL = (
    _NINE
    + """\
{{- '[TOOL_CALLS] [' if loop.first else ', ' }}{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{%- if loop.last -%}{{- ']' }}{%- endif -%}
"""
)
MINISTRAL = (
    _NINE
    + """\
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{- call.function.arguments | tojson }}
"""
)
KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "hermes": ('Calls:\\n<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call>', HERMES, ()),
    "glm": ("<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>\\n</tool_call>", GLM, ()),
    "mistral": ("[AVAILABLE_TOOLS]", MISTRAL, ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]")),
    "ministral": ("[AVAILABLE_TOOLS]", MINISTRAL, ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[ARGS]", "[CALL_ID]")),
}
"""Notation of calls by format: its description for the model, a call's template, and its special tokens."""


def template(told: str, call: str) -> str:
    """Return a chat template that describes tools with `told` and writes calls with `call`."""
    return (
        """\
{%- set told = messages[0].role == 'system' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' }}
{%- if told -%}
"""
        + _FIRST
        + """\
{{- '\\n\\n' }}
{%- endif -%}
{{- 'Functions:\\n<tools>' }}
{%- for tool in tools -%}{{- '\\n' }}{{- tool | tojson }}{%- endfor -%}
{{- '\\n</tools>\\n"""
        + told
        + """<|im_end|>\\n' }}
{%- elif told -%}
{{- '<|im_start|>system\\n' }}
"""
        + _FIRST
        + """\
{{- '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' }}{%- endif -%}
{{- '\\n<tool_response>\\n' }}
"""
        + _CONTENT
        + """\
{{- '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' }}{%- endif -%}
{%- elif message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + message.role + '\\n' }}
"""
        + _CONTENT
        + """\
{%- for call in message.tool_calls or [] -%}
"""
        + call
        + """\
{%- endfor -%}
{{- '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
"""
        + prompt("<|im_start|>assistant\\n")
    )


@functools.cache
def calling(root: Path, kind: str = "hermes") -> Path:
    """Return the folder of such a checkpoint under `root`, built at the first call."""
    told, call, specials = KINDS[kind]
    folder = build(FAMILY, root / f"calling-{kind}", specials=specials)
    (folder / "chat_template.jinja").write_text(template(told, call))
    return folder
