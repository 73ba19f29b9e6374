// Decode attention that reports its weights and applies See to them; see `looks.py`.

#include <algorithm>

#include "attention.h"
#include "see.h"

namespace {

// Averages a row's weights (heads, stride) over heads, in whole vectors. to: (columns,), with room for whole vectors.
void mean(const float* weights, int64_t heads, int64_t stride, int64_t columns, float* to) {
  const float share = 1.f / heads;
  for (int64_t at = 0; at < columns; at += WIDTH) {
    floats sum = load(weights + at);
    for (int64_t head = 1; head < heads; head++) sum += load(weights + head * stride + at);
    store(to + at, sum * share);
  }
}

// Applies See in place to a row's weights (heads, stride) of its columns from `begin` on. room: scratch memory for two
// numbers per column and two per head. told receives alpha, then the attention to images before and after, as means over heads.
void enhance(const Enhancement& see, int64_t row, float* weights, int64_t heads, int64_t stride, int64_t begin,
             int64_t columns, float* room, float* told) {
  const float *mask = see.mask(row) + 2 * begin, *here = see.alpha(row);
  const float fixed = here[0], start = here[1], fall = here[2], most = here[3];
  float *visual = room, *text = visual + stride, *seen = text + stride, *read = seen + heads;
  for (int64_t column = 0; column < columns; column++) visual[column] = mask[2 * column], text[column] = mask[2 * column + 1];
  for (int64_t column = columns; column < whole(columns); column++) visual[column] = text[column] = 0;
  float decay = 0;
  for (int64_t head = 0; head < heads; head++) {
    floats on_images = {}, on_text = {};
    for (int64_t at = 0; at < columns; at += WIDTH) {
      const floats some = load(weights + head * stride + at);
      on_images += some * load(visual + at), on_text += some * load(text + at);
    }
    seen[head] = total(on_images), read[head] = total(on_text), decay += seen[head] / heads;
  }
  const float alpha = fixed + std::min(std::max(start + decay * fall, 0.f), most);
  float after = 0;
  for (int64_t head = 0; head < heads && alpha > 0; head++) {
    const Shares by(alpha, seen[head], read[head], see.reading(row));
    const float share = 1 / by.total;
    float* own = weights + head * stride;
    for (int64_t at = 0; at < columns; at += WIDTH)
      store(own + at, load(own + at) * (1 + by.up * load(visual + at) - by.down * load(text + at)) * share);
    after += seen[head] * (1 + by.up) * share / heads;
  }
  told[0] = alpha, told[1] = decay, told[2] = alpha > 0 ? after : decay;
}

// Computes the output of decode attention and its mean weights over heads. see: or nullptr; told receives its effect.
template <typename Number>
void looked(const Reading& reading, const Tensor& values, const Scoring& scoring, const Tensor* gains,
            const Sinks& sinks, const Enhancement* see, int64_t columns, float* out, float* means, float* told) {
  const int64_t heads = reading.kv_heads * reading.group, stride = whole(reading.most);
  const int64_t of_row = heads * stride + 2 * (stride + heads);
  float* room = scratch(reading.rows * of_row);
  everywhere(reading, [&](int64_t row, int64_t head) {
    float* own = room + row * of_row + head * reading.group * stride;
    weights_of<Number>(reading, scoring, gains, sinks, row, head, stride, own);
  });
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t row = 0; row < reading.rows; row++) {
    const int64_t begin = reading.begin(row), seen = reading.end(row) - begin;
    float *weights = room + row * of_row, *left = weights + heads * stride, *to = means + row * columns;
    if (see) enhance(*see, row, weights, heads, stride, begin, seen, left, told + 3 * row);
    mean(weights, heads, stride, seen, left);
    std::fill(to, to + begin, 0.f);
    std::copy(left, left + seen, to + begin);
    std::fill(to + begin + seen, to + columns, 0.f);
  }
  everywhere(reading, [&](int64_t row, int64_t head) {
    const float* own = room + row * of_row + head * reading.group * stride;
    sums_of<Number>(reading, values, row, head, own, stride, out + (row * heads + head * reading.group) * values.sizes[3]);
  });
}

struct Observed {
  Reading reading;
  Tensor values, gains;
  const Tensor* gained = nullptr;
  Sinks sinks;
  Scoring scoring;
  float *out, *means;

  bool of(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle positions,
          AtenTensorHandle* given, AtenTensorHandle* sink_scores, int64_t window, int64_t columns, AtenTensorHandle* first,
          AtenTensorHandle* second) {
    if (!reading.asks(query, key, positions, window) || columns > reading.most) return false;
    if (!sinks.of(sink_scores, reading.kv_heads * reading.group)) return false;
    reading.most = columns;
    if (!reading.takes(values, value) || (given && !gains.look(*given))) return false;
    if (given && (gains.axes != 2 || gains.strides[1] != 1 || !gains.is_float())) return false;
    gained = given ? &gains : nullptr;
    out = made({reading.rows, reading.kv_heads * reading.group, 1, values.sizes[3]}, first);
    means = made({reading.rows, columns}, second);
    return out && means;
  }

  AOTITorchError look(const Enhancement* see, float* told) const {
    return typed(reading.pooled.dtype, [&]<typename Number>() {
      looked<Number>(reading, values, scoring, gained, sinks, see, reading.most, out, means, told);
    }) ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
  }
};

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_read_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle positions, AtenTensorHandle* gains,
    AtenTensorHandle* sinks, double scaling, int64_t window, double softcap, int64_t columns, AtenTensorHandle* out,
    AtenTensorHandle* means) {
  Observed observed;
  observed.scoring = {static_cast<float>(scaling), static_cast<float>(softcap)};
  if (!observed.of(query, key, value, positions, gains, sinks, window, columns, out, means)) return AOTI_TORCH_FAILURE;
  return observed.look(nullptr, nullptr);
}

extern "C" AOTITorchError aoti_torch_cpu_enhanced_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle positions, AtenTensorHandle* gains,
    AtenTensorHandle masks, AtenTensorHandle settings, AtenTensorHandle readings, int64_t layer, AtenTensorHandle* sinks,
    double scaling, int64_t window, double softcap, int64_t columns, AtenTensorHandle* out, AtenTensorHandle* means,
    AtenTensorHandle* told) {
  Observed observed;
  Enhancement see;
  observed.scoring = {static_cast<float>(scaling), static_cast<float>(softcap)};
  if (!observed.of(query, key, value, positions, gains, sinks, window, columns, out, means)) return AOTI_TORCH_FAILURE;
  see.layer = layer;
  float* did = made({observed.reading.rows, 3}, told);
  if (!did || !see.of(masks, settings, readings, observed.reading.rows, columns)) return AOTI_TORCH_FAILURE;
  return observed.look(&see, did);
}
