// Measures of the residual stream of one token a row: `stream.py` says what they are.

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensors.h"
#include "vectors.h"

namespace {

constexpr int64_t READOUTS = 9;  // of each layer

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

extern "C" AOTITorchError aoti_torch_cpu_damping(
    AtenTensorHandle mha, AtenTensorHandle ffn, AtenTensorHandle gamma, AtenTensorHandle threshold, int64_t layer,
    int64_t every, AtenTensorHandle* out) {
  Tensor first, second, scale, above;
  if (!first.look(mha) || !second.look(ffn) || !scale.look(gamma) || !above.look(threshold)) return AOTI_TORCH_FAILURE;
  if (!known(first) || !known(second) || !scale.is_float() || !scale.dense() || !above.is_float() || !above.dense())
    return AOTI_TORCH_FAILURE;
  if (first.axes != 3 || above.axes != 2 || layer >= above.sizes[1]) return AOTI_TORCH_FAILURE;
  const int64_t rows = first.sizes[0], tokens = first.sizes[1], count = first.sizes[2];
  float* to = made({rows, tokens, 3}, out);
  if (!to) return AOTI_TORCH_FAILURE;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t place = 0; place < rows * tokens; place++) {
    const int64_t row = place / tokens;
    const float most = above.of()[row * above.sizes[1] + layer];
    float* room = scratch(2 * count);
    float differs = 0;
    if (every || most < std::numeric_limits<float>::infinity())
      differs = divergence(row_of(first, place, count, room), row_of(second, place, count, room + count), count);
    const bool over = differs > most;
    to[3 * place] = over ? scale.of()[row] - 1 : 0, to[3 * place + 1] = over, to[3 * place + 2] = differs;
  }
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError aoti_torch_cpu_stream_looks(
    const AtenTensorHandle* streams, int64_t number, const AtenTensorHandle* states, int64_t layers,
    const AtenTensorHandle* gates, int64_t gated, const AtenTensorHandle* activations, int64_t active, AtenTensorHandle wanted,
    AtenTensorHandle* measures, AtenTensorHandle* stacked, AtenTensorHandle* neurons) {
  Tensor of[4 * LAYERS], state[LAYERS], gate[LAYERS], neuron[LAYERS], asked;
  if (layers < 1 || layers > LAYERS || number != 4 * layers || gated != layers || active != layers) return AOTI_TORCH_FAILURE;
  if (!look_all(streams, number, of, known) || !look_all(states, layers, state, known) ||
      !look_all(gates, gated, gate, known) || !look_all(activations, active, neuron, known) || !asked.look(wanted) || !asked.is_float() || !asked.dense())
    return AOTI_TORCH_FAILURE;
  if (of[0].axes != 3) return AOTI_TORCH_FAILURE;
  const int64_t rows = of[0].sizes[0], count = of[0].sizes[2];
  const auto alike = [&](const Tensor& one, int64_t width) {
    return one.axes == 3 && one.sizes[0] == rows && one.sizes[1] == 1 && one.sizes[2] == width;
  };
  for (int64_t one = 0; one < number; one++)
    if (!alike(of[one], count) || (one < layers && !alike(state[one], count))) return AOTI_TORCH_FAILURE;
  int64_t widest = 0;
  for (int64_t one = 0; one < layers; one++) widest = std::max(widest, neuron[one].sizes[2]);
  float *to = made({rows, layers, READOUTS}, measures), *kept = made({rows, layers, count}, stacked);
  float* fired = made({rows, layers, widest}, neurons);
  if (!to || !kept || !fired) return AOTI_TORCH_FAILURE;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t place = 0; place < rows * layers; place++) {
    const int64_t row = place / layers, layer = place % layers, wide = gate[layer].sizes[2], fires = neuron[layer].sizes[2];
    float *own = to + place * READOUTS, *on = kept + place * count, *off = fired + place * widest;
    if (asked.of()[row] == 0) {  // what nobody looks at need be nothing but numbers
      std::fill(own, own + READOUTS, 0.f), std::fill(on, on + count, 0.f), std::fill(off, off + widest, 0.f);
      continue;
    }
    float* room = scratch(std::max({4 * count, wide, fires}));
    const float* read[4];
    for (int one = 0; one < 4; one++) read[one] = row_of(of[4 * layer + one], row, count, room + one * count);
    measure(read[0], read[1], read[2], read[3], count, own);
    const float* open = row_of(gate[layer], row, wide, room);
    int64_t above = 0;
    for (int64_t at = 0; at < wide; at++) above += open[at] > 0;
    own[READOUTS - 1] = wide ? static_cast<float>(above) / wide : std::numeric_limits<float>::quiet_NaN();
    std::copy_n(row_of(state[layer], row, count, room), count, on);
    std::copy_n(row_of(neuron[layer], row, fires, room), fires, off);
    std::fill(off + fires, off + widest, 0.f);
  }
  return AOTI_TORCH_SUCCESS;
}
