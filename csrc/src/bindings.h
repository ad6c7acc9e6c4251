// What the files that know torch share: checks, and the current stream. On torch's stable ABI (see bindings.cpp).
#pragma once

#include <cstdint>
#include <limits>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "punica/params.h"

// Lives in libtorch_cuda only. Weak, so that the library also loads beside a CPU build of torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace punica {

inline int to_int(int64_t value) {
  STD_TORCH_CHECK(value >= 0 && value <= std::numeric_limits<int>::max(), "size ", value, " does not fit 32 bits");
  return static_cast<int>(value);
}

inline void check_cuda(cudaError_t error, char const* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "punica::", what, ": ", cudaGetErrorString(error));
}

inline LaunchConfig launch_config(torch::stable::Tensor const& on_device) {
  int const device = on_device.get_device_index();
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this build of torch has no CUDA");
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0, "cannot get the current CUDA stream");
  int num_sms = 0;
  int major = 0;
  int minor = 0;
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "device");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device");
  return {num_sms, major >= 9, static_cast<cudaStream_t>(stream), major == 9 && minor == 0, device};
}

}  // namespace punica
