"""Families that keep a picture's proportions: GLM-4.1V and Mistral 3."""

from __future__ import annotations

from tests.families.family import Family, Json
from tests.families.parts import FRAMES, HIDDEN, LLAMA_ENDS, MROPE, PATCHES, VISION, content, prompt, text

_GLM_TEMPLATE = (
    """\
{%- macro visible(content) -%}
"""
    + content("<|begin_of_image|><|image|><|end_of_image|>", of="content")
    + """\
{%- endmacro -%}
{{- '[gMASK]<sop>' }}
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + visible(message.content) }}
{%- endfor -%}
"""
    + prompt("<|assistant|>\\n")
)
_MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- '[SYSTEM_PROMPT]' + (message.content if message.content is string else message.content[0].text) }}
{{- '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' -%}
{{- '[INST]' }}
{%- if message.content is string -%}
{{- message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text }}
{%- elif part.type in ['image', 'image_url'] -%}{{- '[IMG]' }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '[/INST]' }}
{%- else -%}
{{- (message.content if message.content is string else message.content[0].text) + eos_token }}
{%- endif -%}
{%- endfor -%}
"""
# The bounds count both frames of a temporal patch.
_GLM_SIZES: Json = {"size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 56 * 56}}
GLM4V = Family(
    config={
        "model_type": "glm4v",
        "text_config": text("glm4v_text", rope_parameters=MROPE | {"partial_rotary_factor": 1.0}),
        "vision_config": PATCHES
        | {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": HIDDEN,
            "intermediate_size": 64,
            "image_size": 56,
        },
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    },
    image_processor={"image_processor_type": "Glm4vImageProcessor"} | _GLM_SIZES | FRAMES,
    video_processor={"video_processor_type": "Glm4vVideoProcessor"} | _GLM_SIZES | FRAMES,
    processor={"processor_class": "Glm4vProcessor"},
    template=_GLM_TEMPLATE,
    specials=(
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|video|>"),
        *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    ),
    eos="<|user|>",
    pad="<|endoftext|>",
)
MISTRAL3 = Family(
    config={
        "model_type": "mistral3",
        "text_config": text("mistral", head_dim=16, sliding_window=None),
        "vision_config": VISION | {"model_type": "pixtral", "image_size": 56, "head_dim": 16},
        "image_token_index": "[IMG]",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    },
    image_processor={
        "image_processor_type": "PixtralImageProcessorFast",
        "size": {"longest_edge": 56},
        "patch_size": {"height": 7, "width": 7},
    },
    processor={
        "processor_class": "PixtralProcessor",
        "patch_size": 7,
        "spatial_merge_size": 2,
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    },
    template=_MISTRAL_TEMPLATE,
    specials=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    **LLAMA_ENDS,
)
