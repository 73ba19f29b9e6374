"""Gemma 3, PaliGemma 1 and 2, and Gemma 4."""

from __future__ import annotations

from dataclasses import replace

from tests.families.family import Family, Json
from tests.families.parts import HIDDEN, SIGLIP, SQUARE, content, prompt, text

_GEMMA_TEMPLATE = (
    """\
{{- bos_token }}
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content if messages[0].content is string else messages[0].content[0].text -%}
{%- set prefix = first + '\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- else -%}
{%- set prefix = '' -%}
{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- prefix if loop.first else '' }}
"""
    + content("<start_of_image>", " | trim")
    + """\
{{- '<end_of_turn>\\n' }}
{%- endfor -%}
"""
    + prompt("<start_of_turn>model\\n")
)
# PaliGemma is no chat model and has no template. Its processor wants all images first and adds bos and newline itself.
_PALIGEMMA_TEMPLATE = """\
{%- for message in messages -%}
{%- for part in message.content -%}{%- if part.type == 'image' -%}{{- '<image>' }}{%- endif -%}{%- endfor -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '' if loop.first else '\\n' }}
{%- for part in message.content -%}{%- if part.type == 'text' -%}{{- part.text }}{%- endif -%}{%- endfor -%}
{%- endfor -%}
"""
_GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
# Gemma multiplies embeddings by sqrt(HIDDEN) and shares them with the head. Unless both are made up for, the last token
# outweighs all that attention adds, and every text is one token repeated. (Norm weights count from 1.)
_GEMMA_WEIGHTS: Json = {"word_std": 0.25 / HIDDEN**0.5, "final_norm": 2 * HIDDEN**0.5 - 1}
GEMMA3 = Family(
    config={
        "model_type": "gemma3",
        "text_config": text(
            "gemma3_text",
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,  # shorter than any prompt
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=True,
        ),
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    image_processor={"image_processor_type": "Gemma3ImageProcessor", "size": SQUARE, "do_pan_and_scan": None},
    processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
    template=_GEMMA_TEMPLATE,
    specials=(*_GEMMA_TURNS, "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    named_tokens={
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    bos="<bos>",
    eos="<end_of_turn>",
    pad="<pad>",
    **_GEMMA_WEIGHTS,
)
PALIGEMMA = Family(
    config={
        "model_type": "paligemma",
        "text_config": text("gemma", head_dim=16, tie_word_embeddings=True),
        "vision_config": SIGLIP,
        "image_token_index": "<image>",
        "projection_dim": HIDDEN,
        "tie_word_embeddings": True,
    },
    image_processor={"image_processor_type": "SiglipImageProcessor", "size": SQUARE, "image_seq_length": 16},
    processor={"processor_class": "PaliGemmaProcessor"},
    template=_PALIGEMMA_TEMPLATE,
    # The processor adds the location and segmentation tokens when it loads; published embeddings have rows for them.
    specials=("<image>", *(f"<loc{i:04}>" for i in range(1024)), *(f"<seg{i:03}>" for i in range(128))),
    bos="<bos>",
    eos="<eos>",
    pad="<pad>",
    adds_bos=False,
    **_GEMMA_WEIGHTS,
)
PALIGEMMA2 = Family(
    **vars(PALIGEMMA)
    | {
        "config": PALIGEMMA.config
        | {
            "text_config": text(
                "gemma2",
                head_dim=16,
                query_pre_attn_scalar=16,
                sliding_window=4096,
                attn_logit_softcapping=50.0,
                final_logit_softcapping=30.0,
                tie_word_embeddings=True,
            )
        }
    }
)
# The last layer reuses the keys and values of the one before. Each adds embeddings of its own of the tokens.
GEMMA4 = Family(
    config={
        "model_type": "gemma4",
        "text_config": text(
            "gemma4_text",
            head_dim=16,
            global_head_dim=32,
            num_kv_shared_layers=1,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            sliding_window=8,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=512,
            tie_word_embeddings=True,
        ),
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 7,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "audio_config": None,
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "audio_token_id": "<|audio|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "boa_token_id": "<|audio>",
        "eoa_token_index": "<audio|>",
    },
    image_processor={
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 7,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 2,
        "feature_extractor_type": "Gemma4AudioFeatureExtractor",
    },
    video_processor={"video_processor_type": "Gemma4VideoProcessor", "patch_size": 7, "pooling_kernel_size": 2},
    processor={"processor_class": "Gemma4Processor", "image_seq_length": 70},
    template=_GEMMA_TEMPLATE.replace("<start_of_image>", "<|image|>"),
    specials=(*_GEMMA_TURNS, "<|image|>", "<|video|>", "<|audio|>", "<|image>", "<image|>", "<|audio>", "<audio|>"),
    named_tokens={
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    bos="<bos>",
    eos="<end_of_turn>",
    pad="<pad>",
    **_GEMMA_WEIGHTS,
)
# As those of 26B and 31B: the keys of global layers are their values, too, and tokens of an image see each other.
GEMMA4_LARGE = replace(
    GEMMA4,
    config=GEMMA4.config
    | {
        "text_config": GEMMA4.config["text_config"]
        | {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
        }
    },
)
