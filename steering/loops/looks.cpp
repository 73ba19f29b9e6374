// What is read of a decode's attention weights, and what See makes of them: `looks.py` says what they are.

#include <algorithm>

#include "tensors.h"
#include "vectors.h"

namespace {

constexpr int64_t MOST = 512;  // layers

bool look_all(const AtenTensorHandle* handles, int64_t count, Tensor* tensors) {
  for (int64_t one = 0; one < count; one++)
    if (!tensors[one].look(handles[one]) || !tensors[one].dense() || !tensors[one].is_float()) return false;
  return count > 0;
}

// weights: (heads, columns). to: (columns,), the mean over heads.
void mean(const float* weights, int64_t heads, int64_t columns, float* to) {
  const float share = 1.f / heads;
  int64_t at = 0;
  for (; at + WIDTH <= columns; at += WIDTH) {
    floats sum = load(weights + at);
    for (int64_t head = 1; head < heads; head++) sum += load(weights + head * columns + at);
    store(to + at, sum * share);
  }
  for (; at < columns; at++) {
    float sum = 0;
    for (int64_t head = 0; head < heads; head++) sum += weights[head * columns + at];
    to[at] = sum * share;
  }
}

// Of some weights, those on the columns of two masks. weights, visual, text: (columns,), with room for whole vectors.
struct Masses {
  float seen, read;

  Masses(const float* weights, const float* visual, const float* text, int64_t columns) {
    floats on_images = {}, on_text = {};
    int64_t at = 0;
    for (; at + WIDTH <= columns; at += WIDTH) {
      const floats some = load(weights + at);
      on_images += some * load(visual + at);
      on_text += some * load(text + at);
    }
    seen = total(on_images), read = total(on_text);
    for (; at < columns; at++) seen += weights[at] * visual[at], read += weights[at] * text[at];
  }
};

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_attention_looks(
    const AtenTensorHandle* weights, int64_t layers, AtenTensorHandle spans, AtenTensorHandle* means, AtenTensorHandle* sums) {
  Tensor read[MOST], of_spans;
  if (layers > MOST || !look_all(weights, layers, read) || !of_spans.look(spans)) return AOTI_TORCH_FAILURE;
  const int64_t rows = read[0].sizes[0], heads = read[0].sizes[1], columns = read[0].sizes[2], kinds = of_spans.sizes[2];
  if (!of_spans.dense(1) || !of_spans.is_float() || of_spans.sizes[1] < columns) return AOTI_TORCH_FAILURE;
  float *mean_to = made({rows, layers, columns}, means), *sum_to = made({rows, layers, kinds}, sums);
  if (!mean_to || !sum_to) return AOTI_TORCH_FAILURE;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t place = 0; place < rows * layers; place++) {
    const int64_t row = place / layers, layer = place % layers;
    float *to = mean_to + place * columns, *sum = sum_to + place * kinds;
    mean(read[layer].of() + row * heads * columns, heads, columns, to);
    std::fill(sum, sum + kinds, 0.f);
    const float* kind = of_spans.of(row);
    for (int64_t column = 0; column < columns; column++, kind += kinds)
      for (int64_t one = 0; one < kinds; one++) sum[one] += to[column] * kind[one];
  }
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError aoti_torch_cpu_enhanced(
    AtenTensorHandle weights, AtenTensorHandle masks, AtenTensorHandle settings, AtenTensorHandle transfer, int64_t layer,
    double least, AtenTensorHandle* out, AtenTensorHandle* measured) {
  Tensor given, masked, set, moves;
  if (!given.look(weights) || !masked.look(masks) || !set.look(settings) || !moves.look(transfer)) return AOTI_TORCH_FAILURE;
  const int64_t rows = given.sizes[0], heads = given.sizes[1], columns = given.sizes[3], layers = set.sizes[1];
  if (!given.dense() || !set.dense() || !masked.dense(1) || !moves.dense()) return AOTI_TORCH_FAILURE;
  if (!given.is_float() || !set.is_float() || !masked.is_float() || masked.sizes[1] < columns) return AOTI_TORCH_FAILURE;
  float *to = made({rows, heads, 1, columns}, out), *told = made({rows, 3}, measured);
  if (!to || !told) return AOTI_TORCH_FAILURE;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t row = 0; row < rows; row++) {
    const float *own = given.of() + row * heads * columns, *mask = masked.of(row);
    const float *here = set.of() + (row * layers + layer) * 4, fixed = here[0], start = here[1], fall = here[2], most = here[3];
    float *visual = scratch(2 * (columns + heads)), *text = visual + columns, *seen = text + columns, *read = seen + heads;
    for (int64_t column = 0; column < columns; column++)
      visual[column] = mask[2 * column], text[column] = mask[2 * column + 1];
    float decay = 0;
    for (int64_t head = 0; head < heads; head++) {
      const Masses masses(own + head * columns, visual, text, columns);
      seen[head] = masses.seen, read[head] = masses.read, decay += masses.seen / heads;
    }
    const float alpha = fixed + std::min(std::max(start + decay * fall, 0.f), most);
    const bool moving = moves.of<const bool>()[row];
    float after = 0;
    for (int64_t head = 0; head < heads; head++) {
      const float moved = seen[head] >= least ? alpha : 0.f;
      const float up = moving ? moved * read[head] / std::max(seen[head], static_cast<float>(least)) : alpha;
      const float down = moving ? moved : 0.f, all = moving ? 1.f : 1 + alpha * seen[head];
      const float *from = own + head * columns, share = 1 / all;
      float* made_of = to + (row * heads + head) * columns;
      for (int64_t column = 0; column < columns; column++)
        made_of[column] = from[column] * (1 + up * visual[column] - down * text[column]) * share;
      after += seen[head] * (1 + up) * share / heads;
    }
    told[row * 3] = alpha, told[row * 3 + 1] = decay, told[row * 3 + 2] = after;
  }
  return AOTI_TORCH_SUCCESS;
}
