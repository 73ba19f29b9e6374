// Measures of the residual stream of one token a row: `stream.py` says what they are.

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensors.h"
#include "vectors.h"

namespace {

constexpr int64_t MOST = 512, READOUTS = 9;  // layers; what is measured in each

template <typename Number>
void widen(const Number* from, int64_t count, float* to) {
  for (int64_t at = 0; at < count; at++) to[at] = one(from + at);
}

// The numbers of a row of (..., count), as they are or, in half precision, written to a place.
const float* row_of(const Tensor& tensor, int64_t row, int64_t count, float* place) {
  if (tensor.is_float()) return tensor.of<float>(0) + row * count;
  if (tensor.dtype == aoti_torch_dtype_bfloat16()) widen(static_cast<const Bfloat*>(tensor.data) + row * count, count, place);
  else widen(static_cast<const Half*>(tensor.data) + row * count, count, place);
  return place;
}

bool known(const Tensor& tensor) {
  const int32_t dtype = tensor.dtype;
  return tensor.dense() &&
      (tensor.is_float() || dtype == aoti_torch_dtype_bfloat16() || dtype == aoti_torch_dtype_float16());
}

// Calls with whole vectors and with what is left of `count`, filled up.
template <typename Call>
void vectors(int64_t count, const Call& call) {
  int64_t at = 0;
  for (; at + WIDTH <= count; at += WIDTH) call([at](const float* from, float) { return load(from + at); });
  if (at < count) call([at, count](const float* from, float rest) { return load_some(from + at, count - at, rest); });
}

// KL(softmax(mha) || softmax(ffn)), in nats.
float divergence(const float* mha, const float* ffn, int64_t count) {
  constexpr float NOTHING = -std::numeric_limits<float>::max();
  floats most_mha = floats{} + NOTHING, most_ffn = most_mha;
  vectors(count, [&](const auto& some) {
    most_mha = greater(most_mha, some(mha, NOTHING)), most_ffn = greater(most_ffn, some(ffn, NOTHING));
  });
  const float high_mha = greatest(most_mha), high_ffn = greatest(most_ffn);
  floats of_mha = {}, of_ffn = {}, differs = {};
  vectors(count, [&](const auto& some) {
    const floats p = some(mha, NOTHING) - high_mha, q = some(ffn, NOTHING) - high_ffn;
    const floats power = exponential(p);
    of_mha += power, of_ffn += exponential(q);
    differs += power * (p - q);
  });
  const float sum = total(of_mha);
  return total(differs) / sum - std::log(sum) + std::log(total(of_ffn));
}

// before, out, mha, ffn: (count,). to: (9,), but for the last.
void measure(const float* before, const float* out, const float* mha, const float* ffn, int64_t count, float* to) {
  constexpr float LEAST = 1e-8f;  // as torch's cosine_similarity
  floats sums[8] = {};
  vectors(count, [&](const auto& some) {
    const floats from = some(before, 0), added = some(mha, 0), last = some(ffn, 0), end = some(out, 0);
    const floats middle = from + added, all = added + last;
    sums[0] += from * from, sums[1] += middle * middle, sums[2] += end * end, sums[3] += from * middle;
    sums[4] += middle * end, sums[5] += added * added, sums[6] += last * last, sums[7] += all * all;
  });
  float of[8];
  for (int one = 0; one < 8; one++) of[one] = total(sums[one]);
  const float from = std::sqrt(of[0]), middle = std::sqrt(of[1]), end = std::sqrt(of[2]);
  to[0] = of[3] / (std::max(from, LEAST) * std::max(middle, LEAST));
  to[1] = of[4] / (std::max(middle, LEAST) * std::max(end, LEAST));
  to[4] = std::sqrt(of[5]), to[5] = std::sqrt(of[6]), to[6] = std::sqrt(of[7]);
  to[2] = to[4] / from, to[3] = to[5] / middle;
  to[7] = divergence(mha, ffn, count);
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_divergence(AtenTensorHandle mha, AtenTensorHandle ffn, AtenTensorHandle* out) {
  Tensor first, second;
  if (!first.look(mha) || !second.look(ffn) || !known(first) || !known(second) || first.axes > 7) return AOTI_TORCH_FAILURE;
  const int64_t axes = first.axes - 1, rows = first.count(0, axes), count = first.sizes[axes];
  float* to = made(first.sizes, axes, out);
  if (!to) return AOTI_TORCH_FAILURE;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t row = 0; row < rows; row++) {
    float* place = scratch(2 * count);
    to[row] = divergence(row_of(first, row, count, place), row_of(second, row, count, place + count), count);
  }
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError aoti_torch_cpu_stream_measures(
    const AtenTensorHandle* streams, int64_t number, const AtenTensorHandle* gates, int64_t gated, AtenTensorHandle* out) {
  Tensor of[4 * MOST], gate[MOST];
  const int64_t layers = number / 4;
  if (layers < 1 || layers > MOST || number % 4 || (gated && gated != layers)) return AOTI_TORCH_FAILURE;
  for (int64_t one = 0; one < number; one++)
    if (!of[one].look(streams[one]) || !known(of[one])) return AOTI_TORCH_FAILURE;
  for (int64_t one = 0; one < gated; one++)
    if (!gate[one].look(gates[one]) || !known(gate[one])) return AOTI_TORCH_FAILURE;
  const int64_t rows = of[0].sizes[0], count = of[0].sizes[2];
  float* to = made({rows, layers, READOUTS}, out);
  if (!to) return AOTI_TORCH_FAILURE;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t place = 0; place < rows * layers; place++) {
    const int64_t row = place / layers, layer = place % layers, wide = gated ? gate[layer].sizes[2] : 0;
    float* room = scratch(std::max(4 * count, wide));
    const float* read[4];
    for (int one = 0; one < 4; one++) read[one] = row_of(of[4 * layer + one], row, count, room + one * count);
    float* own = to + place * READOUTS;
    measure(read[0], read[1], read[2], read[3], count, own);
    const float* open = gated ? row_of(gate[layer], row, wide, room) : nullptr;
    int64_t above = 0;
    for (int64_t at = 0; at < wide; at++) above += open[at] > 0;
    own[READOUTS - 1] = gated ? static_cast<float>(above) / wide : std::numeric_limits<float>::quiet_NaN();
  }
  return AOTI_TORCH_SUCCESS;
}
