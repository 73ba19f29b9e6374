// Attention of prompts: `prompts.py` says what it is.
//
// Some queries meet the columns that they see, some at a time, and keep the largest score so far, by which what they have
// summed is made smaller where a larger one comes (FlashAttention, Dao et al. 2022, section 3.1). What no query of a few
// sees is not computed. Sums are kept apart by what a column is, so that See's shares of them cost nothing but their places.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "see.h"

namespace {

constexpr int64_t COLUMNS = 64;  // that are met at once
constexpr int64_t QUERIES = 192;  // for which keys are turned once, of all heads that share them
constexpr int64_t SCORES = 1 << 19;  // of chosen queries that are kept at a time, where that is not less than a query's
#if defined(__AVX512F__)
constexpr int AT_ONCE = 12;  // queries whose sums are in registers, two vectors each
#else
constexpr int AT_ONCE = 6;
#endif
constexpr int64_t PAIR = 2 * WIDTH;
enum Kind { VISUAL, TEXT, REST, KINDS };  // of columns

int64_t rounded(int64_t numbers, int64_t to) { return (numbers + to - 1) / to * to; }
int64_t paired(int64_t numbers) { return rounded(numbers, PAIR); }

// Adds left (AT_ONCE, depth) times right (depth, 2 vectors) to what is there, or takes its place.
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
  const Enhancement* see = nullptr;

  Prompts(double scaling, int64_t window, double softcap)
      : window(window), scaling(static_cast<float>(scaling)), softcap(static_cast<float>(softcap)) {}

  // Before `of`: attention is enhanced, as settings say, which must stay.
  bool under(Enhancement& how, AtenTensorHandle slots, AtenTensorHandle masks, AtenTensorHandle settings,
             AtenTensorHandle transfer, int64_t layer) {
    Tensor rows;
    how.layer = layer;
    if (!rows.look(slots) || rows.axes != 1 || !how.of(masks, settings, transfer, rows.sizes[0], 0)) return false;
    see = &how;
    return true;
  }

  bool of(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle first,
          AtenTensorHandle second) {
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
    return asked.dense();
  }

  int64_t queries() const { return std::max<int64_t>(QUERIES / group, 1); }

  void run(float* out) const {
    const int64_t parts = (length + queries() - 1) / queries();
#pragma omp parallel for schedule(dynamic) num_threads(THREADS) if (THREADS > 1)
    for (int64_t at = 0; at < rows * kv_heads * parts; at++) {
      const int64_t part = parts - 1 - at / (rows * kv_heads);  // those that see most come first
      some(at % (rows * kv_heads) / kv_heads, at % kv_heads, part * queries(), out);
    }
  }

  // Some queries of a row, from one on, of a head of keys.
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
        if (last < column || (window > 0 && first - window >= next - 1)) continue;  // none of them sees any
        const int64_t reached = std::min(last + 1 - column, met);  // by the last of them
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
      const bool moving = mask && see->moving(row);
      write(sums + one * padded, totals + one, wide, alpha, mask ? &moving : nullptr,
            place(out, row, head, from, one, values_width));
    }
  }

  // Adds, for each of some groups, what a head of keys' queries of a row have for each column: weights times what a query
  // counts in the group. chosen: (number,), which queries. counts: (groups, number). to: (groups, columns).
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
        float *by = scores + one * stride + begin, most = NOTHING, sum = 0;
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

  // Weights as See makes them, all but for what they are divided by, which stays. from: the first one's column.
  void enhance(int64_t row, int64_t from, float* weights, int64_t hidden, int64_t seen, float all) const {
    const float* mask = see->mask(row);
    float sums[KINDS] = {};
    for (int64_t at = hidden; at < seen; at++) sums[kind_of(mask, from + at)] += weights[at];
    const Shares by(see->alpha(row)[0], sums[VISUAL] / all, sums[TEXT] / all, see->moving(row));
    const float factors[KINDS] = {(1 + by.up) / by.total, (1 - by.down) / by.total, 1 / by.total};
    for (int64_t at = hidden; at < seen; at++) weights[at] *= factors[kind_of(mask, from + at)];
  }

  // Whether a query is in some group; one that is in none may be behind what there is.
  static bool counted(const float* counts, int64_t number, int64_t groups) {
    for (int64_t one = 0; one < groups; one++)
      if (counts[one * number] != 0) return true;
    return false;
  }

  // Some keys, column by column, as rows of a number of each: (width, COLUMNS), up to a multiple of what is read at once.
  void turn(const float* key, int64_t met, float* turned) const {
    for (int64_t at = 0; at < width; at++) {
      for (int64_t one = 0; one < met; one++) turned[at * COLUMNS + one] = key[one * width + at];
      for (int64_t one = met; one < paired(met); one++) turned[at * COLUMNS + one] = 0;
    }
  }

  static Kind kind_of(const float* mask, int64_t column) {
    return mask[2 * column] > 0 ? VISUAL : mask[2 * column + 1] > 0 ? TEXT : REST;
  }

  // Where a query, counted by head within query, lies in (rows, heads, length, width).
  template <typename Number>
  Number* place(Number* numbers, int64_t row, int64_t head, int64_t from, int64_t one, int64_t wide) const {
    return numbers + (((row * kv_heads + head) * group + one % group) * length + from + one / group) * wide;
  }

  // A query, as `place` counts them, of which scores are made.
  void fetch(int64_t row, int64_t head, int64_t from, int64_t one, float* to) const {
    const float *own = place(asked.of(), row, head, from, one, width), left = softcap > 0 ? 1.f : scaling;
    for (int64_t at = 0; at < width; at++) to[at] = own[at] * left;
  }

  // Scores of a query become weights, but for what all are divided by; zeros where it does not see. Returns by what earlier
  // ones are to be multiplied.
  float weigh(float* scores, int64_t hidden, int64_t seen, int64_t numbers, float* most, float* sum) const {
    if (softcap > 0)
      for (int64_t at = hidden; at < seen; at++) scores[at] = std::tanh(scores[at] * scaling / softcap) * softcap;
    std::fill(scores, scores + hidden, NOTHING), std::fill(scores + seen, scores + numbers, NOTHING);
    floats largest = floats{} + *most;
    for (int64_t at = 0; at < numbers; at += WIDTH) largest = greater(largest, load(scores + at));
    const float before = *most, now = greatest(largest), from = now == NOTHING ? 0 : now;  // of those so far, all may be that
    floats made = {};
    for (int64_t at = 0; at < numbers; at += WIDTH) {
      const floats power = exponential(load(scores + at) - from);
      store(scores + at, power), made += power;
    }
    const float factor = before == now ? 1.f : std::exp(before - now);
    *most = now, *sum = *sum * factor + total(made);
    return factor;
  }

  // A query's output. sums, totals: of each kind, `wide` queries behind one another; moving: nullptr where it is not enhanced.
  void write(const float* sums, const float* totals, int64_t wide, float alpha, const bool* moving, float* to) const {
    const int64_t count = values.sizes[3];
    if (!moving) {
      for (int64_t at = 0; at < count; at++) to[at] = sums[at] / totals[0];
      return;
    }
    const float all = totals[0] + totals[wide] + totals[2 * wide];
    const Shares by(alpha, totals[0] / all, totals[wide] / all, *moving);
    const float share = 1 / (all * by.total), visual = (1 + by.up) * share, text = (1 - by.down) * share;
    for (int64_t at = 0; at < count; at++)
      to[at] = visual * sums[at] + text * sums[wide * padded + at] + share * sums[2 * wide * padded + at];
  }
};

AOTITorchError attended(Prompts& prompts, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                        AtenTensorHandle slots, AtenTensorHandle starts, AtenTensorHandle* out) {
  if (!prompts.of(query, key, value, slots, starts)) return AOTI_TORCH_FAILURE;
  const int64_t heads = prompts.kv_heads * prompts.group;
  float* to = made({prompts.rows, heads, prompts.length, prompts.values.sizes[3]}, out);
  if (!to) return AOTI_TORCH_FAILURE;
  prompts.run(to);
  return AOTI_TORCH_SUCCESS;
}

// What `grouped_prompt_weights` says, or the same under See.
AOTITorchError summed(Prompts& prompts, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle slots,
                      AtenTensorHandle starts, AtenTensorHandle queries, AtenTensorHandle groups, int64_t columns,
                      AtenTensorHandle* out) {
  Tensor chosen, counts;
  if (!prompts.of(query, key, key, slots, starts) || !chosen.look(queries) || !counts.look(groups)) return AOTI_TORCH_FAILURE;
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
    double scaling, int64_t window, double softcap, AtenTensorHandle* out) {
  Prompts prompts(scaling, window, softcap);
  return attended(prompts, query, key, value, slots, starts, out);
}

extern "C" AOTITorchError aoti_torch_cpu_enhanced_prompt_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle slots, AtenTensorHandle starts,
    AtenTensorHandle masks, AtenTensorHandle settings, AtenTensorHandle transfer, int64_t layer, double scaling,
    int64_t window, double softcap, AtenTensorHandle* out) {
  Prompts prompts(scaling, window, softcap);
  Enhancement see;
  if (!prompts.under(see, slots, masks, settings, transfer, layer)) return AOTI_TORCH_FAILURE;
  return attended(prompts, query, key, value, slots, starts, out);
}

extern "C" AOTITorchError aoti_torch_cpu_grouped_prompt_weights(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle slots, AtenTensorHandle starts, AtenTensorHandle queries,
    AtenTensorHandle groups, int64_t columns, double scaling, int64_t window, double softcap, AtenTensorHandle* out) {
  Prompts prompts(scaling, window, softcap);
  return summed(prompts, query, key, slots, starts, queries, groups, columns, out);
}

extern "C" AOTITorchError aoti_torch_cpu_enhanced_grouped_prompt_weights(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle slots, AtenTensorHandle starts, AtenTensorHandle queries,
    AtenTensorHandle groups, int64_t columns, AtenTensorHandle masks, AtenTensorHandle settings, AtenTensorHandle transfer,
    int64_t layer, double scaling, int64_t window, double softcap, AtenTensorHandle* out) {
  Prompts prompts(scaling, window, softcap);
  Enhancement see;
  if (!prompts.under(see, slots, masks, settings, transfer, layer)) return AOTI_TORCH_FAILURE;
  return summed(prompts, query, key, slots, starts, queries, groups, columns, out);
}
