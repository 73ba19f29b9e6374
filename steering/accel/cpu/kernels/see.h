// See, applied to attention weights (SAGE paper, section 5.1, equations 3 and 4); `looks.enhanced` is the torch version.

#pragma once

#include <algorithm>
#include <limits>

#include "tensors.h"

namespace {

// The factors of a row: weights on images are scaled by 1 + up, those on text by 1 - down, and all are divided by `total`.
struct Shares {
  static constexpr float LEAST = std::numeric_limits<float>::min();  // the least attention that can be divided by

  float up, down, total;

  // seen, read: a row's attention to images and to text. moving: whether the increase is taken from the text.
  Shares(float alpha, float seen, float read, bool moving) {
    const float moved = seen >= LEAST ? alpha : 0.f;
    up = moving ? moved * read / std::max(seen, LEAST) : alpha;
    down = moving ? moved : 0.f;
    total = moving ? 1.f : 1 + alpha * seen;
  }
};

// The settings of all rows in a layer.
struct Enhancement {
  Tensor masks, settings, transfer;
  int64_t layer;

  bool of(AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle third, int64_t rows, int64_t columns) {
    return masks.look(first) && settings.look(second) && transfer.look(third) && masks.is_float() && settings.is_float() &&
        masks.dense(1) && settings.dense() && transfer.dense() && masks.axes == 3 && masks.sizes[0] >= rows &&
        masks.sizes[1] >= columns && masks.sizes[2] == 2 && settings.axes == 3 && settings.sizes[0] == rows &&
        settings.sizes[2] == 4 && layer < settings.sizes[1];
  }

  // Two indicators per column: it belongs to an image; it belongs to text.
  const float* mask(int64_t row) const { return masks.of(row); }

  // fixed, start, fall, most
  const float* alpha(int64_t row) const { return settings.of() + (row * settings.sizes[1] + layer) * 4; }

  bool moving(int64_t row) const { return transfer.of<const bool>()[row]; }
};

}  // namespace
