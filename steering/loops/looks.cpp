// What is read of a decode's attention weights, and what See makes of them: `looks.py` says what they are.

#include <algorithm>

#include "attention.h"

namespace {

constexpr float LEAST = std::numeric_limits<float>::min();  // attention that can be divided by

// The mean over heads of a row's weights (heads, stride), (columns,), in whole vectors. to: with room for these.
void mean(const float* weights, int64_t heads, int64_t stride, int64_t columns, float* to) {
  const float share = 1.f / heads;
  for (int64_t at = 0; at < columns; at += WIDTH) {
    floats sum = load(weights + at);
    for (int64_t head = 1; head < heads; head++) sum += load(weights + head * stride + at);
    store(to + at, sum * share);
  }
}

// What See makes of rows' weights.
struct Enhancement {
  Tensor masks, settings, transfer;
  int64_t layer;
  float* told;

  bool of(AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle third, int64_t rows, int64_t columns) {
    return masks.look(first) && settings.look(second) && transfer.look(third) && masks.is_float() && settings.is_float() &&
        masks.dense(1) && settings.dense() && transfer.dense() && masks.axes == 3 && masks.sizes[1] >= columns &&
        masks.sizes[2] == 2 && settings.axes == 3 && settings.sizes[0] == rows && settings.sizes[2] == 4 &&
        layer < settings.sizes[1];
  }

  // In place, a row's weights (heads, stride) of its columns from `begin` on. room: for two of its columns and of its heads.
  void enhance(int64_t row, float* weights, int64_t heads, int64_t stride, int64_t begin, int64_t columns, float* room) const {
    const float *mask = masks.of(row) + 2 * begin, *here = settings.of() + (row * settings.sizes[1] + layer) * 4;
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
    const bool moving = transfer.of<const bool>()[row];
    float after = 0;
    for (int64_t head = 0; head < heads && alpha > 0; head++) {
      const float moved = seen[head] >= LEAST ? alpha : 0.f;
      const float up = moving ? moved * read[head] / std::max(seen[head], LEAST) : alpha;
      const float down = moving ? moved : 0.f, all = moving ? 1.f : 1 + alpha * seen[head], share = 1 / all;
      float* own = weights + head * stride;
      for (int64_t at = 0; at < columns; at += WIDTH)
        store(own + at, load(own + at) * (1 + up * load(visual + at) - down * load(text + at)) * share);
      after += seen[head] * (1 + up) * share / heads;
    }
    told[row * 3] = alpha, told[row * 3 + 1] = decay, told[row * 3 + 2] = alpha > 0 ? after : decay;
  }
};

// The output of a decode's attention, and the mean over heads of its weights; see: nullptr for none.
template <typename Number>
void looked(const Reading& reading, const Tensor& values, const Scoring& scoring, const Tensor* gains,
            const Enhancement* see, int64_t columns, float* out, float* means) {
  const int64_t heads = reading.kv_heads * reading.group, stride = whole(reading.most);
  const int64_t of_row = heads * stride + 2 * (stride + heads);
  float* room = scratch(reading.rows * of_row);
  everywhere(reading, [&](int64_t row, int64_t head) {
    float* own = room + row * of_row + head * reading.group * stride;
    weights_of<Number>(reading, scoring, gains, row, head, stride, own);
  });
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t row = 0; row < reading.rows; row++) {
    const int64_t begin = reading.begin(row), seen = reading.end(row) - begin;
    float *weights = room + row * of_row, *left = weights + heads * stride, *to = means + row * columns;
    if (see) see->enhance(row, weights, heads, stride, begin, seen, left);
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
  Scoring scoring;
  float *out, *means;

  bool of(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle positions,
          AtenTensorHandle* given, int64_t window, int64_t columns, AtenTensorHandle* first, AtenTensorHandle* second) {
    if (!reading.asks(query, key, positions, window) || columns > reading.most) return false;
    reading.most = columns;
    if (!reading.takes(values, value) || (given && !gains.look(*given))) return false;
    if (given && (gains.axes != 2 || gains.strides[1] != 1 || !gains.is_float())) return false;
    gained = given ? &gains : nullptr;
    out = made({reading.rows, reading.kv_heads * reading.group, 1, values.sizes[3]}, first);
    means = made({reading.rows, columns}, second);
    return out && means;
  }

  AOTITorchError look(const Enhancement* see) const {
    return typed(reading.pooled.dtype, [&]<typename Number>() {
      looked<Number>(reading, values, scoring, gained, see, reading.most, out, means);
    }) ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
  }
};

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_read_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle positions, AtenTensorHandle* gains,
    double scaling, int64_t window, double softcap, int64_t columns, AtenTensorHandle* out, AtenTensorHandle* means) {
  Observed observed;
  observed.scoring = {static_cast<float>(scaling), static_cast<float>(softcap)};
  if (!observed.of(query, key, value, positions, gains, window, columns, out, means)) return AOTI_TORCH_FAILURE;
  return observed.look(nullptr);
}

extern "C" AOTITorchError aoti_torch_cpu_enhanced_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle positions, AtenTensorHandle* gains,
    AtenTensorHandle masks, AtenTensorHandle settings, AtenTensorHandle transfer, int64_t layer, double scaling,
    int64_t window, double softcap, int64_t columns, AtenTensorHandle* out, AtenTensorHandle* means, AtenTensorHandle* told) {
  Observed observed;
  Enhancement see;
  observed.scoring = {static_cast<float>(scaling), static_cast<float>(softcap)};
  if (!observed.of(query, key, value, positions, gains, window, columns, out, means)) return AOTI_TORCH_FAILURE;
  see.layer = layer, see.told = made({observed.reading.rows, 3}, told);
  if (!see.told || !see.of(masks, settings, transfer, observed.reading.rows, columns)) return AOTI_TORCH_FAILURE;
  return observed.look(&see);
}
