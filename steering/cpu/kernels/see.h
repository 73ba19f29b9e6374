// See, applied to attention weights (SAGE paper, section 5.1, equations 3 and 4); `looks.enhanced` is the torch version.

#pragma once

#include <algorithm>
#include <limits>

#include "tensors.h"

namespace {

// The factors of a row: weights on images are scaled by 1 + up, those on text by 1 - down, and all are divided by `total`.
struct Shares {
  enum Reading : uint8_t { SCALE, TRANSFER, ADD };  // the codes of `interventions.see`
  static constexpr float LEAST = std::numeric_limits<float>::min();  // the least attention that can be divided by

  float up, down, total;

  // seen, read: a row's attention to images and to text.
  Shares(float alpha, float seen, float read, uint8_t reading) {
    const bool moving = reading == TRANSFER;
    const float moved = seen >= LEAST ? alpha : 0.f;
    up = moving ? moved * read / std::max(seen, LEAST) : alpha;
    down = moving ? moved : 0.f;
    total = reading == SCALE ? 1 + alpha * seen : 1.f;
  }
};

// The settings of all rows in a layer.
struct Enhancement {
  Tensor masks, settings, readings;
  int64_t layer;

  bool of(AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle third, int64_t rows, int64_t columns) {
    return masks.look(first) && settings.look(second) && readings.look(third) && masks.is_float() && settings.is_float() &&
        readings.dtype == aoti_torch_dtype_uint8() &&
        masks.dense(1) && settings.dense() && readings.dense() && masks.axes == 3 && masks.sizes[0] >= rows &&
        masks.sizes[1] >= columns && masks.sizes[2] == 2 && settings.axes == 3 && settings.sizes[0] == rows &&
        settings.sizes[2] == 4 && layer < settings.sizes[1];
  }

  // Two indicators per column: it belongs to an image; it belongs to text.
  const float* mask(int64_t row) const { return masks.of(row); }

  // fixed, start, fall, most
  const float* alpha(int64_t row) const { return settings.of() + (row * settings.sizes[1] + layer) * 4; }

  uint8_t reading(int64_t row) const { return readings.of<const uint8_t>()[row]; }
};

}  // namespace
