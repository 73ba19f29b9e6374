"""A checkpoint whose chat template tells of tools, in the format of Hermes and Qwen, shortened."""

from __future__ import annotations

import functools
from pathlib import Path

from tests.families.building import build
from tests.families.parts import content, prompt

FAMILY = "qwen2_5_vl"
_CONTENT = content("<|vision_start|><|image_pad|><|vision_end|>")
_FIRST = content("", of="messages[0].content")

TEMPLATE = (
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
{{- '\\n</tools>\\nCalls:\\n<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
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
{%- if message.content or not loop.first -%}{{- '\\n' }}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{- '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
"""
    + prompt("<|im_start|>assistant\\n")
)


@functools.cache
def calling(root: Path) -> Path:
    """The folder of such a checkpoint under `root`, built the first time it is asked for."""
    folder = build(FAMILY, root / "calling")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
