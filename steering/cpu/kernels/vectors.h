// Vectors as wide as the processor's, in the compiler's own vector types, loaded as float32 from any stored type. Compilers
// do not keep wider ones in registers, and a loop then takes ten times as long.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

typedef float floats __attribute__((vector_size(BYTES)));
typedef uint32_t words __attribute__((vector_size(BYTES)));

constexpr int64_t WIDTH = BYTES / sizeof(float);  // numbers per vector

struct Bfloat {
  uint16_t bits;
  static words wide(words bits) { return bits << 16; }  // the upper half of a float
};

struct Half {
  uint16_t bits;
  static words wide(words bits) {
    words rest = (bits & 0x7fff) << 13;
    const words infinite = reinterpret_cast<words>(rest >= 0x0f800000) & 0x7f800000;
    rest = reinterpret_cast<words>(reinterpret_cast<floats>(rest) * 0x1p112f);  // corrects the bias of the exponent
    return (bits & 0x8000) << 16 | rest | infinite;
  }
};

inline floats load(const float* from) {
  floats loaded;
  std::memcpy(&loaded, from, sizeof(loaded));
  return loaded;
}

template <typename Number>
floats load(const Number* from) {
  typedef uint16_t shorts __attribute__((vector_size(BYTES / 2)));
  shorts raw;
  std::memcpy(&raw, from, sizeof(raw));
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Number, Half>) return _mm512_cvtph_ps(reinterpret_cast<__m256i>(raw));
#elif defined(__AVX2__) && defined(__F16C__)
  if constexpr (std::is_same_v<Number, Half>) return _mm256_cvtph_ps(reinterpret_cast<__m128i>(raw));
#endif
  return reinterpret_cast<floats>(Number::wide(__builtin_convertvector(raw, words)));
}

inline float one(const float* from) { return *from; }

template <typename Number>
float one(const Number* from) {
  return reinterpret_cast<floats>(Number::wide(words{from->bits}))[0];
}

inline void store(float* to, floats value) { std::memcpy(to, &value, sizeof(value)); }

// Loads `number` numbers, fewer than a whole vector, and fills the others with `rest`.
inline floats load_some(const float* from, int64_t number, float rest) {
  floats loaded = floats{} + rest;
  std::memcpy(&loaded, from, number * sizeof(float));
  return loaded;
}

inline void store_some(float* to, floats value, int64_t number) { std::memcpy(to, &value, number * sizeof(float)); }

inline floats chosen(words where, floats here, floats elsewhere) {
  return reinterpret_cast<floats>((where & reinterpret_cast<words>(here)) | (~where & reinterpret_cast<words>(elsewhere)));
}

inline floats greater(floats left, floats right) {
  return chosen(reinterpret_cast<words>(left > right), left, right);
}

// Reduces a vector to one number by combining its halves until one number is left.
template <int bytes = BYTES, typename Vector, typename Call>
float folded(Vector value, const Call& call) {
  typedef float half __attribute__((vector_size(bytes / 2)));
  if constexpr (bytes == 16) {
    return call(call(value[0], value[2]), call(value[1], value[3]));
  } else {
    half halves[2];
    std::memcpy(halves, &value, bytes);
    return folded<bytes / 2>(call(halves[0], halves[1]), call);
  }
}

inline float total(floats value) {
  return folded(value, [](auto left, auto right) { return left + right; });
}

inline float greatest(floats value) {
  return folded(value, [](auto left, auto right) { return left > right ? left : right; });
}

// exp() of numbers up to 0, within two units in the last place; 0 where the result is too small for float32.
inline floats exponential(floats power) {
  constexpr float LEAST = -87.33f, ROUNDED = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the last digits
  const words small = reinterpret_cast<words>(power < LEAST);
  power = chosen(small, floats{} + LEAST, power);  // NaN stays NaN
  const floats shifted = power * 1.44269504f + ROUNDED, whole = shifted - ROUNDED;
  const floats rest = power - whole * 0.693359375f + whole * 2.12194440e-4f;
  floats made = floats{} + 1.9875691500e-4f;
  for (const float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    made = made * rest + next;
  made = made * rest * rest + rest + 1.f;
  const words exponent = (reinterpret_cast<words>(shifted) + 127) << 23;
  return chosen(small, floats{}, made * reinterpret_cast<floats>(exponent));
}
