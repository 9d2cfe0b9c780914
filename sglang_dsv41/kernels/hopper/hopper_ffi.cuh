// Entry points for SGLang's JIT loader.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "index_logits.cuh"
#include "selection.cuh"

namespace dsv41 {

inline cudaStream_t stream_of(const tvm::ffi::TensorView& t) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(t.device().device_type, t.device().device_id));
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "dsv41-sparse: " << what << ": " << cudaGetErrorString(error);
}

template <typename Kernel, typename Params>
void launch(
    Kernel kernel,
    int64_t grid,
    int threads,
    int bytes,
    int cluster,
    cudaStream_t stream,
    const Params& params,
    const char* what) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  // The kernels wait for their predecessor before they read anything, so they may start while it ends.
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, params), what);
}

// Thread blocks that the device holds at once, asked once a device.
template <typename Kernel>
int resident_blocks(Kernel kernel, int bytes, int device) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory of the kernel");
  int per_sm = 0, sms = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kThreads, bytes), "occupancy");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
  return per_sm * sms;
}

template <int GROUP_ROWS, int HEAD_PASSES, bool MAXIMA>
void launch_index_logits(const IndexLogitsParams& p, int64_t columns, int device, cudaStream_t stream) {
  auto kernel = index_logits_kernel<GROUP_ROWS, HEAD_PASSES, MAXIMA>;
  constexpr int bytes = shared_bytes<GROUP_ROWS, HEAD_PASSES>();
  static int resident[64] = {};
  if (resident[device] == 0) resident[device] = resident_blocks(kernel, bytes, device);
  const int64_t tiles = p.rows * ((columns + kTile - 1) / kTile);
  const int grid = static_cast<int>(tiles < resident[device] ? tiles : resident[device]);
  launch(kernel, grid, kThreads, bytes, 1, stream, p, "index logits");
}

template <int GROUP_ROWS, int HEAD_PASSES>
void launch_index_logits(const IndexLogitsParams& p, int64_t columns, int device, cudaStream_t stream) {
  if (p.maxima != nullptr)
    launch_index_logits<GROUP_ROWS, HEAD_PASSES, true>(p, columns, device, stream);
  else
    launch_index_logits<GROUP_ROWS, HEAD_PASSES, false>(p, columns, device, stream);
}

// Shapes, dtypes and contiguity are the Python caller's to check. An absent tensor has no elements.
void index_logits(
    tvm::ffi::TensorView q,
    tvm::ffi::TensorView weights,
    tvm::ffi::TensorView pool,
    int64_t page_slots,
    tvm::ffi::TensorView table,
    int64_t table_slots,
    tvm::ffi::TensorView lens,
    tvm::ffi::TensorView requests,
    bool long_runs,
    tvm::ffi::TensorView out,
    tvm::ffi::TensorView maxima) {
  IndexLogitsParams p = {};
  p.q = static_cast<const __nv_bfloat16*>(q.data_ptr());
  p.weights = static_cast<const __nv_bfloat16*>(weights.data_ptr());
  p.pool = static_cast<const uint8_t*>(pool.data_ptr());
  p.table = static_cast<const int32_t*>(table.data_ptr());
  p.lens = static_cast<const int32_t*>(lens.data_ptr());
  p.requests = requests.numel() ? static_cast<const int32_t*>(requests.data_ptr()) : nullptr;
  p.out = static_cast<__nv_bfloat16*>(out.data_ptr());
  p.maxima = maxima.numel() ? static_cast<__nv_bfloat16*>(maxima.data_ptr()) : nullptr;
  p.num_slots = static_cast<uint32_t>(pool.size(0) * page_slots);
  p.page_stride = static_cast<uint32_t>(pool.stride(0));
  p.table_stride = table.stride(0);
  p.out_stride = out.stride(0);
  p.maxima_stride = p.maxima ? maxima.stride(0) : 0;
  p.long_runs = long_runs;
  p.rows = static_cast<int32_t>(q.size(0));
  p.heads = static_cast<int32_t>(q.size(1));
  p.page_bits = 63 - __builtin_clzll(page_slots);
  p.table_bits = 63 - __builtin_clzll(table_slots);
  const int device = q.device().device_id;
  const cudaStream_t stream = stream_of(q);
  const int64_t columns = out.size(1);
  if (p.requests == nullptr) {
    if (p.heads <= kHeadsPerPass)
      launch_index_logits<1, 1>(p, columns, device, stream);
    else
      launch_index_logits<1, 2>(p, columns, device, stream);
  } else {
    if (p.heads <= kHeadsPerPass)
      launch_index_logits<8, 1>(p, columns, device, stream);
    else
      launch_index_logits<8, 2>(p, columns, device, stream);
  }
}

template <typename T>
T* data_or_null(const tvm::ffi::TensorView& t) {
  return t.numel() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

void source_topk(
    tvm::ffi::TensorView logits,
    tvm::ffi::TensorView maxima,
    tvm::ffi::TensorView lens,
    tvm::ffi::TensorView table,
    int64_t table_slots,
    int64_t topk,
    int64_t blocks_kept,
    tvm::ffi::TensorView slots,
    tvm::ffi::TensorView positions,
    tvm::ffi::TensorView sparse_indices,
    tvm::ffi::TensorView physical_blocks,
    tvm::ffi::TensorView valid_columns) {
  SourceTopkParams p = {};
  p.logits = static_cast<const __nv_bfloat16*>(logits.data_ptr());
  p.maxima = static_cast<const __nv_bfloat16*>(maxima.data_ptr());
  p.lens = static_cast<const int32_t*>(lens.data_ptr());
  p.table = static_cast<const int32_t*>(table.data_ptr());
  p.slots = data_or_null<int32_t>(slots);
  p.positions = data_or_null<int32_t>(positions);
  p.sparse_indices = data_or_null<int32_t>(sparse_indices);
  p.physical_blocks = data_or_null<int32_t>(physical_blocks);
  p.valid_columns = data_or_null<int32_t>(valid_columns);
  p.logits_stride = logits.stride(0);
  p.maxima_stride = maxima.stride(0);
  p.table_stride = table.stride(0);
  if (p.slots != nullptr) {
    p.slots_stride = slots.stride(0);
    p.slots_width = static_cast<int32_t>(slots.size(1));
  }
  if (p.positions != nullptr) {
    p.positions_stride = positions.stride(0);
    p.positions_width = static_cast<int32_t>(positions.size(1));
  }
  p.blocks_kept = static_cast<int32_t>(blocks_kept);
  p.topk = static_cast<int32_t>(topk);
  p.table_bits = 63 - __builtin_clzll(table_slots);
  const int64_t rows = lens.size(0), needed = (maxima.size(1) + kKeysPerCta - 1) / kKeysPerCta;
  const cudaStream_t stream = stream_of(lens);
  const char* what = "top-k of a source";
  if (needed <= 1)
    launch(source_topk_kernel<1>, rows, kSelectThreads, 0, 1, stream, p, what);
  else if (needed <= 2)
    launch(source_topk_kernel<2>, rows * 2, kSelectThreads, 0, 2, stream, p, what);
  else if (needed <= 4)
    launch(source_topk_kernel<4>, rows * 4, kSelectThreads, 0, 4, stream, p, what);
  else
    launch(source_topk_kernel<8>, rows * 8, kSelectThreads, 0, 8, stream, p, what);
}

}  // namespace dsv41
