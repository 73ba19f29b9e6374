"""The chat template of a model: its own, a file in its place, or that of a family published without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from steering.errors import UnsupportedModel

LONGEST = 2**20
"""The maximum size of a template's file in bytes."""

_TASKS = """\
{%- for message in messages -%}
{%- if message.content is not string -%}
{%- for part in message.content -%}{%- if part.type == 'image' -%}{{- '<image>' }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '' if loop.first else '\\n' }}
{%- if message.content is string -%}{{- message.content }}
{%- else -%}
{%- for part in message.content -%}{%- if part.type == 'text' -%}{{- part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endfor -%}
"""
"""Pictures, then the plain texts: PaliGemma expects a task, such as "describe en", and knows no roles."""
FALLBACKS = {"paligemma": _TASKS}
"""Templates of families whose checkpoints have none, by the config's model type."""


def read_template(path: str | Path) -> str:
    """Return the template in a file; raise UnsupportedModel where it is none, or cannot be read."""
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > LONGEST:
            raise UnsupportedModel(f"The chat template {str(path)!r} has more than {LONGEST} bytes.")
        template = file.read_text(encoding="utf-8")
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except OSError as error:
        raise UnsupportedModel(f"The chat template {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UnsupportedModel(f"The chat template {str(path)!r} is not UTF-8 text.") from error
    except TemplateSyntaxError as error:
        if "unknown tag 'generation'" in str(error):  # transformers' own
            return template
        raise UnsupportedModel(
            f"The chat template {str(path)!r} is not a valid Jinja template: line {error.lineno}: {error.message}"
        ) from error
    return template


def set_template(processor: Any, model_type: str, template: str | None) -> bool:
    """Make a processor use the given template, or else its own or its tokenizer's, or else its family's.

    Returns whether it has one then.
    """
    tokenizer = getattr(processor, "tokenizer", None)
    if template is None and not getattr(processor, "chat_template", None):
        processor.chat_template = getattr(tokenizer, "chat_template", None) or None
        if not processor.chat_template:
            template = FALLBACKS.get(model_type)
            if template is None:
                return False
    if template is not None:
        processor.chat_template = template
        if tokenizer is not None:
            tokenizer.chat_template = template
    return True
