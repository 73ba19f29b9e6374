"""Families that cut a picture into tiles of 28 pixels: InternVL, Idefics 3, Aya Vision, LFM2-VL and Llama 3.2 Vision."""

from __future__ import annotations

from tests.families.family import Family
from tests.families.parts import (
    CHATML,
    CHATML_ENDS,
    HIDDEN,
    SIGLIP,
    SQUARE,
    TILES,
    VISION,
    chatml,
    content,
    images_first,
    prompt,
    text,
)

_IDEFICS_TEMPLATE = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages -%}
{{- message.role.capitalize() + (':' if message.content[0].type == 'image' else ': ') }}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text }}
{%- elif part.type == 'image' -%}{{- '<image>' }}
{%- endif -%}
{%- endfor -%}
{{- '<end_of_utterance>\\n' }}
{%- endfor -%}
""" + prompt("Assistant:")
_AYA_TEMPLATE = (
    """\
{{- bos_token }}
{%- for message in messages -%}
{{- '<|START_OF_TURN_TOKEN|>' }}
{{- {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[message.role] }}
{{- '<|START_RESPONSE|>' if message.role == 'assistant' else '' }}
{%- if message.content is string -%}
{{- message.content }}
{%- else -%}
"""
    + images_first("<image>")
    + """\
{%- endif -%}
{{- '<|END_RESPONSE|>' if message.role == 'assistant' else '' }}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor -%}
"""
    + prompt("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>")
)
_LLAMA3_TEMPLATE = (
    """\
{{- bos_token }}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
"""
    + content("<|image|>")
    + """\
{{- '<|eot_id|>' }}
{%- endfor -%}
"""
    + prompt("<|start_header_id|>assistant<|end_header_id|>\\n\\n")
)
# Tiles of 28 pixels, four tokens each after the pixel shuffle.
INTERNVL = Family(
    config={
        "model_type": "internvl",
        "text_config": text("qwen2"),
        "vision_config": VISION | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]},
        "image_token_id": "<IMG_CONTEXT>",
        "image_seq_length": 4,
    },
    image_processor={
        "image_processor_type": "GotOcr2ImageProcessorFast",
        **TILES,
    },
    video_processor={"video_processor_type": "InternVLVideoProcessor", "size": SQUARE},
    processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    template=chatml("<IMG_CONTEXT>\\n"),
    specials=(*CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    named_tokens={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    **CHATML_ENDS,
)
# Tiles of 28 pixels, four tokens each, and one more tile for the whole image.
IDEFICS3 = Family(
    config={
        "model_type": "idefics3",
        "text_config": text("llama"),
        "vision_config": VISION,
        "scale_factor": 2,
        "image_token_id": "<image>",
    },
    image_processor={
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 56},
        "max_image_size": {"longest_edge": 28},
        "do_image_splitting": True,
    },
    processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
    template=_IDEFICS_TEMPLATE,
    specials=(
        *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
        *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
    ),
    bos="<|begin_of_text|>",
    eos="<end_of_utterance>",
    pad="<pad>",
)
# Tiles of 28 pixels, four tokens each; attention and feed-forward run in parallel.
AYA_VISION = Family(
    config={
        "model_type": "aya_vision",
        "text_config": text(
            "cohere2",
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            logit_scale=0.25,  # as CohereLabs/aya-vision-8b has it, which the wrapper does not apply
            tie_word_embeddings=True,
        ),
        "vision_config": SIGLIP,
        "image_token_index": "<|IMG_PATCH|>",
        "downsample_factor": 2,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": True,
    },
    image_processor={
        "image_processor_type": "GotOcr2ImageProcessor",
        **TILES,
    },
    processor={
        "processor_class": "AyaVisionProcessor",
        "patch_size": 7,
        "img_size": 28,
        "downsample_factor": 2,
        "image_token": "<image>",
    },
    template=_AYA_TEMPLATE,
    specials=(
        *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>"),
        *("<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<image>", "<|START_OF_IMG|>"),
        *("<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"),
    ),
    bos="<BOS_TOKEN>",
    eos="<|END_OF_TURN_TOKEN|>",
    pad="<PAD>",
)
# Most layers have short convolutions. A picture of more than 28 pixels a side is cut into tiles, and shown whole in small.
LFM2_VL = Family(
    config={
        "model_type": "lfm2_vl",
        "text_config": text(
            "lfm2",
            num_hidden_layers=4,
            full_attn_idxs=[1, 3],
            block_auto_adjust_ff_dim=False,
            conv_bias=True,
        ),
        "vision_config": VISION | {"model_type": "siglip2_vision_model", "num_patches": 16},
        "image_token_id": "<image>",
        "projector_hidden_size": HIDDEN,
        "tie_word_embeddings": False,
    },
    image_processor={
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "encoder_patch_size": 7,
        "tile_size": 28,
        "min_image_tokens": 4,
        "max_image_tokens": 9,
        "max_tiles": 4,
        "max_pixels_tolerance": 1.2,
    },
    processor={"processor_class": "Lfm2VlProcessor"},
    template="{{- bos_token }}\n" + chatml("<image>"),
    specials=(
        *CHATML,
        *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
    ),
    bos="<|startoftext|>",
    eos="<|im_end|>",
    pad="<|pad|>",
)
# Images are no tokens: some layers attend to them crosswise.
MLLAMA = Family(
    config={
        "model_type": "mllama",
        "text_config": text("mllama_text_model", num_hidden_layers=4, cross_attention_layers=[1, 3]),
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "max_num_tiles": 4,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        "image_token_index": "<|image|>",
    },
    image_processor={"image_processor_type": "MllamaImageProcessor", "size": SQUARE, "max_image_tiles": 4},
    processor={"processor_class": "MllamaProcessor"},
    template=_LLAMA3_TEMPLATE,
    specials=("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|image|>"),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    pad="<|finetune_right_pad_id|>",
    max_images=1,
)
