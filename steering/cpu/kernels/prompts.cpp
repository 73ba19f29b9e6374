// Prefill attention; see `prompts.py`.
//
// A block of queries visits its visible columns a block at a time. Each query keeps its largest score so far and scales its
// sums down when a larger one comes (FlashAttention, Dao et al. 2022, section 3.1). Columns that no query of a tile sees are
// skipped. Sums are kept separately by the kind of column, so that applying See costs only their memory.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "see.h"

namespace {

constexpr int64_t COLUMNS = 64;  // columns per block
constexpr int64_t QUERIES = 192;  // queries, of all heads that share a key, for which keys are transposed once
constexpr int64_t SCORES = 1 << 19;  // scores of chosen queries kept at a time; always at least those of one query
#if defined(__AVX512F__)
constexpr int AT_ONCE = 12;  // queries per tile: their sums, two vectors each, stay in registers
#else
constexpr int AT_ONCE = 6;
#endif
constexpr int64_t PAIR = 2 * WIDTH;
enum Kind { VISUAL, TEXT, REST, KINDS };  // kinds of columns

int64_t rounded(int64_t numbers, int64_t to) { return (numbers + to - 1) / to * to; }
int64_t paired(int64_t numbers) { return rounded(numbers, PAIR); }

// Computes left (AT_ONCE, depth) times right (depth, 2 vectors); adds it to `to` if `added`, and otherwise overwrites `to`.
template <bool added>
void multiply(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t depth, float* to,
              int64_t to_stride) {
  floats sums[AT_ONCE][2] = {};
  if (added)
#pragma GCC unroll 16
    for (int row = 0; row < AT_ONCE; row++)
      sums[row][0] = load(to + row * to_stride), sums[row][1] = load(to + row * to_stride + WIDTH);
  for (int64_t at = 0; at < depth; at++) {
    const floats first = load(right + at * right_stride), second = load(right + at * right_stride + WIDTH);
#pragma GCC unroll 16
    for (int row = 0; row < AT_ONCE; row++) {
      const float by = left[row * left_stride + at];
      sums[row][0] += first * by, sums[row][1] += second * by;
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < AT_ONCE; row++)
    store(to + row * to_stride, sums[row][0]), store(to + row * to_stride + WIDTH, sums[row][1]);
}

struct Prompts {
  Tensor asked, keys, values, slots, starts;
  int64_t rows, kv_heads, group, length, width, padded, window;
  float scaling, softcap;
  Sinks sinks;
  const Enhancement* see = nullptr;

  Prompts(double scaling, int64_t window, double softcap)
      : window(window), scaling(static_cast<float>(scaling)), softcap(static_cast<float>(softcap)) {}

  // Enables See with these settings, which must outlive this object. Call it before `of`.
  bool under(Enhancement& how, AtenTensorHandle slots, AtenTensorHandle masks, AtenTensorHandle settings,
             AtenTensorHandle readings, int64_t layer) {
    Tensor rows;
    how.layer = layer;
    if (!rows.look(slots) || rows.axes != 1 || !how.of(masks, settings, readings, rows.sizes[0], 0)) return false;
    see = &how;
    return true;
  }

  bool of(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle first,
          AtenTensorHandle second, AtenTensorHandle* sink_scores) {
    if (!asked.look(query) || !keys.look(key) || !values.look(value) || !slots.look(first) || !starts.look(second)) return false;
    if (asked.axes != 4 || keys.axes != 4 || values.axes != 4 || slots.axes != 1 || starts.axes != 1) return false;
    rows = asked.sizes[0], length = asked.sizes[2], width = asked.sizes[3], kv_heads = keys.sizes[1];
    padded = paired(values.sizes[3]);
    if (!kv_heads || asked.sizes[1] % kv_heads || keys.sizes[3] != width || values.sizes[1] != kv_heads) return false;
    group = asked.sizes[1] / kv_heads;
    for (const Tensor* one : {&keys, &values})
      if (one->strides[3] != 1 || one->strides[2] != one->sizes[3]) return false;
    for (const Tensor* one : {&asked, &keys, &values})
      if (!one->is_float()) return false;
    for (const Tensor* one : {&slots, &starts})
      if (!one->is_number() || !one->dense() || one->sizes[0] != rows) return false;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t slot = slots.of<const int64_t>()[row], start = starts.of<const int64_t>()[row];
      const int64_t end = start + length;
      if (slot < 0 || slot >= keys.sizes[0] || slot >= values.sizes[0] || start < 0 || end > keys.sizes[2] ||
          end > values.sizes[2] || (see && end > see->masks.sizes[1]))
        return false;
    }
    return asked.dense() && sinks.of(sink_scores, kv_heads * group);
  }

  int64_t queries() const { return std::max<int64_t>(QUERIES / group, 1); }

  void run(float* out) const {
    const int64_t parts = (length + queries() - 1) / queries();
#pragma omp parallel for schedule(dynamic) num_threads(THREADS) if (THREADS > 1)
    for (int64_t at = 0; at < rows * kv_heads * parts; at++) {
      const int64_t part = parts - 1 - at / (rows * kv_heads);  // queries with the most visible columns come first
      some(at % (rows * kv_heads) / kv_heads, at % kv_heads, part * queries(), out);
    }
  }

  // Computes the block of queries from `from` on, of a row and KV head.
  void some(int64_t row, int64_t head, int64_t from, float* out) const {
    const int64_t count = std::min(queries(), length - from) * group, wide = rounded(count, AT_ONCE);
    const int64_t start = starts.of<const int64_t>()[row], slot = slots.of<const int64_t>()[row];
    const float alpha = see ? see->alpha(row)[0] : 0, *mask = alpha > 0 ? see->mask(row) : nullptr;
    const int64_t kinds = mask ? KINDS : 1;
    float* query = scratch(wide * width + (width + padded) * COLUMNS + kinds * wide * (padded + 1) + wide);
    float *turned = query + wide * width, *near = turned + width * COLUMNS, *sums = near + padded * COLUMNS;
    float *totals = sums + kinds * wide * padded, *most = totals + kinds * wide;
    for (int64_t one = 0; one < wide; one++)
      if (one < count)
        fetch(row, head, from, one, query + one * width);
      else
        std::fill_n(query + one * width, width, 0.f);
    std::fill(sums, most, 0.f), std::fill(most, most + wide, NOTHING);
    for (int64_t one = 0; one < count && sinks.exist; one++)  // as a first column without a value, of the last kind
      most[one] = sinks[head * group + one % group], totals[(kinds - 1) * wide + one] = 1;
    const float* key = keys.of(slot) + head * keys.strides[1];
    const float* value = values.of(slot) + head * values.strides[1];
    const int64_t values_width = values.sizes[3], end = start + from + count / group;
    int64_t next, column = window > 0 ? std::max<int64_t>(start + from + 1 - window, 0) : 0;
    for (; column < end; column = next) {
      next = std::min(column + COLUMNS, end);
      const Kind kind = mask ? kind_of(mask, column) : VISUAL;
      for (int64_t at = column + 1; mask && at < next; at++)
        if (kind_of(mask, at) != kind) next = at;
      const int64_t met = next - column;
      turn(key + column * width, met, turned);
      const float* here = value + column * values_width;
      if (padded != values_width) {
        for (int64_t one = 0; one < met; one++)
          for (int64_t at = 0; at < padded; at++)
            near[one * padded + at] = at < values_width ? here[one * values_width + at] : 0;
        here = near;
      }
      for (int64_t one = 0; one < count; one += AT_ONCE) {
        const int64_t first = start + from + one / group, last = start + from + (std::min(one + AT_ONCE, count) - 1) / group;
        if (last < column || (window > 0 && first - window >= next - 1)) continue;  // no query of the tile sees this block
        const int64_t reached = std::min(last + 1 - column, met);  // columns visible to the last query of the tile
        float weights[AT_ONCE * COLUMNS];
        for (int64_t at = 0; at < reached; at += PAIR)
          multiply<false>(query + one * width, width, turned + at, COLUMNS, width, weights + at, COLUMNS);
        for (int64_t own = 0; own < AT_ONCE; own++) {
          const int64_t position = start + from + (one + own) / group;
          const int64_t hidden = window > 0 ? std::max<int64_t>(position + 1 - window - column, 0) : 0;
          const int64_t seen = one + own < count ? std::min(position + 1 - column, reached) : 0;
          float* by = weights + own * COLUMNS;
          if (seen <= hidden) {
            std::fill(by, by + reached, 0.f);
            continue;
          }
          const float factor = weigh(by, hidden, seen, paired(reached), most + one + own, totals + kind * wide + one + own);
          if (factor == 1) continue;
          for (int64_t other = 0; other < kinds; other++) {
            float* sum = sums + (other * wide + one + own) * padded;
            for (int64_t at = 0; at < padded; at += WIDTH) store(sum + at, load(sum + at) * factor);
            if (other != kind) totals[other * wide + one + own] *= factor;
          }
        }
        for (int64_t at = 0; at < padded; at += PAIR)
          multiply<true>(weights, COLUMNS, here + at, padded, reached, sums + (kind * wide + one) * padded + at, padded);
      }
    }
    for (int64_t one = 0; one < count; one++) {
      const uint8_t reading = mask ? see->reading(row) : Shares::SCALE;
      write(sums + one * padded, totals + one, wide, alpha, mask ? &reading : nullptr,
            place(out, row, head, from, one, values_width));
    }
  }

  // Adds to each group the weights of a row's chosen queries, of one KV head, times their factors in the group. chosen:
  // (number,) indices of queries. counts: (groups, number) factors. to: (groups, columns).
  void gather(int64_t row, int64_t head, const int64_t* chosen, const float* counts, int64_t number, int64_t groups,
              int64_t columns, float* to) const {
    const int64_t start = starts.of<const int64_t>()[row], slot = slots.of<const int64_t>()[row];
    const float* key = keys.of(slot) + head * keys.strides[1];
    std::vector<int64_t> picks;
    for (int64_t at = 0; at < number; at++)
      if (counted(counts + at, number, groups)) picks.push_back(at);
    const int64_t together = std::max<int64_t>(std::min(QUERIES, SCORES / columns) / group, 1);
    for (size_t from = 0; from < picks.size(); from += together) {
      const int64_t some = std::min<int64_t>(together, picks.size() - from), count = some * group;
      const int64_t wide = rounded(count, AT_ONCE);
      int64_t first = length, last = 0;
      for (int64_t one = 0; one < some; one++)
        first = std::min(first, chosen[picks[from + one]]), last = std::max(last, chosen[picks[from + one]]);
      const int64_t end = start + last + 1, stride = rounded(end, COLUMNS);
      const int64_t begin = window > 0 ? std::max<int64_t>(start + first + 1 - window, 0) / COLUMNS * COLUMNS : 0;
      float *query = scratch(wide * width + width * COLUMNS + wide * stride), *turned = query + wide * width;
      float* scores = turned + width * COLUMNS;
      std::fill(query, turned, 0.f);
      for (int64_t one = 0; one < count; one++)
        fetch(row, head, chosen[picks[from + one / group]], one % group, query + one * width);
      for (int64_t column = begin; column < end; column += COLUMNS) {
        const int64_t met = std::min(COLUMNS, end - column);
        turn(key + column * width, met, turned);
        for (int64_t one = 0; one < wide; one += AT_ONCE)
          for (int64_t at = 0; at < met; at += PAIR)
            multiply<false>(query + one * width, width, turned + at, COLUMNS, width, scores + one * stride + column + at, stride);
      }
      for (int64_t one = 0; one < count; one++) {
        const int64_t pick = picks[from + one / group], seen = start + chosen[pick] + 1 - begin;
        const int64_t hidden = window > 0 ? std::max<int64_t>(seen - window, 0) : 0;
        float *by = scores + one * stride + begin, most = sinks[head * group + one % group], sum = sinks.exist;
        weigh(by, hidden, seen, paired(seen), &most, &sum);
        if (see && see->alpha(row)[0] > 0) enhance(row, begin, by, hidden, seen, sum);
        for (int64_t other = 0; other < groups; other++) {
          const float share = counts[other * number + pick] / (sum * static_cast<float>(group * kv_heads));
          float* added = to + other * columns + begin;
          if (share != 0)
            for (int64_t at = hidden; at < seen; at++) added[at] += by[at] * share;
        }
      }
    }
  }

  // Applies See to unnormalised weights; their divisor `all` stays the same. from: the column of the first weight.
  void enhance(int64_t row, int64_t from, float* weights, int64_t hidden, int64_t seen, float all) const {
    const float* mask = see->mask(row);
    float sums[KINDS] = {};
    for (int64_t at = hidden; at < seen; at++) sums[kind_of(mask, from + at)] += weights[at];
    const Shares by(see->alpha(row)[0], sums[VISUAL] / all, sums[TEXT] / all, see->reading(row));
    const float factors[KINDS] = {(1 + by.up) / by.total, (1 - by.down) / by.total, 1 / by.total};
    for (int64_t at = hidden; at < seen; at++) weights[at] *= factors[kind_of(mask, from + at)];
  }

  // Returns whether a query is in any group; one in no group is padding and may have an index out of range.
  static bool counted(const float* counts, int64_t number, int64_t groups) {
    for (int64_t one = 0; one < groups; one++)
      if (counts[one * number] != 0) return true;
    return false;
  }

  // Transposes `met` keys to (width, COLUMNS), padded with zeros to a multiple of two vectors.
  void turn(const float* key, int64_t met, float* turned) const {
    for (int64_t at = 0; at < width; at++) {
      for (int64_t one = 0; one < met; one++) turned[at * COLUMNS + one] = key[one * width + at];
      for (int64_t one = met; one < paired(met); one++) turned[at * COLUMNS + one] = 0;
    }
  }

  static Kind kind_of(const float* mask, int64_t column) {
    return mask[2 * column] > 0 ? VISUAL : mask[2 * column + 1] > 0 ? TEXT : REST;
  }

  // The place of query `one`, counted by head within query, in (rows, heads, length, width).
  template <typename Number>
  Number* place(Number* numbers, int64_t row, int64_t head, int64_t from, int64_t one, int64_t wide) const {
    return numbers + (((row * kv_heads + head) * group + one % group) * length + from + one / group) * wide;
  }

  // Copies query `one`, counted as in `place`, and scales it.
  void fetch(int64_t row, int64_t head, int64_t from, int64_t one, float* to) const {
    const float *own = place(asked.of(), row, head, from, one, width), left = softcap > 0 ? 1.f : scaling;
    for (int64_t at = 0; at < width; at++) to[at] = own[at] * left;
  }

  // Turns the scores of a query into unnormalised weights, zero in hidden columns. Returns the factor by which earlier
  // sums are to be multiplied.
  float weigh(float* scores, int64_t hidden, int64_t seen, int64_t numbers, float* most, float* sum) const {
    if (softcap > 0)
      for (int64_t at = hidden; at < seen; at++) scores[at] = std::tanh(scores[at] * scaling / softcap) * softcap;
    std::fill(scores, scores + hidden, NOTHING), std::fill(scores + seen, scores + numbers, NOTHING);
    floats largest = floats{} + *most;
    for (int64_t at = 0; at < numbers; at += WIDTH) largest = greater(largest, load(scores + at));
    const float before = *most, now = greatest(largest), from = now == NOTHING ? 0 : now;  // all may be NOTHING
    floats made = {};
    for (int64_t at = 0; at < numbers; at += WIDTH) {
      const floats power = exponential(load(scores + at) - from);
      store(scores + at, power), made += power;
    }
    const float factor = before == now ? 1.f : std::exp(before - now);
    *most = now, *sum = *sum * factor + total(made);
    return factor;
  }

  // Writes the output of a query. sums, totals: by kind, `wide` queries each. reading: nullptr without See.
  void write(const float* sums, const float* totals, int64_t wide, float alpha, const uint8_t* reading, float* to) const {
    const int64_t count = values.sizes[3];
    if (!reading) {
      for (int64_t at = 0; at < count; at++) to[at] = sums[at] / totals[0];
      return;
    }
    const float all = totals[0] + totals[wide] + totals[2 * wide];
    const Shares by(alpha, totals[0] / all, totals[wide] / all, *reading);
    const float share = 1 / (all * by.total), visual = (1 + by.up) * share, text = (1 - by.down) * share;
    for (int64_t at = 0; at < count; at++)
      to[at] = visual * sums[at] + text * sums[wide * padded + at] + share * sums[2 * wide * padded + at];
  }
};

AOTITorchError attended(Prompts& prompts, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                        AtenTensorHandle slots, AtenTensorHandle starts, AtenTensorHandle* sinks, AtenTensorHandle* out) {
  if (!prompts.of(query, key, value, slots, starts, sinks)) return AOTI_TORCH_FAILURE;
  const int64_t heads = prompts.kv_heads * prompts.group;
  float* to = made({prompts.rows, heads, prompts.length, prompts.values.sizes[3]}, out);
  if (!to) return AOTI_TORCH_FAILURE;
  prompts.run(to);
  return AOTI_TORCH_SUCCESS;
}

// Implements `grouped_prompt_weights`, with or without See.
AOTITorchError summed(Prompts& prompts, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle slots,
                      AtenTensorHandle starts, AtenTensorHandle queries, AtenTensorHandle groups, int64_t columns,
                      AtenTensorHandle* sinks, AtenTensorHandle* out) {
  Tensor chosen, counts;
  if (!prompts.of(query, key, key, slots, starts, sinks) || !chosen.look(queries) || !counts.look(groups))
    return AOTI_TORCH_FAILURE;
  if (!chosen.is_number() || !chosen.dense() || chosen.axes != 2 || !counts.is_float() || !counts.dense() || counts.axes != 3)
    return AOTI_TORCH_FAILURE;
  const int64_t rows = prompts.rows, heads = prompts.kv_heads, number = chosen.sizes[1], kinds = counts.sizes[1];
  if (chosen.sizes[0] != rows || counts.sizes[0] != rows || counts.sizes[2] != number || columns < 1)
    return AOTI_TORCH_FAILURE;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t *own = chosen.of<const int64_t>() + row * number, start = prompts.starts.of<const int64_t>()[row];
    for (int64_t at = 0; at < number; at++)
      if (Prompts::counted(counts.of() + row * kinds * number + at, number, kinds) &&
          (own[at] < 0 || own[at] >= prompts.length || start + own[at] >= columns))
        return AOTI_TORCH_FAILURE;
  }
  float* to = made({rows, kinds, columns}, out);
  if (!to) return AOTI_TORCH_FAILURE;
  const int64_t each = kinds * columns;
  std::vector<float> parts(rows * heads * each);
#pragma omp parallel for schedule(dynamic) num_threads(THREADS) if (THREADS > 1)
  for (int64_t at = 0; at < rows * heads; at++) {
    const int64_t row = at / heads;
    prompts.gather(row, at % heads, chosen.of<const int64_t>() + row * number, counts.of() + row * kinds * number, number,
                   kinds, columns, parts.data() + at * each);
  }
  std::fill(to, to + rows * each, 0.f);
  for (int64_t at = 0; at < rows * heads; at++)
    for (int64_t one = 0; one < each; one++) to[at / heads * each + one] += parts[at * each + one];
  return AOTI_TORCH_SUCCESS;
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_prompt_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle slots, AtenTensorHandle starts,
    AtenTensorHandle* sinks, double scaling, int64_t window, double softcap, AtenTensorHandle* out) {
  Prompts prompts(scaling, window, softcap);
  return attended(prompts, query, key, value, slots, starts, sinks, out);
}

extern "C" AOTITorchError aoti_torch_cpu_enhanced_prompt_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle slots, AtenTensorHandle starts,
    AtenTensorHandle masks, AtenTensorHandle settings, AtenTensorHandle readings, int64_t layer, AtenTensorHandle* sinks,
    double scaling, int64_t window, double softcap, AtenTensorHandle* out) {
  Prompts prompts(scaling, window, softcap);
  Enhancement see;
  if (!prompts.under(see, slots, masks, settings, readings, layer)) return AOTI_TORCH_FAILURE;
  return attended(prompts, query, key, value, slots, starts, sinks, out);
}

extern "C" AOTITorchError aoti_torch_cpu_grouped_prompt_weights(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle slots, AtenTensorHandle starts, AtenTensorHandle queries,
    AtenTensorHandle groups, int64_t columns, AtenTensorHandle* sinks, double scaling, int64_t window, double softcap,
    AtenTensorHandle* out) {
  Prompts prompts(scaling, window, softcap);
  return summed(prompts, query, key, slots, starts, queries, groups, columns, sinks, out);
}

extern "C" AOTITorchError aoti_torch_cpu_enhanced_grouped_prompt_weights(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle slots, AtenTensorHandle starts, AtenTensorHandle queries,
    AtenTensorHandle groups, int64_t columns, AtenTensorHandle masks, AtenTensorHandle settings, AtenTensorHandle readings,
    int64_t layer, AtenTensorHandle* sinks, double scaling, int64_t window, double softcap, AtenTensorHandle* out) {
  Prompts prompts(scaling, window, softcap);
  Enhancement see;
  if (!prompts.under(see, slots, masks, settings, readings, layer)) return AOTI_TORCH_FAILURE;
  return summed(prompts, query, key, slots, starts, queries, groups, columns, sinks, out);
}
