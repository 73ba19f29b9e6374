// The parts of attention with one query per row.
//
// A library's matrix product would be called for a few numbers only. These loops read each key and value once for all heads
// that share it, and only the columns visible to the row. Reading dominates the time, so memory is prefetched early.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensors.h"
#include "vectors.h"

namespace {

constexpr int64_t TOGETHER = WIDTH < 16 ? 4 : 8;  // heads whose sums are kept in registers
constexpr int64_t AHEAD = 24;    // columns to prefetch ahead: reading memory takes more than half of the time
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// One row and one head of keys. query: (group, width). key: (columns, width). out: (group, stride).
template <typename Key, int group>
void scores(const float* query, const Key* key, int64_t width, int64_t columns, float* out, int64_t stride) {
  const int64_t whole = width - width % WIDTH;
  for (int64_t column = 0; column < columns; column += 2) {
    const Key* first = key + column * width;
    const Key* second = column + 1 < columns ? first + width : first;  // two independent columns at a time
    floats sums[2][group] = {};
    for (int64_t at = 0; at < 2 * width; at += WIDTH) __builtin_prefetch(first + AHEAD * width + at);
    for (int64_t at = 0; at < whole; at += WIDTH) {
      const floats left = load(first + at), right = load(second + at);
      for (int head = 0; head < group; head++) {
        const floats asked = load(query + head * width + at);
        sums[0][head] += asked * left;
        sums[1][head] += asked * right;
      }
    }
    for (int head = 0; head < group; head++) {
      float* to = out + head * stride + column;
      float sum = total(sums[0][head]), next = total(sums[1][head]);
      for (int64_t at = whole; at < width; at++) {
        sum += query[head * width + at] * one(first + at);
        next += query[head * width + at] * one(second + at);
      }
      to[0] = sum;
      if (column + 1 < columns) to[1] = next;
    }
  }
}

// One row and one head of values. weights: (group, stride). value: (columns, width). out: (group, width).
template <typename Value, int group>
void sums(const float* weights, int64_t stride, const Value* value, int64_t width, int64_t columns, float* out) {
  int64_t at = 0;
  for (; at + 2 * WIDTH <= width; at += 2 * WIDTH) {
    floats kept[group][2] = {};
    for (int64_t column = 0; column < columns; column++) {
      const Value* from = value + column * width + at;
      const floats left = load(from), right = load(from + WIDTH);
      __builtin_prefetch(from + AHEAD * width), __builtin_prefetch(from + AHEAD * width + WIDTH);
      for (int head = 0; head < group; head++) {
        const float weight = weights[head * stride + column];
        kept[head][0] += left * weight;
        kept[head][1] += right * weight;
      }
    }
    for (int head = 0; head < group; head++) {
      store(out + head * width + at, kept[head][0]);
      store(out + head * width + at + WIDTH, kept[head][1]);
    }
  }
  for (; at < width; at++) {
    for (int head = 0; head < group; head++) {
      float kept = 0;
      for (int64_t column = 0; column < columns; column++)
        kept += weights[head * stride + column] * one(value + column * width + at);
      out[head * width + at] = kept;
    }
  }
}

// Calls `call` for up to `TOGETHER` heads at a time, with their number as a compile-time constant.
template <typename Call>
void grouped(int64_t number, const Call& call) {
  for (int64_t first = 0; first < number; first += TOGETHER) {
    switch (number - first < TOGETHER ? number - first : TOGETHER) {
      case 1: call.template operator()<1>(first); break;
      case 2: call.template operator()<2>(first); break;
      case 3: call.template operator()<3>(first); break;
      case 4: call.template operator()<4>(first); break;
      case 5: call.template operator()<5>(first); break;
      case 6: call.template operator()<6>(first); break;
      case 7: call.template operator()<7>(first); break;
      default: call.template operator()<8>(first);
    }
  }
}

inline int64_t whole(int64_t columns) { return (columns + WIDTH - 1) / WIDTH * WIDTH; }

// Turns the products of a query into weights.
struct Scoring {
  float scaling, softcap;  // 0: none

  // Turns one head's products into weights in place, padded with zeros to a whole vector. gains: (columns,), or nullptr.
  // sink: a score of no column that joins the sum, or NOTHING.
  void weigh(float* row, const float* gains, float sink, int64_t columns) const {
    const int64_t stride = whole(columns);
    if (softcap > 0)
      for (int64_t at = 0; at < columns; at++) row[at] = std::tanh(row[at] * scaling / softcap) * softcap;
    const float left = softcap > 0 ? 1.f : scaling;
    for (int64_t at = columns; at < stride; at++) row[at] = NOTHING;
    floats most = floats{} + NOTHING;
    for (int64_t at = 0; at < stride; at += WIDTH) {
      floats some = load(row + at) * left;
      if (gains) {
        const int64_t known = columns - at;
        const floats gain = known < WIDTH ? load_some(gains + at, known, 0) : load(gains + at);
        some += gain * greater(some, -some);
        for (int64_t behind = known < WIDTH ? known : WIDTH; behind < WIDTH; behind++) some[behind] = NOTHING;
      }
      store(row + at, some);
      most = greater(most, some);
    }
    const float highest = std::max(greatest(most), sink);
    floats sum = {};
    for (int64_t at = 0; at < stride; at += WIDTH) {
      const floats power = exponential(load(row + at) - highest);
      store(row + at, power);
      sum += power;
    }
    const float share = 1.f / (total(sum) + std::exp(sink - highest));
    for (int64_t at = 0; at < stride; at += WIDTH) store(row + at, load(row + at) * share);
  }
};

// The sinks of all heads, if there are any.
struct Sinks {
  Tensor scores;
  bool exist = false;

  bool of(AtenTensorHandle* given, int64_t heads) {
    exist = given != nullptr;
    return !exist || (scores.look(*given) && scores.is_float() && scores.dense() && scores.count(0, scores.axes) == heads);
  }

  float operator[](int64_t head) const { return exist ? scores.of()[head] : NOTHING; }
};

// The keys or values that a row reads.
struct Reading {
  Tensor asked, pooled, positions;
  int64_t rows, kv_heads, group, width, window, most;

  // asked: (rows, heads, 1, n). pooled: (slots, kv_heads, length, width).
  bool of(AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle third, int64_t own_window) {
    if (!asked.look(first) || !pooled.look(second) || !positions.look(third)) return false;
    if (asked.axes != 4 || pooled.axes != 4 || asked.sizes[2] != 1) return false;
    rows = asked.sizes[0], kv_heads = pooled.sizes[1], width = pooled.sizes[3], window = own_window;
    group = asked.sizes[1] / kv_heads, most = pooled.sizes[2];
    return asked.dense() && asked.is_float() && group * kv_heads == asked.sizes[1] && rows <= pooled.sizes[0] &&
        pooled.strides[3] == 1 && pooled.strides[2] == width && positions.dense();
  }

  // The same for queries (rows, heads, 1, width).
  bool asks(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle third, int64_t own_window) {
    return of(query, key, third, own_window) && asked.sizes[3] == width;
  }

  // Checks values: laid out as the keys, except for their width.
  bool takes(Tensor& values, AtenTensorHandle handle) const {
    return values.look(handle) && values.axes == 4 && values.dtype == pooled.dtype && values.sizes[0] >= rows &&
        values.sizes[1] == kv_heads && values.sizes[2] >= most && values.strides[3] == 1 &&
        values.strides[2] == values.sizes[3];
  }

  int64_t end(int64_t row) const {
    const int64_t last = positions.of<const int64_t>()[row] + 1;
    return last < most ? last : most;
  }

  int64_t begin(int64_t row) const { return window > 0 && end(row) > window ? end(row) - window : 0; }

  template <typename Number>
  const Number* first(const Tensor& from, int64_t row, int64_t head) const {
    return from.of<const Number>(row) + head * from.strides[1] + begin(row) * from.sizes[3];
  }
};

// Calls `call` with each row and KV head.
template <typename Call>
void everywhere(const Reading& reading, const Call& call) {
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t at = 0; at < reading.rows * reading.kv_heads; at++) call(at / reading.kv_heads, at % reading.kv_heads);
}

// Computes the weights (group, stride) of a row and KV head, from its first visible column on. stride: at least the number
// of its columns, rounded up to whole vectors.
template <typename Key>
void weights_of(const Reading& reading, const Scoring& scoring, const Tensor* gains, const Sinks& sinks, int64_t row,
                int64_t head, int64_t stride, float* to) {
  const int64_t begin = reading.begin(row), columns = reading.end(row) - begin;
  const float* query = reading.asked.of() + (row * reading.kv_heads + head) * reading.group * reading.width;
  grouped(reading.group, [&]<int group>(int64_t first) {
    scores<Key, group>(query + first * reading.width, reading.first<Key>(reading.pooled, row, head), reading.width,
                       columns, to + first * stride, stride);
  });
  const float* own = gains ? gains->of(row) + begin : nullptr;
  for (int64_t one = 0; one < reading.group; one++)
    scoring.weigh(to + one * stride, own, sinks[head * reading.group + one], columns);
}

// Computes the sums (group, width) of a KV head's values over the visible columns, weighted by (group, stride).
template <typename Number>
void sums_of(const Reading& reading, const Tensor& values, int64_t row, int64_t head, const float* weights, int64_t stride,
             float* to) {
  const int64_t width = values.sizes[3], columns = reading.end(row) - reading.begin(row);
  const Number* first = reading.first<Number>(values, row, head);
  grouped(reading.group, [&]<int some>(int64_t one) {
    sums<Number, some>(weights + one * stride, stride, first, width, columns, to + one * width);
  });
}

}  // namespace
