"""Parts that many families' configs and chat templates have in common."""

from __future__ import annotations

from typing import Any

from tests.families.family import Json

HIDDEN = 64
LAYERS = 3


def text(model_type: str, **more: Any) -> Json:
    """Return the config of a small text model with grouped-query attention; building fills in vocabulary and token ids."""
    base: Json = {
        "model_type": model_type,
        "vocab_size": None,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return base | more


VISION: Json = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
CLIP = VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
PATCHES: Json = {"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_heads": 2}
FRAMES: Json = {"patch_size": 7, "merge_size": 2, "temporal_patch_size": 2}
"""The same as PATCHES, in the words of a processor."""
MROPE: Json = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
SQUARE: Json = {"height": 28, "width": 28}
TILES: Json = {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
"""Options of an image processor that cuts pictures into up to four tiles of 28 pixels."""

CHATML = ("<|im_start|>", "<|im_end|>")
CHATML_ENDS: Json = {"eos": "<|im_end|>", "pad": "<|endoftext|>"}
LLAMA_ENDS: Json = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}


def content(image: str, trim: str = "", of: str = "message.content") -> str:
    """Jinja for a message's content, text as it is or parts in their order; `image` stands for each picture."""
    return f"""\
{{%- if {of} is string -%}}
{{{{- {of}{trim} }}}}
{{%- else -%}}
{{%- for part in {of} -%}}
{{%- if part.type == 'image' -%}}{{{{- '{image}' }}}}
{{%- elif part.type == 'text' -%}}{{{{- part.text{trim} }}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- endif -%}}
"""


def images_first(image: str, text: str = "part.text") -> str:
    """Jinja for a content whose pictures are moved before its texts; `text` is the expression for each of those."""
    return f"""\
{{%- for part in message.content | selectattr('type', 'equalto', 'image') -%}}{{{{- '{image}' }}}}{{%- endfor -%}}
{{%- for part in message.content | selectattr('type', 'equalto', 'text') -%}}{{{{- {text} }}}}{{%- endfor -%}}
"""


def prompt(words: str) -> str:
    """Jinja for what stands where the answer begins."""
    return f"{{%- if add_generation_prompt -%}}{{{{- '{words}' }}}}{{%- endif -%}}\n"


def chatml(image: str) -> str:
    """Return the chat template of ChatML, whose turns begin and end with a special token each."""
    begin = "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' }}\n"
    end = "{{- '<|im_end|>\\n' }}{%- endfor -%}\n"
    return begin + content(image) + end + prompt("<|im_start|>assistant\\n")
