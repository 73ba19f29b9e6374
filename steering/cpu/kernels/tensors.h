// Tensors that compiled steps pass, and new tensors.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "vectors.h"

struct Tensor {
  void* data = nullptr;
  int64_t *sizes = nullptr, *strides = nullptr, axes = 0;
  int32_t dtype = -1;

  bool look(AtenTensorHandle handle) {
    return !aoti_torch_get_data_ptr(handle, &data) && !aoti_torch_get_dim(handle, &axes) &&
        !aoti_torch_get_sizes(handle, &sizes) && !aoti_torch_get_strides(handle, &strides) &&
        !aoti_torch_get_dtype(handle, &dtype);
  }

  bool is_float() const { return dtype == aoti_torch_dtype_float32(); }
  bool is_number() const { return dtype == aoti_torch_dtype_int64(); }

  // Returns whether the axes from `from` on are contiguous.
  bool dense(int64_t from = 0) const {
    int64_t stride = 1;
    bool lies = true;
    for (int64_t axis = axes - 1; axis >= from; stride *= sizes[axis--])
      lies = lies && (sizes[axis] == 1 || strides[axis] == stride);
    return lies || !stride;  // an empty tensor is always contiguous
  }

  int64_t count(int64_t from, int64_t to) const {
    int64_t product = 1;
    for (int64_t axis = from; axis < to; axis++) product *= sizes[axis];
    return product;
  }

  template <typename Number = float>
  Number* of(int64_t row = 0) const {
    return static_cast<Number*>(data) + (axes ? row * strides[0] : 0);
  }
};

// Returns all tensors of a list, or nullptr if one is unsuitable. They are valid until this thread reads that `list` again.
template <int list = 0, typename Call>
Tensor* looked_at(const AtenTensorHandle* handles, int64_t count, const Call& suits) {
  static thread_local std::vector<Tensor> tensors;
  if (static_cast<int64_t>(tensors.size()) < count) tensors.resize(count);
  for (int64_t one = 0; one < count; one++)
    if (!tensors[one].look(handles[one]) || !suits(tensors[one])) return nullptr;
  return count ? tensors.data() : nullptr;
}

// Creates a float32 tensor; returns nullptr if there is no memory.
inline float* made(const int64_t* sizes, int64_t axes, AtenTensorHandle* handle) {
  int64_t strides[8], stride = 1;
  void* data = nullptr;
  for (int64_t axis = axes - 1; axis >= 0; stride *= sizes[axis--]) strides[axis] = stride;
  const bool failed = aoti_torch_empty_strided(
      axes, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, handle);
  if (failed || aoti_torch_get_data_ptr(*handle, &data)) return nullptr;
  static float none;
  return stride ? static_cast<float*>(data) : &none;  // an empty tensor has no memory
}

inline float* made(std::initializer_list<int64_t> sizes, AtenTensorHandle* handle) {
  return made(sizes.begin(), static_cast<int64_t>(sizes.size()), handle);
}

// Returns scratch memory of this thread, which is kept between calls.
inline float* scratch(int64_t numbers) {
  struct Kept {
    float* data = nullptr;
    int64_t numbers = 0;
    ~Kept() { delete[] data; }
  };
  static thread_local Kept kept;
  if (kept.numbers < numbers) {
    delete[] kept.data;
    kept.data = new float[numbers];
    kept.numbers = numbers;
  }
  return kept.data;
}

// Calls `call` with the C++ type of a dtype; returns false for an unsupported one.
template <typename Call>
bool typed(int32_t dtype, const Call& call) {
  if (dtype == aoti_torch_dtype_float32()) call.template operator()<float>();
  else if (dtype == aoti_torch_dtype_bfloat16()) call.template operator()<Bfloat>();
  else if (dtype == aoti_torch_dtype_float16()) call.template operator()<Half>();
  else return false;
  return true;
}
