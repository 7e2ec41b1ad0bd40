// What every kernel includes: the tensor of the binary interface, and how to ask one for its kind.
#pragma once

#include <ATen/dlpack.h>

#include <cstddef>
#include <cstdint>

#define STROP_KERNEL extern "C" __attribute__((visibility("default"))) int

inline bool is(const DLTensor* tensor, uint8_t code, uint8_t bits) {
  return tensor->dtype.code == code && tensor->dtype.bits == bits && tensor->dtype.lanes == 1;
}

inline bool is_bf16(const DLTensor* tensor) { return is(tensor, kDLBfloat, 16); }
inline bool is_f32(const DLTensor* tensor) { return is(tensor, kDLFloat, 32); }
inline bool is_i8(const DLTensor* tensor) { return is(tensor, kDLInt, 8); }
inline bool is_i32(const DLTensor* tensor) { return is(tensor, kDLInt, 32); }
inline bool is_i64(const DLTensor* tensor) { return is(tensor, kDLInt, 64); }

// Whether elements lie one after the other, in order.
inline bool is_dense(const DLTensor* tensor) {
  int64_t expected = 1;
  for (int i = tensor->ndim - 1; i >= 0; i--) {
    if (tensor->shape[i] != 1 && tensor->strides[i] != expected) return false;
    expected *= tensor->shape[i];
  }
  return true;
}

template <typename T>
T* data(const DLTensor* tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor->data) + tensor->byte_offset);
}
