// Linear layers with weights packed in blocks; see `linear.py`.
//
// A block of weights stays in cache while all rows go through it, and the sums of a few rows are kept in registers. With one
// row, reading the weights dominates the time; with many rows, multiplying does.

#include "tensors.h"
#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 16;  // outputs per block
constexpr int VECTORS = BLOCK / WIDTH;

// Up to MOST rows are computed at once, more in parts of PART; `blocks_of` is the number of blocks at once. The sums stay in
// registers, of which a processor has 32 of the widest vectors and 16 of others. More sums mean fewer loads for each.
#if defined(__AVX512F__)
constexpr int MOST = 10, PART = 6;
constexpr int blocks_of(int rows) { return rows > PART ? 2 : rows > 1 ? 4 : 6; }
#else
constexpr int MOST = 12 / VECTORS, PART = MOST;
constexpr int blocks_of(int rows) { return rows > 2 ? 1 : 8 / (rows * VECTORS); }
#endif

constexpr int64_t FEW = 18;  // with more rows, weights in half precision are converted to float32 once

// states: (rows, width), with a stride. weights: (blocks, width, 16). sums: (rows, blocks, 16).
template <int rows, int blocks, typename Number>
void products(const float* states, int64_t stride, const Number* weights, int64_t width, floats (&sums)[rows][blocks * VECTORS]) {
  for (int64_t at = 0; at < width; at++) {
    floats read[blocks * VECTORS];
#pragma GCC unroll 16
    for (int one = 0; one < blocks * VECTORS; one++) {
      const Number* from = weights + (one / VECTORS * width + at) * BLOCK + one % VECTORS * WIDTH;
      if (rows > 1 && one % VECTORS == 0) __builtin_prefetch(from + blocks * width * BLOCK);  // the next blocks
      read[one] = load(from);
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 16
      for (int one = 0; one < blocks * VECTORS; one++) sums[row][one] += read[one] * states[row * stride + at];
  }
}

struct Layer {
  const float *states, *bias;
  int64_t rows, width, outputs;
  float* out;

  // Computes `rows` rows from `row` on for `blocks` blocks from `block` on, whose weights are given.
  template <int rows, int blocks, typename Number>
  [[gnu::noinline]] void part(int64_t row, int64_t block, const Number* weights) const {
    floats sums[rows][blocks * VECTORS];
    for (int one = 0; one < blocks * VECTORS; one++) {
      const int64_t first = block * BLOCK + one * WIDTH, some = outputs - first;
      const floats begun = !bias || some <= 0 ? floats{} : some < WIDTH ? load_some(bias + first, some, 0) : load(bias + first);
      for (int own = 0; own < rows; own++) sums[own][one] = begun;
    }
    products<rows, blocks>(states + row * width, width, weights, width, sums);
    for (int own = 0; own < rows; own++) {
      for (int one = 0; one < blocks * VECTORS; one++) {
        const int64_t first = block * BLOCK + one * WIDTH, some = outputs - first;
        float* to = out + (row + own) * outputs + first;
        if (some >= WIDTH) store(to, sums[own][one]);
        else if (some > 0) store_some(to, sums[own][one], some);
      }
    }
  }

  // Computes `rows` rows for the blocks from `first` to `end`, whose weights are given.
  template <int rows, typename Number>
  void of_blocks(int64_t row, int64_t first, int64_t end, const Number* weights) const {
    constexpr int together = blocks_of(rows);
    int64_t block = first;
    const auto of = [&] { return weights + (block - first) * width * BLOCK; };
    for (; block + together <= end; block += together) part<rows, together>(row, block, of());
    for (; block < end; block++) part<rows, 1>(row, block, of());
  }

  template <int rows = MOST, typename Number>
  void some_rows(int64_t number, int64_t row, int64_t first, int64_t end, const Number* weights) const {
    if constexpr (rows > 1) {
      if (number < rows) return some_rows<rows - 1>(number, row, first, end, weights);
    }
    of_blocks<rows>(row, first, end, weights);
  }

  template <typename Number>
  void all_rows(int64_t first, int64_t end, const Number* weights) const {
    const int64_t parts = rows <= MOST ? 1 : (rows + PART - 1) / PART;
    for (int64_t part = 0; part < parts; part++) {  // parts of about equal size
      const int64_t row = rows * part / parts;
      some_rows(rows * (part + 1) / parts - row, row, first, end, weights);
    }
  }

  template <typename Number>
  void run(const Number* weights) const {
    if (!rows) return;
    const int64_t blocks = (outputs + BLOCK - 1) / BLOCK, share = (blocks + THREADS - 1) / THREADS;
    // The number of blocks that stay in cache together when not all rows are computed at once.
    const int64_t near = rows <= MOST ? share : blocks_of(PART);
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
    for (int64_t first = 0; first < blocks; first += near) {
      const int64_t end = first + near < blocks ? first + near : blocks, numbers = (end - first) * width * BLOCK;
      const Number* own = weights + first * width * BLOCK;
      if (std::is_same_v<Number, float> || rows <= FEW) {
        all_rows(first, end, own);
      } else {
        float* wide = scratch(numbers);
        for (int64_t at = 0; at < numbers; at += WIDTH) store(wide + at, load(own + at));
        all_rows(first, end, wide);
      }
    }
  }
};

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_packed_linear(
    AtenTensorHandle states, AtenTensorHandle weights, AtenTensorHandle* bias, int64_t outputs, AtenTensorHandle* out) {
  Tensor given, packed, added;
  if (!given.look(states) || !packed.look(weights) || (bias && !added.look(*bias))) return AOTI_TORCH_FAILURE;
  const int64_t width = packed.sizes[1], blocks = (outputs + BLOCK - 1) / BLOCK, axes = given.axes;
  const bool fits = axes > 0 && axes < 8 && given.sizes[axes - 1] == width && packed.sizes[0] == blocks;
  const bool laid = given.dense() && packed.dense() && added.dense() && packed.sizes[2] == BLOCK;
  if (!fits || !laid || !given.is_float() || (bias && !added.is_float())) return AOTI_TORCH_FAILURE;
  int64_t sizes[8];
  for (int64_t axis = 0; axis < axes; axis++) sizes[axis] = axis < axes - 1 ? given.sizes[axis] : outputs;
  float* to = made(sizes, axes, out);
  if (!to) return AOTI_TORCH_FAILURE;
  const Layer layer{given.of(), bias ? added.of() : nullptr, given.count(0, axes - 1), width, outputs, to};
  return typed(packed.dtype, [&]<typename Number>() { layer.run(packed.of<const Number>()); }) ? AOTI_TORCH_SUCCESS
                                                                                            : AOTI_TORCH_FAILURE;
}
