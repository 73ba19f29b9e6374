"""The tokenizer of the embedded model (a small byte-level BPE trained on the corpus) and its chat template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

IMAGE_TOKEN = "<|image_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (
    "<|endoftext|>",
    TURN_START,
    TURN_END,
    VISION_START,
    VISION_END,
    "<|vision_pad|>",
    IMAGE_TOKEN,
    "<|video_pad|>",
)
# Qwen2's split, so that a digit is a token and a word keeps its leading space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen2-VL's format without its default system message. Pictures are numbered over the whole conversation, and only
# where there is more than one.
CHAT_TEMPLATE = """\
{%- set pictures = namespace(total=0, seen=0) -%}
{%- for message in messages -%}
{%- if message['content'] is not string -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{%- set pictures.total = pictures.total + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{%- set pictures.seen = pictures.seen + 1 -%}
{%- if pictures.total > 1 -%}{{- 'Picture ' + pictures.seen|string + ': ' -}}{%- endif -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def train_tokenizer(corpus: Iterable[str], size: int = 1024) -> PreTrainedTokenizerFast:
    """Train the BPE on a corpus; at most `size` tokens, and merges seen only once are left out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerFast:
    """Load a tokenizer, with the embedded model's chat template where it has none."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    return tokenizer
