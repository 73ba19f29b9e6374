// Adds the measurements of a decode step to the counters of the slots; see `counts.py`.

#include "counts.h"

#include <algorithm>

#include "vectors.h"

namespace {

// Sums the attention `read` (columns,) by kind, with a table (length, kinds) of which columns belong to which kind.
void by_kind(const float* read, const float* table, int64_t columns, int64_t length, int64_t kinds, float* to) {
  for (int64_t first = 0; first < kinds; first += WIDTH) {
    const int64_t some = std::min(kinds - first, WIDTH), last = length * kinds - first - WIDTH;
    const int64_t near = last < 0 ? 0 : std::min(columns, last / kinds + 1);  // whole vectors can be read up to here
    floats sums[2] = {};  // two independent sums
    int64_t column = 0;
    for (; column + 2 <= near; column += 2)
      for (int one = 0; one < 2; one++) sums[one] += load(table + (column + one) * kinds + first) * read[column + one];
    for (; column < columns; column++) sums[0] += load_some(table + column * kinds + first, some, 0) * read[column];
    store_some(to + first, sums[0] + sums[1], some);
  }
}

// Computes the share of each source (3,) in sums (kinds,). sources: (kinds, 3).
void shares(const float* sums, const float* sources, int64_t kinds, float* to) {
  float parts[3] = {};
  for (int64_t kind = 0; kind < kinds; kind++)
    for (int source = 0; source < 3; source++) parts[source] += sums[kind] * sources[3 * kind + source];
  const float all = parts[0] + parts[1] + parts[2];
  for (int source = 0; source < 3; source++) to[source] = parts[source] / all;
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_count_attention(
    const AtenTensorHandle* means, int64_t layers, AtenTensorHandle spans, AtenTensorHandle positions, AtenTensorHandle sources,
    AtenTensorHandle active, AtenTensorHandle counted, AtenTensorHandle sums, AtenTensorHandle decay, AtenTensorHandle patches,
    AtenTensorHandle* out) {
  Tensor of_spans, of_sources, summed, decayed, by_column;
  Counting counting;
  Tensor* read = looked_at(means, layers, [](const Tensor& one) { return one.dense() && one.is_float() && one.axes == 2; });
  if (!read || !counting.of(positions, active, counted)) return AOTI_TORCH_FAILURE;
  if (!of_spans.look(spans) || !of_sources.look(sources) || !summed.look(sums) || !decayed.look(decay) || !by_column.look(patches))
    return AOTI_TORCH_FAILURE;
  const int64_t rows = read[0].sizes[0], columns = read[0].sizes[1];
  if (!of_spans.dense(1) || !of_spans.is_float() || of_spans.axes != 3 || of_spans.sizes[1] < columns) return AOTI_TORCH_FAILURE;
  const int64_t kinds = of_spans.sizes[2];
  if (rows != counting.rows() || !of_sources.dense() || !of_sources.is_float() || of_sources.count(1, of_sources.axes) != 3 * kinds)
    return AOTI_TORCH_FAILURE;
  if (!summed.dense() || !summed.is_float() || summed.axes != 3 || summed.sizes[1] != layers || summed.sizes[2] != kinds)
    return AOTI_TORCH_FAILURE;
  if (!counting.fits(decayed, 1) || !counting.fits(by_column, 2) || by_column.sizes[2] < columns) return AOTI_TORCH_FAILURE;
  if (decayed.count(2, decayed.axes) != 3 * layers || by_column.sizes[1] != layers) return AOTI_TORCH_FAILURE;
  float* stacked = made({rows, layers, columns}, out);
  if (!stacked) return AOTI_TORCH_FAILURE;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t place = 0; place < rows * layers; place++) {
    const int64_t row = place / layers, layer = place % layers;
    const float* own = read[layer].of() + row * columns;
    std::copy(own, own + columns, stacked + place * columns);
    if (!counting.counts(row)) continue;
    float* found = scratch(kinds);
    by_kind(own, of_spans.of(row), columns, of_spans.sizes[1], kinds, found);
    add(found, kinds, summed.of() + place * kinds);
    shares(found, of_sources.of(row), kinds, decayed.of(row) + (counting.position(row) * layers + layer) * 3);
    add(own, columns, by_column.of() + place * by_column.sizes[2]);
  }
  counting.done();
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError aoti_torch_cpu_count_damping(
    const AtenTensorHandle* told, int64_t layers, AtenTensorHandle positions, AtenTensorHandle active, AtenTensorHandle counted,
    AtenTensorHandle sums, AtenTensorHandle*) {
  Tensor summed;
  Counting counting;
  if (!counting.of(positions, active, counted) || !summed.look(sums)) return AOTI_TORCH_FAILURE;
  const int64_t rows = counting.rows();
  const Tensor* said = looked_at(told, layers, [&](const Tensor& one) {
    return one.dense() && one.is_float() && one.count(0, one.axes) == 3 * rows;
  });
  if (!said || !summed.dense() || !summed.is_float() || summed.count(0, summed.axes) != rows * layers * 2) return AOTI_TORCH_FAILURE;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t layer = 0; layer < layers && counting.counts(row); layer++)
      add(said[layer].of() + 3 * row + 1, 2, summed.of() + (row * layers + layer) * 2);
  counting.done();
  return AOTI_TORCH_SUCCESS;
}

extern "C" AOTITorchError aoti_torch_cpu_note_enhancement(
    const AtenTensorHandle* told, int64_t layers, AtenTensorHandle positions, AtenTensorHandle steps, AtenTensorHandle*) {
  Tensor at, noted;
  if (!at.look(positions) || !noted.look(steps) || !at.is_number() || !at.dense()) return AOTI_TORCH_FAILURE;
  const int64_t rows = at.count(0, at.axes);
  const Tensor* said = looked_at(told, layers, [&](const Tensor& one) {
    return one.dense() && one.is_float() && one.count(0, one.axes) == 3 * rows;
  });
  if (!said || !noted.dense() || !noted.is_float() || noted.axes != 3 || noted.sizes[0] != rows || noted.sizes[2] != 4)
    return AOTI_TORCH_FAILURE;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t position = at.of<int64_t>()[row];
    if (position < 0 || position >= noted.sizes[1]) return AOTI_TORCH_FAILURE;
    float sums[3] = {}, greatest = said[0].of()[3 * row], *to = noted.of(row) + position * 4;
    for (int64_t layer = 0; layer < layers; layer++) {
      const float* own = said[layer].of() + 3 * row;
      add(own, 3, sums);
      greatest = std::max(greatest, own[0]);
    }
    to[0] = sums[0] / layers, to[1] = greatest, to[2] = sums[1] / layers, to[3] = sums[2] / layers;
  }
  return AOTI_TORCH_SUCCESS;
}
