// Torch operators over kernels that are attached at run time: `strop_kernels::linear`. The operators go
// through torch's stable interface, so this file compiles in seconds and an object outlives a torch release.
//
// A call counts as a call of the kernel only when the kernel took it. What a kernel refuses is computed
// here, plainly and slowly, and counted as a refusal: an engine goes on, and its counters tell.
#include "kernel.h"

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Kernel = int (*)(const DLTensor* const*, int, DLTensor* const*, int);

struct Attached {
  std::atomic<Kernel> kernel{nullptr};
  std::atomic<int64_t> calls{0}, refusals{0};
} attached_linear;


DLDataType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return {kDLFloat, 32, 1};
    case ScalarType::BFloat16: return {kDLBfloat, 16, 1};
    case ScalarType::Half: return {kDLFloat, 16, 1};
    case ScalarType::Char: return {kDLInt, 8, 1};
    case ScalarType::Int: return {kDLInt, 32, 1};
    default: return {kDLOpaqueHandle, 8, 1};
  }
}

DLTensor describe(const Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()),
          {kDLCPU, 0},
          static_cast<int32_t>(tensor.dim()),
          dtype_of(tensor),
          const_cast<int64_t*>(tensor.sizes().data()),
          const_cast<int64_t*>(tensor.strides().data()),
          0};
}

// The same memory as a matrix of its last dimension.
void as_matrix(DLTensor& tensor, int64_t* shape, int64_t* strides, int64_t rows, int64_t columns) {
  shape[0] = rows, shape[1] = columns;
  strides[0] = columns, strides[1] = 1;
  tensor.ndim = 2, tensor.shape = shape, tensor.strides = strides;
}

float bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Value of a packed weight: see linear.cpp and linear.py for the layouts.
float weight_at(const DLTensor& packed, const DLTensor* scale, int64_t k_count, int64_t n, int64_t k) {
  const int64_t panel = n / 16, lane = n % 16;
  if (is_bf16(&packed)) return bf16(data<uint16_t>(&packed)[(panel * k_count + k) * 16 + lane % 8 * 2 + lane / 8]);
  if (is_i8(&packed)) return data<int8_t>(&packed)[(panel * k_count + k) * 16 + lane] * data<float>(scale)[n];
  const uint32_t word = data<uint32_t>(&packed)[(panel * k_count / 8 + k / 8) * 16 + lane];
  const int digit = word >> (4 * (k % 8)) & 15;
  const int value = k % 8 == 7 ? (digit ^ 8) - 8 : digit - 8;
  const int64_t groups = scale->shape[1];
  return value * bf16(data<uint16_t>(scale)[(panel * groups + k / (k_count / groups)) * 16 + lane]);
}

Tensor plainly(const Tensor& given, const DLTensor& packed, const DLTensor* scale, const DLTensor* bias,
               const std::vector<int64_t>& sizes) {
  Tensor x = torch::stable::to(torch::stable::contiguous(given), ScalarType::Float);
  Tensor y = torch::stable::new_empty(x, sizes);
  const int64_t k_count = x.size(x.dim() - 1), channels = sizes.back(), rows = k_count ? x.numel() / k_count : 0;
  const float* from = static_cast<const float*>(x.const_data_ptr());
  float* to = static_cast<float*>(y.mutable_data_ptr());
#pragma omp parallel for
  for (int64_t n = 0; n < channels; n++) {
    std::vector<float> weights(k_count);
    for (int64_t k = 0; k < k_count; k++) weights[k] = weight_at(packed, scale, k_count, n, k);
    const float start = !bias ? 0 : is_bf16(bias) ? bf16(data<uint16_t>(bias)[n]) : data<float>(bias)[n];
    for (int64_t m = 0; m < rows; m++) {
      double sum = start;
      for (int64_t k = 0; k < k_count; k++) sum += static_cast<double>(weights[k]) * from[m * k_count + k];
      to[m * channels + n] = sum;
    }
  }
  return torch::stable::to(y, given.scalar_type());
}

Tensor linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> scale, std::optional<Tensor> bias,
              int64_t channels) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  const int64_t k = sizes.back();
  sizes.back() = channels;
  DLTensor given = describe(x), packed = describe(weight), scales, added;
  const DLTensor* in[4] = {&given, &packed};
  int count = 2;
  if (scale) scales = describe(*scale), in[count++] = &scales;
  if (bias) added = describe(*bias), in[count++] = &added;
  const Kernel kernel = attached_linear.kernel.load(std::memory_order_acquire);
  if (kernel && k > 0) {
    Tensor y = torch::stable::new_empty(x, sizes);
    DLTensor made = describe(y);
    int64_t x_shape[2], x_strides[2], y_shape[2], y_strides[2];
    const int64_t rows = x.numel() / k;
    if (x.dim() != 2 && x.is_contiguous()) {
      as_matrix(given, x_shape, x_strides, rows, k);
      as_matrix(made, y_shape, y_strides, rows, channels);
    }
    DLTensor* out[1] = {&made};
    if (kernel(in, count, out, 1) == 0) {
      attached_linear.calls.fetch_add(1, std::memory_order_relaxed);
      return y;
    }
  }
  attached_linear.refusals.fetch_add(1, std::memory_order_relaxed);
  return plainly(x, packed, scale ? &scales : nullptr, bias ? &added : nullptr, sizes);
}

}  // namespace

STABLE_TORCH_LIBRARY(strop_kernels, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int channels) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(strop_kernels, CPU, library) { library.impl("linear", TORCH_BOX(&linear)); }

// The error, or null. A null path detaches.
extern "C" const char* strop_attach_linear(const char* path, const char* name) {
  if (!path) return attached_linear.kernel.store(nullptr), nullptr;
  void* object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* found = object ? dlsym(object, name) : nullptr;
  if (!found) return dlerror();
  attached_linear.kernel.store(reinterpret_cast<Kernel>(found), std::memory_order_release);
  return nullptr;
}
extern "C" int64_t strop_calls_linear() { return attached_linear.calls.load(); }
extern "C" int64_t strop_refusals_linear() { return attached_linear.refusals.load(); }
