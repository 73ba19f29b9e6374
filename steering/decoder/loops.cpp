// Products of a decode, for a compiled step to call: `loops.py` says what they are.
//
// Every query is one token, so that a library's matrix product is called for a few numbers. Here a key or a value is read
// once for all heads that share it, and only what a row may see; and a weight once for a few rows. What takes time is to
// read, so that memory is asked for early. Vectors are the compiler's own, of any processor.

#include <cstdint>
#include <cstring>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace {

typedef float floats __attribute__((vector_size(64)));
typedef float half_of_them __attribute__((vector_size(32)));
typedef float quarter __attribute__((vector_size(16)));
typedef uint16_t shorts __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(64)));

constexpr int64_t WIDTH = 16;    // numbers of a vector
constexpr int64_t TOGETHER = 8;  // heads whose sums are kept in registers
constexpr int64_t OUTPUTS = 4;   // of a layer that are computed together where its weights lie by row
constexpr int64_t DEPTH = 8;     // states of a layer's input that are used together
constexpr int64_t BLOCK = 512;   // outputs of a layer that stay near while its input is gone through, at most
constexpr int64_t FEW = 16;      // rows that read a weight together
constexpr int64_t LINE = 16;     // numbers of a line of the cache
constexpr int64_t AHEAD = 24;    // columns that memory is asked for before they are needed: more than half of the time is its

inline floats load(const float* from) {
  floats loaded;
  std::memcpy(&loaded, from, sizeof(loaded));
  return loaded;
}

struct Bfloat {
  uint16_t bits;
  static words wide(words bits) { return bits << 16; }  // the upper half of a float
};

struct Half {
  uint16_t bits;
  static words wide(words bits) {
    words rest = (bits & 0x7fff) << 13;
    const words infinite = reinterpret_cast<words>(rest >= 0x0f800000) & 0x7f800000;
    rest = reinterpret_cast<words>(reinterpret_cast<floats>(rest) * 0x1p112f);  // of another bias of exponents
    return (bits & 0x8000) << 16 | rest | infinite;
  }
};

template <typename Number>
floats load(const Number* from) {
  shorts raw;
  std::memcpy(&raw, from, sizeof(raw));
  return reinterpret_cast<floats>(Number::wide(__builtin_convertvector(raw, words)));
}

inline float one(const float* from) { return *from; }

template <typename Number>
float one(const Number* from) {
  return reinterpret_cast<floats>(Number::wide(words{from->bits}))[0];
}

inline void store(float* to, floats value) { std::memcpy(to, &value, sizeof(value)); }

inline float total(floats value) {
  half_of_them halves[2];
  std::memcpy(halves, &value, sizeof(value));
  const half_of_them half = halves[0] + halves[1];
  quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const quarter sum = quarters[0] + quarters[1];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// One row and one head of keys. query: (group, width). key: (columns, width). out: (group, stride).
template <typename Key, int group>
void scores(const float* query, const Key* key, int64_t width, int64_t columns, float* out, int64_t stride) {
  const int64_t whole = width - width % WIDTH;
  for (int64_t column = 0; column < columns; column += 2) {
    const Key* first = key + column * width;
    const Key* second = column + 1 < columns ? first + width : first;  // two at a time do not wait for one another
    floats sums[2][group] = {};
    for (int64_t at = 0; at < 2 * width; at += LINE) __builtin_prefetch(first + AHEAD * width + at);
    for (int64_t at = 0; at < whole; at += WIDTH) {
      const floats one = load(first + at), other = load(second + at);
      for (int head = 0; head < group; head++) {
        const floats asked = load(query + head * width + at);
        sums[0][head] += asked * one;
        sums[1][head] += asked * other;
      }
    }
    for (int head = 0; head < group; head++) {
      float* to = out + head * stride + column;
      float sum = total(sums[0][head]), next = total(sums[1][head]);
      for (int64_t at = whole; at < width; at++) {
        sum += query[head * width + at] * one(first + at);
        next += query[head * width + at] * one(second + at);
      }
      to[0] = sum;
      if (column + 1 < columns) to[1] = next;
    }
  }
}

// One row and one head of values. weights: (group, stride). value: (columns, width). out: (group, width).
template <typename Value, int group>
void sums(const float* weights, int64_t stride, const Value* value, int64_t width, int64_t columns, float* out) {
  int64_t at = 0;
  for (; at + 2 * WIDTH <= width; at += 2 * WIDTH) {
    floats kept[group][2] = {};
    for (int64_t column = 0; column < columns; column++) {
      const Value* from = value + column * width + at;
      const floats left = load(from), right = load(from + WIDTH);
      __builtin_prefetch(from + AHEAD * width), __builtin_prefetch(from + AHEAD * width + WIDTH);
      for (int head = 0; head < group; head++) {
        const float weight = weights[head * stride + column];
        kept[head][0] += left * weight;
        kept[head][1] += right * weight;
      }
    }
    for (int head = 0; head < group; head++) {
      store(out + head * width + at, kept[head][0]);
      store(out + head * width + at + WIDTH, kept[head][1]);
    }
  }
  for (; at < width; at++) {
    for (int head = 0; head < group; head++) {
      float kept = 0;
      for (int64_t column = 0; column < columns; column++)
        kept += weights[head * stride + column] * one(value + column * width + at);
      out[head * width + at] = kept;
    }
  }
}

// Some outputs of a linear layer of some rows. states: (rows, width). weight: (width, stride). out: (rows, stride).
void layer(
    const float* states, const float* weight, int64_t rows, int64_t width, int64_t outputs, float* out, int64_t stride) {
  for (int64_t first = 0; first < width; first += DEPTH) {
    const int64_t depth = width - first < DEPTH ? width - first : DEPTH;
    const float* own = weight + first * stride;
    for (int64_t at = 0; at < outputs; at += WIDTH) {
      floats weights[DEPTH];
      for (int64_t one = 0; one < DEPTH; one++) {
        weights[one] = one < depth ? load(own + one * stride + at) : floats{};
        __builtin_prefetch(own + (one + DEPTH) * stride + at);
      }
      for (int64_t row = 0; row < rows; row++) {
        const float* state = states + row * width + first;
        float* to = out + row * stride + at;
        floats sum = load(to);
        for (int64_t one = 0; one < depth; one++) sum += weights[one] * state[one];
        store(to, sum);
      }
    }
  }
}

// The same of four outputs whose weights lie one behind the other. weight: (4, width). bias, where there is one: (4,).
void outputs_of(const float* states, const float* weight, const float* bias, int64_t rows, int64_t width, float* out,
                int64_t stride) {
  const int64_t whole = width - width % WIDTH;
  for (int64_t at = 0; at < OUTPUTS * width; at += LINE) __builtin_prefetch(weight + OUTPUTS * width + at);
  for (int64_t row = 0; row < rows; row++) {
    const float* state = states + row * width;
    floats sums[OUTPUTS] = {};
    for (int64_t at = 0; at < whole; at += WIDTH) {
      const floats some = load(state + at);
      for (int64_t one = 0; one < OUTPUTS; one++) sums[one] += some * load(weight + one * width + at);
    }
    for (int64_t one = 0; one < OUTPUTS; one++) {
      float sum = total(sums[one]) + (bias ? bias[one] : 0);
      for (int64_t at = whole; at < width; at++) sum += state[at] * weight[one * width + at];
      out[row * stride + one] = sum;
    }
  }
}

// Calls with how many of a number there are, `most` at a time, as a constant.
template <int64_t most, typename Call>
void grouped(int64_t number, const Call& call) {
  for (int64_t first = 0; first < number; first += most) {
    switch (number - first < most ? number - first : most) {
      case 1: call.template operator()<1>(first); break;
      case 2: call.template operator()<2>(first); break;
      case 3: call.template operator()<3>(first); break;
      case 4: call.template operator()<4>(first); break;
      case 5: call.template operator()<5>(first); break;
      case 6: call.template operator()<6>(first); break;
      case 7: call.template operator()<7>(first); break;
      default: call.template operator()<8>(first);
    }
  }
}

struct Tensor {
  void* data;
  int64_t *sizes, *strides;
  int32_t dtype;
};

bool look(AtenTensorHandle handle, Tensor* tensor) {
  return !aoti_torch_get_data_ptr(handle, &tensor->data) && !aoti_torch_get_sizes(handle, &tensor->sizes) &&
      !aoti_torch_get_strides(handle, &tensor->strides) && !aoti_torch_get_dtype(handle, &tensor->dtype);
}

// What both products are of: asked (rows, kv_heads, group, n), pooled (rows, kv_heads, columns, width).
struct Product {
  Tensor asked, pooled, positions;
  int64_t rows, kv_heads, group, columns, width;

  bool of(AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle third) {
    if (!look(first, &asked) || !look(second, &pooled) || !look(third, &positions)) return false;
    rows = asked.sizes[0], kv_heads = asked.sizes[1], group = asked.sizes[2];
    columns = pooled.sizes[2], width = pooled.sizes[3];
    const bool dense = asked.strides[3] == 1 && asked.strides[2] == asked.sizes[3] &&
        asked.strides[1] == group * asked.sizes[3] && asked.strides[0] == kv_heads * group * asked.sizes[3];
    const bool placed = pooled.strides[3] == 1 && pooled.strides[2] == width && (rows < 2 || positions.strides[0] == 1);
    return dense && placed && asked.dtype == aoti_torch_dtype_float32();
  }

  int64_t seen(int64_t row) const {  // columns of a row
    const int64_t last = static_cast<const int64_t*>(positions.data)[row] + 1;
    return last < columns ? last : columns;
  }

  template <typename Number>
  const Number* of(int64_t row, int64_t head) const {
    return static_cast<const Number*>(pooled.data) + row * pooled.strides[0] + head * pooled.strides[1];
  }
};

AOTITorchError empty(const Product& product, int64_t last, float** data, AtenTensorHandle* handle) {
  const int64_t sizes[] = {product.rows, product.kv_heads, product.group, last};
  const int64_t strides[] = {product.kv_heads * product.group * last, product.group * last, last, 1};
  AOTITorchError error = aoti_torch_empty_strided(
      4, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, handle);
  return error ? error : aoti_torch_get_data_ptr(*handle, reinterpret_cast<void**>(data));
}

template <typename Number>
void all_scores(const Product& product, float* out) {
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t at = 0; at < product.rows * product.kv_heads; at++) {
    const int64_t row = at / product.kv_heads, head = at % product.kv_heads, seen = product.seen(row);
    const float* query = static_cast<const float*>(product.asked.data) + at * product.group * product.width;
    float* to = out + at * product.group * product.columns;
    grouped<TOGETHER>(product.group, [&]<int group>(int64_t first) {
      scores<Number, group>(query + first * product.width, product.of<Number>(row, head), product.width, seen,
                            to + first * product.columns, product.columns);
    });
    for (int64_t one = 0; one < product.group; one++)
      std::memset(to + one * product.columns + seen, 0, (product.columns - seen) * sizeof(float));
  }
}

template <typename Number>
void all_sums(const Product& product, float* out) {
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
  for (int64_t at = 0; at < product.rows * product.kv_heads; at++) {
    const int64_t row = at / product.kv_heads, head = at % product.kv_heads;
    const float* weights = static_cast<const float*>(product.asked.data) + at * product.group * product.columns;
    grouped<TOGETHER>(product.group, [&]<int group>(int64_t first) {
      sums<Number, group>(weights + first * product.columns, product.columns, product.of<Number>(row, head),
                          product.width, product.seen(row), out + (at * product.group + first) * product.width);
    });
  }
}

// A new tensor of `last` numbers for each query, which a call fills, by the type of keys and values.
template <typename Call>
AOTITorchError filled(AtenTensorHandle asked, AtenTensorHandle pooled, AtenTensorHandle positions, AtenTensorHandle* made,
                      int64_t Product::*last, const Call& call) {
  Product product;
  float* out;
  if (!product.of(asked, pooled, positions) || empty(product, product.*last, &out, made)) return AOTI_TORCH_FAILURE;
  const int32_t dtype = product.pooled.dtype;
  if (dtype == aoti_torch_dtype_float32()) call.template operator()<float>(product, out);
  else if (dtype == aoti_torch_dtype_bfloat16()) call.template operator()<Bfloat>(product, out);
  else if (dtype == aoti_torch_dtype_float16()) call.template operator()<Half>(product, out);
  else return AOTI_TORCH_FAILURE;
  return AOTI_TORCH_SUCCESS;
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_decode_scores(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle positions, AtenTensorHandle* made) {
  return filled(query, key, positions, made, &Product::columns,
                []<typename Number>(const Product& product, float* out) { all_scores<Number>(product, out); });
}

extern "C" AOTITorchError aoti_torch_cpu_decode_sums(
    AtenTensorHandle weights, AtenTensorHandle value, AtenTensorHandle positions, AtenTensorHandle* made) {
  return filled(weights, value, positions, made, &Product::width,
                []<typename Number>(const Product& product, float* out) { all_sums<Number>(product, out); });
}

extern "C" AOTITorchError aoti_torch_cpu_few_linear(
    AtenTensorHandle states, AtenTensorHandle weight, AtenTensorHandle* bias, AtenTensorHandle* made) {
  Tensor given, weights, added{};
  int64_t count;
  if (!look(states, &given) || !look(weight, &weights) || (bias && !look(*bias, &added))) return AOTI_TORCH_FAILURE;
  if (aoti_torch_get_numel(states, &count)) return AOTI_TORCH_FAILURE;
  const int64_t outputs = weights.sizes[0], width = weights.sizes[1], rows = count / width;
  const bool by_column = weights.strides[0] == 1 && weights.strides[1] == outputs && outputs % WIDTH == 0;
  const bool by_row = weights.strides[1] == 1 && weights.strides[0] == width && outputs % OUTPUTS == 0;
  const bool narrow = given.dtype != aoti_torch_dtype_float32() || weights.dtype != given.dtype;
  if (narrow || !(by_column || by_row)) return AOTI_TORCH_FAILURE;
  const int64_t sizes[] = {rows, outputs}, strides[] = {outputs, 1};
  AOTITorchError error = aoti_torch_empty_strided(
      2, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, made);
  float* out;
  if (error || aoti_torch_get_data_ptr(*made, reinterpret_cast<void**>(&out))) return AOTI_TORCH_FAILURE;
  const float *from = static_cast<const float*>(given.data), *read = static_cast<const float*>(weights.data);
  const float* shift = bias ? static_cast<const float*>(added.data) : nullptr;
  if (by_column) {
    const int64_t share = (outputs / WIDTH + THREADS - 1) / THREADS * WIDTH, block = share < BLOCK ? share : BLOCK;
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
    for (int64_t first = 0; first < outputs; first += block) {
      const int64_t some = outputs - first < block ? outputs - first : block;
      for (int64_t row = 0; row < rows; row++) {
        float* to = out + row * outputs + first;
        shift ? std::memcpy(to, shift + first, some * sizeof(float)) : std::memset(to, 0, some * sizeof(float));
      }
      for (int64_t row = 0; row < rows; row += FEW)
        layer(from + row * width, read + first, rows - row < FEW ? rows - row : FEW, width, some,
              out + row * outputs + first, outputs);
    }
  } else {
#pragma omp parallel for num_threads(THREADS) if (THREADS > 1)
    for (int64_t one = 0; one < outputs; one += OUTPUTS)
      outputs_of(from, read + one * width, shift ? shift + one : nullptr, rows, width, out + one, outputs);
  }
  return AOTI_TORCH_SUCCESS;
}
