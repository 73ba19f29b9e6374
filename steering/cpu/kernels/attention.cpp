// Decode attention, with one query per row; see `attention.py`.

#include "attention.h"

extern "C" AOTITorchError aoti_torch_cpu_decode_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle positions,
    AtenTensorHandle* sink_scores, double scaling, int64_t window, double softcap, AtenTensorHandle* out) {
  Reading reading;
  Tensor values;
  Sinks sinks;
  if (!reading.asks(query, key, positions, window) || !reading.takes(values, value)) return AOTI_TORCH_FAILURE;
  if (!sinks.of(sink_scores, reading.kv_heads * reading.group)) return AOTI_TORCH_FAILURE;
  const Scoring scoring{static_cast<float>(scaling), static_cast<float>(softcap)};
  const int64_t group = reading.group, width = values.sizes[3];
  float* to = made({reading.rows, reading.kv_heads * group, 1, width}, out);
  if (!to) return AOTI_TORCH_FAILURE;
  return typed(reading.pooled.dtype, [&]<typename Number>() {
    everywhere(reading, [&](int64_t row, int64_t head) {
      const int64_t stride = whole(reading.end(row) - reading.begin(row));
      float* weights = scratch(group * stride);
      weights_of<Number>(reading, scoring, nullptr, sinks, row, head, stride, weights);
      sums_of<Number>(reading, values, row, head, weights, stride, to + (row * reading.kv_heads + head) * group * width);
    });
  }) ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
}

extern "C" AOTITorchError aoti_torch_cpu_decode_sums(
    AtenTensorHandle weights, AtenTensorHandle value, AtenTensorHandle positions, int64_t window, AtenTensorHandle* out) {
  Reading reading;
  if (!reading.of(weights, value, positions, window)) return AOTI_TORCH_FAILURE;
  const int64_t columns = reading.asked.sizes[3], group = reading.group, width = reading.width;
  reading.most = columns < reading.most ? columns : reading.most;
  float* to = made({reading.rows, reading.kv_heads * group, 1, width}, out);
  if (!to) return AOTI_TORCH_FAILURE;
  return typed(reading.pooled.dtype, [&]<typename Number>() {
    everywhere(reading, [&](int64_t row, int64_t head) {
      const int64_t place = (row * reading.kv_heads + head) * group;
      const float* own = reading.asked.of() + place * columns + reading.begin(row);
      sums_of<Number>(reading, reading.pooled, row, head, own, columns, to + place * width);
    });
  }) ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
}
