// Measures of the residual stream for one token per row; see `stream.py`.

#include <algorithm>
#include <cmath>
#include <limits>

#include "counts.h"
#include "vectors.h"

namespace {

constexpr int64_t READOUTS = 9;  // per layer

template <typename Number>
void widen(const Number* from, int64_t count, float* to) {
  for (int64_t at = 0; at < count; at++) to[at] = one(from + at);
}

// Returns the numbers of a row of (..., count); numbers in half precision are converted into `place`.
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

// Calls `call` with a loader of each whole vector, then with one that pads the remainder of `count`.
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

// before, out, mha, ffn: (count,). to: (9,), of which the last stays unset.
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

namespace {

// The results of all layers for one token per row; lists are by layer.
struct Streams {
  Tensor *of, *states, *gates, *activations;
  int64_t rows, layers, count;

  bool look(const AtenTensorHandle* streams, int64_t number, const AtenTensorHandle* handed, int64_t stated,
            const AtenTensorHandle* opened, int64_t gated, const AtenTensorHandle* fired, int64_t active) {
    layers = stated;
    if (layers < 1 || number != 4 * layers || gated != layers || active != layers) return false;
    of = looked_at<0>(streams, number, known), states = looked_at<1>(handed, layers, known);
    gates = looked_at<2>(opened, layers, known), activations = looked_at<3>(fired, layers, known);
    if (!of || !states || !gates || !activations || of[0].axes != 3) return false;
    rows = of[0].sizes[0], count = of[0].sizes[2];
    for (int64_t one = 0; one < number; one++)
      if (!alike(of[one], count) || (one < layers && !alike(states[one], count))) return false;
    for (int64_t one = 0; one < layers; one++)
      if (!alike(gates[one], gates[one].sizes[2]) || !alike(activations[one], fires(one))) return false;
    return true;
  }

  bool alike(const Tensor& one, int64_t width) const {
    return one.axes == 3 && one.sizes[0] == rows && one.sizes[1] == 1 && one.sizes[2] == width;
  }

  int64_t fires(int64_t layer) const { return activations[layer].sizes[2]; }

  int64_t widest() const {
    int64_t most = 0;
    for (int64_t layer = 0; layer < layers; layer++) most = std::max(most, fires(layer));
    return most;
  }

  // Computes all readouts of a row in a layer. room: memory from `room`.
  void measures(int64_t row, int64_t layer, float* room, float* to) const {
    const int64_t wide = gates[layer].sizes[2];
    const float* read[4];
    for (int one = 0; one < 4; one++) read[one] = row_of(of[4 * layer + one], row, count, room + one * count);
    measure(read[0], read[1], read[2], read[3], count, to);
    const float* open = row_of(gates[layer], row, wide, room);
    int64_t above = 0;
    for (int64_t at = 0; at < wide; at++) above += open[at] > 0;
    to[READOUTS - 1] = wide ? static_cast<float>(above) / wide : std::numeric_limits<float>::quiet_NaN();
  }

  float* room(int64_t layer) const { return scratch(std::max({4 * count, gates[layer].sizes[2], fires(layer)})); }
};

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_stream_looks(
    const AtenTensorHandle* streams, int64_t number, const AtenTensorHandle* states, int64_t layers,
    const AtenTensorHandle* gates, int64_t gated, const AtenTensorHandle* activations, int64_t active,
    AtenTensorHandle* measures, AtenTensorHandle* stacked, AtenTensorHandle* neurons) {
  Streams read;
  if (!read.look(streams, number, states, layers, gates, gated, activations, active)) return AOTI_TORCH_FAILURE;
  const int64_t rows = read.rows, count = read.count, widest = read.widest();
  float *to = made({rows, layers, READOUTS}, measures), *kept = made({rows, layers, count}, stacked);
  float* fired = made({rows, layers, widest}, neurons);
  if (!to || !kept || !fired) return AOTI_TORCH_FAILURE;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t place = 0; place < rows * layers; place++) {
    const int64_t row = place / layers, layer = place % layers, fires = read.fires(layer);
    float *room = read.room(layer), *off = fired + place * widest;
    read.measures(row, layer, room, to + place * READOUTS);
    std::copy_n(row_of(read.states[layer], row, count, room), count, kept + place * count);
    std::copy_n(row_of(read.activations[layer], row, fires, room), fires, off);
    std::fill(off + fires, off + widest, 0.f);
  }
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError aoti_torch_cpu_count_stream(
    const AtenTensorHandle* streams, int64_t number, const AtenTensorHandle* states, int64_t layers,
    const AtenTensorHandle* gates, int64_t gated, const AtenTensorHandle* activations, int64_t firing,
    AtenTensorHandle positions, AtenTensorHandle decoded, AtenTensorHandle active, AtenTensorHandle counted,
    AtenTensorHandle sums, AtenTensorHandle neurons, AtenTensorHandle totals, AtenTensorHandle*) {
  Streams read;
  Counting counting;
  Tensor summing, summed, fired, passed;
  if (!read.look(streams, number, states, layers, gates, gated, activations, firing)) return AOTI_TORCH_FAILURE;
  if (!counting.of(positions, active, counted) || counting.rows() != read.rows) return AOTI_TORCH_FAILURE;
  const auto fits = [&](Tensor& tensor, AtenTensorHandle handle, int64_t numbers) {
    return tensor.look(handle) && tensor.dense() && tensor.is_float() && tensor.count(0, tensor.axes) == read.rows * numbers;
  };
  if (!fits(summing, decoded, 1) || !fits(summed, sums, layers * READOUTS) || !fits(passed, totals, 2 * layers * read.count))
    return AOTI_TORCH_FAILURE;
  if (!fired.look(neurons) || !fired.dense() || !fired.is_float() || fired.axes != 3 || fired.sizes[0] != read.rows ||
      fired.sizes[1] != layers || fired.sizes[2] < read.widest())
    return AOTI_TORCH_FAILURE;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t place = 0; place < read.rows * layers; place++) {
    const int64_t row = place / layers, layer = place % layers, count = read.count;
    if (!counting.counts(row)) continue;
    float *room = read.room(layer), own[READOUTS];
    if (summing.of()[row] > 0) {
      read.measures(row, layer, room, own);
      add(own, READOUTS, summed.of() + place * READOUTS);
    }
    float* total = passed.of(row) + layer * count;
    const float* state = row_of(read.states[layer], row, count, room);
    add(state, count, total);
    std::copy_n(state, count, total + layers * count);
    const float* fires = row_of(read.activations[layer], row, read.fires(layer), room);
    add(fires, read.fires(layer), fired.of() + place * fired.sizes[2]);
  }
  counting.done();
  return AOTI_TORCH_SUCCESS;
}
