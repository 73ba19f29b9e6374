"""A batched training forward of Qwen2-VL over the parameters of transformers' own modules.

transformers' vision path loops over pictures and knows no branches. This one takes packed rows, compiles into one graph and
exposes the attention weights, so that they can be supervised. Its logits equal transformers' (tests/demo/test_forward.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2VLForConditionalGeneration

IMAGE_TOKENS = 9  # a picture of 84 x 84 is 6 x 6 patches, merged 2 x 2 into 3 x 3 tokens
PATCHES = 36
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
EPSILON = 1e-6


def rotate_half(x: Tensor) -> Tensor:
    """Rotate pairs of features by 90 degrees, as rotary embeddings do."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm computed in float32, in the dtype of `x`."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPSILON) * weight).to(x.dtype)


def vision_features(visual: Any, pixels: Tensor) -> Tensor:
    """Encode pixels (pictures, 36, 588) uint8, patches in merge order, to features (pictures * 9, hidden).

    The two temporal slices of a still picture are equal, so their patch weights are added instead.
    """
    count, config = pixels.shape[0], visual.config
    width, heads = config.embed_dim, config.num_heads
    head = width // heads
    device = pixels.device
    mean = torch.tensor(IMAGE_MEAN, device=device).repeat_interleave(196)
    std = torch.tensor(IMAGE_STD, device=device).repeat_interleave(196)
    weight = visual.patch_embed.proj.weight  # (width, 3, 2, 14, 14)
    x = F.linear((pixels.float() / 255 - mean) / std, weight.sum(2).reshape(width, -1)).float()

    patch = torch.arange(PATCHES, device=device)
    block, inside = patch // 4, patch % 4
    row, column = (block // 3) * 2 + inside // 2, (block % 3) * 2 + inside % 2
    inverse = 1.0 / (10000.0 ** (torch.arange(0, head // 2, 2, device=device).float() / (head // 2)))
    angle = torch.cat([row[:, None] * inverse, column[:, None] * inverse], -1).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    for block_module in visual.blocks:
        h = F.layer_norm(x, (width,), block_module.norm1.weight, block_module.norm1.bias, EPSILON)
        q, k, v = block_module.attn.qkv(h).view(count, PATCHES, 3, heads, head).permute(2, 0, 3, 1, 4)
        q = (q * cos + rotate_half(q) * sin).to(v.dtype)
        k = (k * cos + rotate_half(k) * sin).to(v.dtype)
        weights = torch.softmax((q @ k.transpose(-1, -2)).float() * head**-0.5, -1).to(v.dtype)
        x = x + block_module.attn.proj((weights @ v).transpose(1, 2).reshape(count, PATCHES, width))
        h = F.layer_norm(x, (width,), block_module.norm2.weight, block_module.norm2.bias, EPSILON)
        h = block_module.mlp.fc1(h)
        x = x + block_module.mlp.fc2(h * torch.sigmoid(1.702 * h))
    merger = visual.merger
    h = F.layer_norm(x, (width,), merger.ln_q.weight, merger.ln_q.bias, EPSILON)
    h = h.reshape(count * IMAGE_TOKENS, 4 * width)
    return merger.mlp[2](F.gelu(merger.mlp[0](h)))


def branch_mask(group: Tensor, branch: Tensor) -> Tensor:
    """Return the mask of packed rows: ids (rows, tokens) -> (rows, tokens, tokens) bool.

    A token sees its group's prefix and its own branch, causally. Branch 0 is the prefix that the branches of a group share;
    group -1 is padding, which sees only itself.
    """
    tokens = group.shape[1]
    same_group = (group[:, :, None] == group[:, None, :]) & (group[:, :, None] >= 0)
    visible = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    index = torch.arange(tokens, device=group.device)
    causal = index[:, None] >= index[None, :]
    return (same_group & visible & causal) | torch.eye(tokens, dtype=torch.bool, device=group.device)


def text_hidden(
    model: Qwen2VLForConditionalGeneration, batch: dict[str, Tensor], watched: tuple[int, ...] = ()
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Run the language model over packed rows.

    Returns every layer's output (rows, tokens, hidden), before the final norm, and, for each watched layer, its
    attention weights (rows, heads, tokens, tokens) in float32.
    """
    text, config = model.model.language_model, model.config.text_config
    rows, tokens = batch["ids"].shape
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head = config.hidden_size // heads

    x = F.embedding(batch["ids"], text.embed_tokens.weight)
    with torch.no_grad():  # the tower is frozen here
        features = vision_features(model.model.visual, batch["pixels"])
    slot = batch["slot"]  # (rows, tokens): which feature stands here, -1 for text
    x = torch.where((slot >= 0)[..., None], features[slot.clamp(min=0)].to(x.dtype), x)

    rope = config.rope_parameters
    inverse = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head, 2, device=x.device).float() / head))
    angle = batch["positions"][..., None].float() * inverse  # (3, rows, tokens, head / 2)
    angle = torch.cat([part[i % 3] for i, part in enumerate(angle.split(rope["mrope_section"], -1))], -1)
    angle = torch.cat([angle, angle], -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    bias = torch.where(branch_mask(batch["group"], batch["branch"]), 0.0, -1e4)[:, None]

    states: list[Tensor] = []
    weights_by_layer: dict[int, Tensor] = {}
    for index, layer in enumerate(text.layers):
        h = rms_norm(x, layer.input_layernorm.weight)
        attention = layer.self_attn
        q = attention.q_proj(h).view(rows, tokens, heads, head).transpose(1, 2)
        k = attention.k_proj(h).view(rows, tokens, groups, head).transpose(1, 2)
        v = attention.v_proj(h).view(rows, tokens, groups, head).transpose(1, 2)
        q = (q * cos + rotate_half(q) * sin).to(v.dtype).reshape(rows, groups, heads // groups * tokens, head)
        k = (k * cos + rotate_half(k) * sin).to(v.dtype)
        scores = (q @ k.transpose(-1, -2)).view(rows, heads, tokens, tokens).float() * head**-0.5 + bias
        weights = torch.softmax(scores, -1)
        if index in watched:
            weights_by_layer[index] = weights
        mixed = weights.to(v.dtype).view(rows, groups, heads // groups * tokens, tokens) @ v
        x = x + attention.o_proj(mixed.view(rows, heads, tokens, head).transpose(1, 2).reshape(rows, tokens, -1))
        h = rms_norm(x, layer.post_attention_layernorm.weight)
        x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(h)) * layer.mlp.up_proj(h))
        states.append(x)
    return states, weights_by_layer


def logits_at(model: Qwen2VLForConditionalGeneration, hidden: Tensor, source: Tensor) -> Tensor:
    """Return logits (len(source), vocabulary) at flat token positions."""
    text = model.model.language_model
    return F.linear(rms_norm(hidden.flatten(0, 1)[source], text.norm.weight), text.embed_tokens.weight)


def picture_loss(weights: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy of the image-attention factor over the pictures, for questions about one of several.

    Sigma as in implicit-visual-misunderstanding (section 3): mean over heads, over question and answer rows, over the tokens
    of a picture; all pictures have nine tokens, so sums do. weights (rows, heads, tokens, tokens).
    """
    pictures = F.one_hot(batch["ordinal"], 5)[..., 1:].float()  # (rows, tokens, 4)
    mass = weights.mean(1) @ pictures  # (rows, tokens, 4)
    questions = batch["target"].shape[0]
    sigma = mass.new_zeros(questions + 1, 4).index_add(0, batch["asks"].flatten(), mass.flatten(0, 1))[:questions]
    target = batch["target"]  # (questions,), -1 where no picture is the target
    share = sigma.gather(1, target.clamp(min=0)[:, None])[:, 0] / (sigma.sum(1) + 1e-9)
    mask = (target >= 0).float()
    return -(torch.log(share + 1e-6) * mask).sum() / mask.sum().clamp(min=1)


def look_loss(weights: Tensor, look: Tensor) -> Tensor:
    """Return the negative log of the mean attention of a few heads to the token to look at.

    weights (rows, heads, tokens, tokens); look (rows, tokens): a column, -1 where none is known.
    """
    column = look.clamp(min=0)[:, None, :, None].expand(-1, weights.shape[1], -1, 1)
    attention = weights.gather(-1, column)[..., 0].mean(1)  # (rows, tokens)
    mask = (look >= 0).float()
    return -(torch.log(attention + 1e-4) * mask).sum() / mask.sum().clamp(min=1)


def side_loss(model: Qwen2VLForConditionalGeneration, hidden: Tensor, side: Tensor, words: Tensor) -> Tensor:
    """Return the cross entropy of the source that an instruction names, read at its end from a middle layer's output.

    The two sources compete as words of the vocabulary would ("logit lens"): hidden (rows, tokens, hidden), side (rows,
    tokens) is an index into `words` (2,) token ids, or -1.
    """
    text = model.model.language_model
    logits = F.linear(rms_norm(hidden, text.norm.weight), text.embed_tokens.weight[words]).float()
    losses = F.cross_entropy(logits.flatten(0, 1), side.flatten(), reduction="sum", ignore_index=-1)
    return losses / (side >= 0).sum().clamp(min=1)
