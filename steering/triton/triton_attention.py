"""Decode attention over a slot's KV cache in Triton: one query a row, columns split over the GPU's processors.

Each row is divided by its own length, which is read on the device, so that one CUDA graph serves all lengths. The new key
and value are written to the cache by the same kernel. Readouts and the changes of attention that interventions make (`Bias`
and `gains` on scores, `Enhancement` of weights) are computed beside the output.

Shapes: R rows, H heads, KV key-value heads, G = H / KV, D head width, C columns of the cache, S splits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from steering.triton.attended import SCALE, TRANSFER, Attended, Bias, Enhancement

BLOCK = 32
"""Columns of one product."""
WIDEST = 512
"""Most bytes of a column; half as many columns make a product of wider ones, as most GPUs have 99 KiB for a program."""
WAVES = 2
"""Programs per GPU processor into which a short batch is split."""
LONGEST = 1024
"""Maximum columns of one split where rows alone would keep the GPU busy: a single long row must not finish last."""
MOST_SPLITS = 128


@triton.jit  # type: ignore[untyped-decorator]
def _capped(scores, softcap, has_cap: tl.constexpr):  # type: ignore[no-untyped-def]
    if has_cap:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def _extent(positions, row, length, window, has_window: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first and the end of the columns that a row reads from the cache.

    A row that writes to the cache's last column is padding of the batch and reads none.
    """
    position = tl.load(positions + row).to(tl.int32)
    end = tl.where(position == length - 1, 0, position)
    first = end * 0
    if has_window:
        first = tl.minimum(tl.maximum(position - window + 1, 0), end)
    return position, first, end


# One kernel serves every layer's bias, however that lies in memory.
@triton.jit(do_not_specialize=["by_head_row", "has_bias", "has_gains"], do_not_specialize_on_alignment=["by_head"])  # type: ignore[untyped-decorator]
def _split_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    keys,
    values,
    positions,
    by_head,
    biased,
    gains,
    masks,
    parts,
    masses,
    log_sums,
    scores_out,
    scaling,
    softcap,
    window,
    least,
    columns,
    length,
    key_row,
    key_head,
    value_row,
    value_head,
    mask_row,
    by_head_row,
    biased_row,
    has_bias,
    has_gains,
    heads: tl.constexpr,
    group: tl.constexpr,
    group_block: tl.constexpr,
    width: tl.constexpr,
    width_block: tl.constexpr,
    block: tl.constexpr,
    has_cap: tl.constexpr,
    has_window: tl.constexpr,
    adjusts: tl.constexpr,
    has_masks: tl.constexpr,
    looks: tl.constexpr,
) -> None:
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits, kv_heads = tl.num_programs(2), tl.num_programs(1)
    position, first, end = _extent(positions, row, length, window, has_window)
    split_length = tl.cdiv(tl.cdiv(end + 1 - first, splits), block) * block
    split_length = tl.maximum(split_length, least)
    begin = first + split * split_length
    stop = tl.minimum(begin + split_length, end)
    writes = (begin <= end) & (end < begin + split_length)  # the program whose part contains the new column

    member = tl.arange(0, group_block)
    head = kv_head * group + member
    at = tl.arange(0, width_block)
    in_width = at < width
    in_group = member < group
    place = row * heads + head
    queries = tl.load(
        query + place[:, None] * width + at[None, :], mask=in_group[:, None] & in_width[None, :], other=0.0
    )
    cache = (row * kv_heads + kv_head) * length * width
    bias = tl.zeros([group_block], tl.float32)
    if adjusts:  # in one kernel for both changes of scores, of which either may be missing
        bias += tl.load(by_head + row * by_head_row + head, mask=in_group & has_bias, other=0.0)
    peak = tl.full([group_block], float("-inf"), tl.float32)
    total = tl.zeros([group_block], tl.float32)
    summed = tl.zeros([group_block, width_block], tl.float32)
    visual = tl.zeros([group_block, width_block], tl.float32)
    textual = tl.zeros([group_block, width_block], tl.float32)
    image_mass = tl.zeros([group_block], tl.float32)
    read = tl.zeros([group_block], tl.float32)
    for start in range(begin, stop, block):
        column = start + tl.arange(0, block)
        inside = column < stop
        offsets = cache + column[:, None] * width + at[None, :]
        tile = inside[:, None] & in_width[None, :]
        near = tl.load(keys + offsets, mask=tile, other=0.0)
        scores = tl.dot(queries, tl.trans(near), input_precision="ieee") * scaling
        scores = _capped(scores, softcap, has_cap)
        if adjusts:
            chosen = tl.load(biased + row * biased_row + column, mask=inside & has_bias, other=0.0)
            scores += bias[:, None] * chosen[None, :]
            gain = tl.load(gains + row * columns + column, mask=inside & has_gains, other=0.0)
            scores += gain[None, :] * tl.abs(scores)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        if looks:
            tl.store(
                scores_out + place[:, None] * columns + column[None, :],
                scores,
                mask=in_group[:, None] & inside[None, :],
            )
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(peak - higher)
        value_tile = tl.load(values + offsets, mask=tile, other=0.0)
        total = total * fade + tl.sum(weights, 1)
        summed = summed * fade[:, None] + tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        if has_masks:
            image = tl.load(masks + row * mask_row + 2 * column, mask=inside, other=0.0)
            rest_mask = tl.load(masks + row * mask_row + 2 * column + 1, mask=inside, other=0.0)
            on_images, on_rest = weights * image[None, :], weights * rest_mask[None, :]
            image_mass = image_mass * fade + tl.sum(on_images, 1)
            read = read * fade + tl.sum(on_rest, 1)
            visual = visual * fade[:, None] + tl.dot(on_images.to(value_tile.dtype), value_tile, input_precision="ieee")
            textual = textual * fade[:, None] + tl.dot(on_rest.to(value_tile.dtype), value_tile, input_precision="ieee")
        peak = higher

    # The new column comes from the layer's projections, not from the cache, to which it is written here.
    new_key = tl.load(key + row * key_row + kv_head * key_head + at, mask=in_width, other=0.0)
    new_value = tl.load(value + row * value_row + kv_head * value_head + at, mask=in_width, other=0.0)
    there = cache + position * width + at
    written = at < tl.where(writes, width, 0)
    tl.store(keys + there, new_key, mask=written)
    tl.store(values + there, new_value, mask=written)
    score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scaling
    score = _capped(score, softcap, has_cap)
    if adjusts:
        score += bias * tl.load(biased + row * biased_row + position, mask=has_bias, other=0.0)
        gained = (position < columns) & has_gains
        score += tl.load(gains + row * columns + position, mask=gained, other=0.0) * tl.abs(score)
    score = tl.where(writes, score, float("-inf"))
    if looks:
        score_mask = member < tl.where(writes & (position < columns), group, 0)
        tl.store(scores_out + place * columns + position, score, mask=score_mask)
    higher = tl.maximum(peak, score)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weight, fade = tl.exp(score - level), tl.exp(peak - level)
    total = total * fade + weight
    rounded = weight.to(new_value.dtype).to(tl.float32)
    newest = new_value.to(tl.float32)[None, :]
    summed = summed * fade[:, None] + rounded[:, None] * newest
    if has_masks:
        image = tl.load(masks + row * mask_row + 2 * position)
        rest_mask = tl.load(masks + row * mask_row + 2 * position + 1)
        image_mass, read = image_mass * fade + weight * image, read * fade + weight * rest_mask
        visual = visual * fade[:, None] + (rounded * image)[:, None] * newest
        textual = textual * fade[:, None] + (rounded * rest_mask)[:, None] * newest

    has_mass = total > 0
    divisor = tl.where(has_mass, total, 1.0)
    part = place * splits + split
    log_sum = tl.where(has_mass, level + tl.log(divisor), float("-inf"))
    tl.store(log_sums + part, log_sum, mask=in_group)
    stored = in_group & has_mass
    tile = stored[:, None] & in_width[None, :]
    if has_masks:
        apart = parts + (3 * part)[:, None] * width + at[None, :]
        tl.store(apart, summed / divisor[:, None], mask=tile)
        tl.store(apart + width, visual / divisor[:, None], mask=tile)
        tl.store(apart + 2 * width, textual / divisor[:, None], mask=tile)
        tl.store(masses + 2 * part, image_mass / divisor, mask=stored)
        tl.store(masses + 2 * part + 1, read / divisor, mask=stored)
    else:
        tl.store(parts + part[:, None] * width + at[None, :], summed / divisor[:, None], mask=tile)


@triton.jit(do_not_specialize=["layer", "splits", "has_sinks"])  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    parts,
    masses,
    log_sums,
    settings,
    reading,
    out,
    row_log_sums,
    factors,
    effect,
    sinks,
    splits,
    layers,
    layer,
    tiny,
    has_sinks,
    heads: tl.constexpr,
    head_block: tl.constexpr,
    split_block: tl.constexpr,
    width: tl.constexpr,
    width_block: tl.constexpr,
    has_masks: tl.constexpr,
    see_scale: tl.constexpr,
    see_transfer: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    row, head = place // heads, (place % heads).to(tl.int32)
    split, at = tl.arange(0, split_block), tl.arange(0, width_block)
    log_sum = tl.load(log_sums + place * splits + split, mask=split < splits, other=float("-inf"))
    sink = tl.load(sinks + head, mask=(head < heads) & has_sinks, other=float("-inf")).to(tl.float32)
    peak = tl.maximum(tl.max(log_sum, 0), sink)
    share = tl.exp(log_sum - peak)
    total = tl.exp(sink - peak) + tl.sum(share, 0)
    share = share / total
    tile = ((log_sum > float("-inf"))[:, None]) & (at < width)[None, :]
    if has_masks:
        every = tl.arange(0, head_block)
        valid = (every < heads)[:, None] & (split < splits)[None, :]
        index = (row * heads + every)[:, None] * splits + split[None, :]
        sums = tl.load(log_sums + index, mask=valid, other=float("-inf"))
        valid = valid & (sums > float("-inf"))
        sink_scores = tl.load(sinks + every, mask=(every < heads) & has_sinks, other=float("-inf")).to(tl.float32)
        peaks = tl.where(every < heads, tl.maximum(tl.max(sums, 1), sink_scores), 0.0)
        shares = tl.exp(sums - peaks[:, None])
        totals = tl.exp(sink_scores - peaks) + tl.sum(shares, 1)
        shares = shares / tl.where(every < heads, totals, 1.0)[:, None]
        image_mass = tl.sum(shares * tl.load(masses + 2 * index, mask=valid, other=0.0), 1)
        read = tl.sum(shares * tl.load(masses + 2 * index + 1, mask=valid, other=0.0), 1)
        before = tl.sum(image_mass, 0) / heads
        setting = settings + (row * layers + layer) * 4
        ramp = tl.load(setting + 1) + before * tl.load(setting + 2)
        alpha = tl.load(setting) + tl.minimum(tl.maximum(ramp, 0.0), tl.load(setting + 3))
        code = tl.load(reading + row)
        moving = code == see_transfer
        moved = tl.where(image_mass >= tiny, alpha, 0.0)
        up = tl.where(moving, moved * read / tl.maximum(image_mass, tiny), alpha)
        norm = tl.where(code == see_scale, 1 + alpha * image_mass, 1.0)
        after = tl.sum(tl.where(every < heads, image_mass * (1 + up) / norm, 0.0), 0) / heads
        is_head = every == head
        own_up = tl.sum(tl.where(is_head, up, 0.0), 0)
        own_down = tl.where(moving, tl.sum(tl.where(is_head, moved, 0.0), 0), 0.0)
        own_norm = tl.sum(tl.where(is_head, norm, 0.0), 0)
        apart = parts + (place * splits + split)[:, None] * (3 * width) + at[None, :]
        plain = tl.sum(tl.load(apart, mask=tile, other=0.0) * share[:, None], 0)
        visual = tl.sum(tl.load(apart + width, mask=tile, other=0.0) * share[:, None], 0)
        textual = tl.sum(tl.load(apart + 2 * width, mask=tile, other=0.0) * share[:, None], 0)
        result = (plain + own_up * visual - own_down * textual) / own_norm
        tl.store(factors + 3 * place, own_up)
        tl.store(factors + 3 * place + 1, own_down)
        tl.store(factors + 3 * place + 2, own_norm)
        tl.store(effect + 3 * row, alpha, mask=head == 0)
        tl.store(effect + 3 * row + 1, before, mask=head == 0)
        tl.store(effect + 3 * row + 2, after, mask=head == 0)
    else:
        part = parts + (place * splits + split)[:, None] * width + at[None, :]
        result = tl.sum(tl.load(part, mask=tile, other=0.0) * share[:, None], 0)
    tl.store(out + place * width + at, result.to(out.dtype.element_ty), mask=at < width)
    tl.store(row_log_sums + place, peak + tl.log(total))


@triton.jit  # type: ignore[untyped-decorator]
def _means_kernel(  # type: ignore[no-untyped-def]
    scores, row_log_sums, positions, masks, factors, out, window, columns, length, mask_row, heads,
    block: tl.constexpr, has_window: tl.constexpr, has_masks: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    position, first, end = _extent(positions, row, length, window, has_window)
    visible = (((column >= first) & (column < end)) | (column == position)) & (column < columns)
    total = tl.zeros([block], tl.float32)
    image = tl.zeros([block], tl.float32)
    rest_mass = tl.zeros([block], tl.float32)
    if has_masks:
        image += tl.load(masks + row * mask_row + 2 * column, mask=visible, other=0.0)
        rest_mass += tl.load(masks + row * mask_row + 2 * column + 1, mask=visible, other=0.0)
    used = tl.where(tl.program_id(1) * block <= position, heads, 0)
    for head in range(0, used):
        place = row * heads + head
        score = tl.load(scores + place * columns + column, mask=visible, other=float("-inf"))
        weight = tl.exp(score - tl.load(row_log_sums + place))
        if has_masks:
            up, down = tl.load(factors + 3 * place), tl.load(factors + 3 * place + 1)
            weight = weight * (1 + up * image - down * rest_mass) / tl.load(factors + 3 * place + 2)
        total += weight
    tl.store(out + row * columns + column, total / heads, mask=column < columns)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def splits_of(programs: int, columns: int, processors: int) -> tuple[int, int]:
    """Return the number of splits of each row, and the least columns of one; `programs` would run without splits."""
    least_splits = max(triton.cdiv(WAVES * processors, programs), triton.cdiv(columns, LONGEST))
    splits = max(1, min(least_splits, triton.cdiv(columns, BLOCK), MOST_SPLITS))
    return splits, BLOCK * max(1, 12 * programs // (WAVES * processors))


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    columns: int,
    layer: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    gains: torch.Tensor | None = None,
    enhancement: Enhancement | None = None,
    looks: bool = False,
    sinks: torch.Tensor | None = None,
) -> Attended:
    """Write each row's new key and value to its column of the cache, and attend to that and all columns before it.

    query: (R, H, 1, D). key, value: (R, KV, 1, D), new. keys, values: (slots, KV, C, D), of which row i is slot i.
    positions: (R,), the column that each row writes; C - 1 for rows that pad the batch, which read nothing. columns: of
    `means` and `gains`, above every position. bias: of C columns, added to the scores. gains: (R, columns), which change
    these scores s to s + gain * |s|. sinks: (H,), scores of no column that join each denominator.
    """
    rows, heads, _, width = query.shape
    kv_heads, length = keys.shape[1:3]
    group, device, query = heads // kv_heads, query.device, query.contiguous()
    splits, least = splits_of(rows * kv_heads, length, _processors(device))
    empty = functools.partial(torch.empty, dtype=torch.float32, device=device)
    parts = empty(rows, heads, splits, 3 if enhancement else 1, width)
    log_sums, row_log_sums = empty(rows, heads, splits), empty(rows, heads)
    scores = empty(rows, heads, columns) if looks else row_log_sums
    out = torch.empty(rows, heads, width, dtype=query.dtype, device=device)
    masks, settings, reading = enhancement or (row_log_sums, row_log_sums, row_log_sums)
    by_head, biased = bias or (row_log_sums, row_log_sums)
    biased_row = biased.stride(0) if bias else 0  # of which a kernel is compiled for multiples of 16
    masses = factors = effect = row_log_sums
    if enhancement is not None:
        masses, factors, effect = empty(rows, heads, splits, 2), empty(rows, heads, 3), empty(rows, 3)
    flags = {"has_masks": enhancement is not None, "has_window": window is not None}
    width_block = max(16, triton.next_power_of_2(width))
    block = BLOCK if width_block * keys.element_size() <= WIDEST else BLOCK // 2
    with torch.cuda.device_of(query):  # otherwise kernels are launched on the first device
        _split_kernel[(rows, kv_heads, splits)](
            query, key, value, keys, values, positions, by_head, biased, row_log_sums if gains is None else gains, masks,
            parts, masses, log_sums, scores, scaling, softcap or 0.0, window or 0, least, columns, length, *key.stride()[:2],
            *value.stride()[:2], masks.stride(0), by_head.stride(0), biased_row, bias is not None, gains is not None,
            heads, group, max(16, triton.next_power_of_2(group)), width, width_block, block, has_cap=softcap is not None,
            looks=looks, adjusts=bias is not None or gains is not None, num_warps=4, num_stages=3, **flags,
        )  # fmt: skip
        _combine_kernel[(rows * heads,)](
            parts, masses, log_sums, settings, reading, out, row_log_sums, factors, effect,
            row_log_sums if sinks is None else sinks, splits, settings.shape[1], layer, torch.finfo(torch.float32).tiny,
            sinks is not None, heads, triton.next_power_of_2(heads),
            triton.next_power_of_2(splits), width, width_block, flags["has_masks"], SCALE, TRANSFER,
            num_warps=4 if splits > 8 else 2,
        )  # fmt: skip
        if not looks:
            return Attended(out, None, None if enhancement is None else effect)
        means = empty(rows, columns)
        _means_kernel[(rows, triton.cdiv(columns, 128))](
            scores, row_log_sums, positions, masks, factors, means, window or 0, columns, length, masks.stride(0), heads,
            128, num_warps=4, has_window=flags["has_window"], has_masks=flags["has_masks"],
        )  # fmt: skip
        return Attended(out, means, None if enhancement is None else effect)
