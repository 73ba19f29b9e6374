// The rows of a decode step that are counted; `counts.py` describes the arguments.

#pragma once

#include "tensors.h"

inline void add(const float* from, int64_t count, float* to) {
  for (int64_t at = 0; at < count; at++) to[at] += from[at];
}

struct Counting {
  Tensor positions, active, counted;

  bool of(AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle third) {
    return positions.look(first) && active.look(second) && counted.look(third) && positions.dense() && active.dense() &&
        counted.dense() && active.is_float() && active.axes && active.sizes[0] == rows() && counted.is_number() &&
        positions.is_number() && counted.axes == 1 && counted.sizes[0] == rows() && positions.axes == 1;
  }

  int64_t rows() const { return positions.sizes[0]; }
  int64_t position(int64_t row) const { return positions.of<int64_t>()[row]; }
  bool counts(int64_t row) const { return active.of()[row] > 0 && position(row) > counted.of<int64_t>()[row]; }

  void done() const {
    for (int64_t row = 0; row < rows(); row++)
      if (counts(row)) counted.of<int64_t>()[row] = position(row);
  }

  // Returns whether a tensor with its columns on `axis` has room for the positions that are written.
  bool fits(const Tensor& tensor, int64_t axis) const {
    if (tensor.axes <= axis || !tensor.dense() || !tensor.is_float() || tensor.sizes[0] != rows()) return false;
    for (int64_t row = 0; row < rows(); row++)
      if (position(row) < 0 || position(row) >= tensor.sizes[axis]) return false;
    return true;
  }
};
