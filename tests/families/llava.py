"""LLaVA, LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

from tests.families.family import Family, Json
from tests.families.parts import CHATML, CHATML_ENDS, CLIP, LLAMA_ENDS, SIGLIP, SQUARE, images_first, prompt, text

_LLAVA_TEMPLATE = (
    """\
{%- for message in messages -%}
{%- if message.role != 'system' -%}{{- message.role.upper() + ': ' }}{%- endif -%}
"""
    + images_first("<image>\\n", "part.text + ' '")
    + """\
{%- endfor -%}
"""
    + prompt("ASSISTANT:")
)
_LLAVA_NEXT_TEMPLATE = (
    """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- '<<SYS>>\\n' + message.content[0].text + '\\n<</SYS>>\\n\\n' }}
{%- elif message.role == 'user' -%}
{{- '[INST] ' }}
"""
    + images_first("<image>\\n")
    + """\
{{- ' [/INST]' }}
{%- else -%}
{{- ' ' + message.content[0].text + '</s> ' }}
{%- endif -%}
{%- endfor -%}
"""
)
_ONEVISION_TEMPLATE = (
    """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + ' ' }}
"""
    + images_first("<image>", "'\\n' + part.text")
    + """\
{{- '<|im_end|>' }}
{%- endfor -%}
"""
    + prompt("<|im_start|>assistant\\n")
)
_CROP: Json = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
_PATCH_TOKENS: Json = {
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "image_token": "<image>",
}
_GRIDS: Json = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
_ONEVISION_GRIDS: Json = {"image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]]}
_WORDS: Json = {"specials": ("<unk>", "<image>")} | LLAMA_ENDS
LLAVA = Family(
    config={
        "model_type": "llava",
        "text_config": text("llama"),
        "vision_config": CLIP,
        "image_token_index": "<image>",
        "image_seq_length": 16,
    },
    image_processor={
        "image_processor_type": "CLIPImageProcessor",
        **_CROP,
    },
    processor={
        "processor_class": "LlavaProcessor",
        "patch_size": 7,
        **_PATCH_TOKENS,
    },
    template=_LLAVA_TEMPLATE,
    **_WORDS,
)
# Tiles of 28 pixels, four patches each: an image is 8 to 24 tokens.
LLAVA_NEXT = Family(
    config={
        "model_type": "llava_next",
        "text_config": text("mistral", sliding_window=None),
        "vision_config": CLIP | {"patch_size": 14},
        "image_token_index": "<image>",
        **_GRIDS,
    },
    image_processor={
        "image_processor_type": "LlavaNextImageProcessor",
        **_CROP,
        **_GRIDS,
    },
    processor={
        "processor_class": "LlavaNextProcessor",
        "patch_size": 14,
        **_PATCH_TOKENS,
    },
    template=_LLAVA_NEXT_TEMPLATE,
    **_WORDS,
)
LLAVA_ONEVISION = Family(
    config={
        "model_type": "llava_onevision",
        "text_config": text("qwen2"),
        "vision_config": SIGLIP | {"patch_size": 14},
        "image_token_index": "<image>",
        "video_token_index": "<video>",
        **_ONEVISION_GRIDS,
    },
    image_processor={
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": SQUARE,
        **_ONEVISION_GRIDS,
    },
    video_processor={"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SQUARE},
    processor={
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 4,
        "vision_feature_select_strategy": "full",
        "image_token": "<image>",
        "video_token": "<video>",
    },
    template=_ONEVISION_TEMPLATE,
    specials=(*CHATML, "<image>", "<video>"),
    **CHATML_ENDS,
)
