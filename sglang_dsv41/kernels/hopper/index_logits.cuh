// Index logits of paged MXFP4 keys on Hopper (sm_90a), sparse and dense by one code path. Device code only: it includes
// nothing of SGLang, so that it also compiles on its own.
//
// A thread block is one warpgroup. Its warps copy blocks of 8 keys (512 B of E2M1 codes and 32 B of exponents) with
// 16-byte asynchronous copies, several tiles ahead; a tile is 128 columns, 32 a warp, scored in two halves so that one
// half's codes are decoded while the other's product runs. Codes become E5M2 by moved bits and are the M operand of WGMMA
// from registers, the heads are N. A 32-group's product is a multiple of 2^-2 below 2^11 in
// units of its two scales, which the tensor core holds exactly; key scales are applied in fp32 after it. Then SGLang's
// rounding points: bf16(dot) -> relu -> bf16(. * weight) -> fp32 sum over heads -> bf16. The sum over heads is a product
// with ones, whose operand layout is that of the scores.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

namespace dsv41 {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kBlock = 8;          // keys a copy; a block never crosses a page
constexpr int kWarpBlocks = 4;     // a warp's columns of a tile
constexpr int kWarpKeys = kWarpBlocks * kBlock;
constexpr int kTile = kWarps * kWarpKeys;  // columns a tile
constexpr int kHeadDim = 128;
constexpr int kGroups = 4;         // 32-groups a key, each with an exponent
constexpr int kHeadsPerPass = 32;  // N of the product
#ifndef DSV41_STAGES
#define DSV41_STAGES 3
#endif
constexpr int kStages = DSV41_STAGES;
constexpr int kStageBytes = kWarpKeys * 68;
constexpr int kExponentsAt = kWarpKeys * 64;  // within a stage
constexpr int kQueryBytes = kHeadsPerPass * kHeadDim;
#ifndef DSV41_BLOCKS_PER_SM
#define DSV41_BLOCKS_PER_SM 4
#endif

struct IndexLogitsParams {
  const __nv_bfloat16* q;        // [rows, heads, 128]
  const __nv_bfloat16* weights;  // [rows, heads]
  const uint8_t* pool;           // pages of page_slots * 64 B codes, then page_slots * 4 B exponents
  const int32_t* table;          // [rows, entries], 2^table_bits columns an entry
  const int32_t* lens;           // [rows] columns to score
  const int32_t* requests;       // [rows] or null: consecutive rows of one id have one table line and share key reads
  __nv_bfloat16* out;            // [rows, columns]
  __nv_bfloat16* maxima;         // [rows, columns / 8] or null: block maxima; +inf the newest, -inf outside the pool
  uint32_t num_slots;    // at most 2^31
  uint32_t page_stride;  // bytes
  int64_t table_stride;
  int64_t out_stride;
  int64_t maxima_stride;
  int32_t rows;
  int32_t heads;
  bool long_runs;  // groups of rows start at multiples of GROUP_ROWS, not counted from the request's first row
  int32_t page_bits;
  int32_t table_bits;
};

// GROUP_ROWS: most rows that share keys; HEAD_PASSES: heads / 32, rounded up.
template <int GROUP_ROWS, int HEAD_PASSES>
struct SharedStorage {
  alignas(128) uint8_t q[GROUP_ROWS * HEAD_PASSES][kQueryBytes];
  alignas(16) __nv_bfloat16 weights[GROUP_ROWS * HEAD_PASSES][kHeadsPerPass];
  alignas(128) uint8_t keys[kWarps][kStages][kStageBytes];
  alignas(16) float scales[kWarps][kWarpKeys][kGroups];
  int32_t lens[GROUP_ROWS];
  uint32_t exponents[GROUP_ROWS * HEAD_PASSES][kHeadsPerPass];
  uint32_t largest;  // of the exponents
  int32_t scan[kWarps];
  int32_t start_row;
  int32_t start_tile;
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void copy_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}

// Four E2M1 codes in the low (high) nibbles of x as E5M2, 2^14 too small.
__device__ __forceinline__ uint32_t low_codes(uint32_t x) {
  return ((x << 1) & 0x0e0e0e0eu) | ((x << 4) & 0x80808080u);
}
__device__ __forceinline__ uint32_t high_codes(uint32_t x) {
  return ((x >> 3) & 0x0e0e0e0eu) | (x & 0x80808080u);
}

// A UE8M0 exponent as fp32 bits; 0 is the subnormal 2^-127.
__device__ __forceinline__ uint32_t scale_bits(uint32_t exponent) {
  return max(exponent << 23, 0x00400000u);
}

__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ float4 load_shared_4(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// Queries as the K-major B operand without swizzle: cores of 8 heads x 16 B, heads 128 B apart, k halves 512 B apart.
__device__ __forceinline__ uint64_t query_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | (static_cast<uint64_t>(512 >> 4) << 16) |
         (static_cast<uint64_t>(128 >> 4) << 32);
}

// d [64, 32] = a [64, 32] (E5M2 in registers) x b [32, 32]^T (E5M2 in shared memory)
__device__ __forceinline__ void multiply(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e5m2.e5m2 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 0, 1, 1;"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),
        "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ uint32_t round_relu(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// c[0], c[2] += sums over 16 heads of rows g and g + 8
__device__ __forceinline__ void add_heads(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
  const uint32_t ones = 0x3f803f80u;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %8}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(ones));
}

__device__ __forceinline__ uint32_t to_e5m2_pair(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// One 32-group of one head, by one thread, as E5M2 codes in shared memory; returns the head's biased exponent, to which
// its queries are scaled. E5M2 spans the 30 binades that a head's groups may differ by. Groups keep even elements (low
// nibbles of the keys) before odd ones.
__device__ __forceinline__ uint32_t prepare_queries(const IndexLogitsParams& p, int64_t row, int head, uint8_t* q) {
  const int local = head % kHeadsPerPass, group = threadIdx.x & 3;
  uint4 raw[4] = {};
  if (head < p.heads) {
    const uint4* from = reinterpret_cast<const uint4*>(p.q + (row * p.heads + head) * kHeadDim + group * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = __ldg(from + i);
  }
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(raw);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) largest = max_pair(largest, pairs[i] & 0x7fff7fffu);
  largest = max(largest & 0xffffu, largest >> 16);
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
  const uint32_t exponent = min(max(largest >> 7, 32u), 246u);
  const float shrink = __uint_as_float((254u + 8u - exponent) << 23);
  uint4 even, odd;
  uint32_t* halves[2] = {reinterpret_cast<uint32_t*>(&even), reinterpret_cast<uint32_t*>(&odd)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low[4], high[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      low[k] = __uint_as_float(pairs[4 * i + k] << 16) * shrink;
      high[k] = __uint_as_float(pairs[4 * i + k] & 0xffff0000u) * shrink;
    }
    halves[0][i] = to_e5m2_pair(low[0], low[1]) | to_e5m2_pair(low[2], low[3]) << 16;
    halves[1][i] = to_e5m2_pair(high[0], high[1]) | to_e5m2_pair(high[2], high[3]) << 16;
  }
  uint8_t* core = q + group * (32 * kHeadsPerPass) + (local / 8) * 128 + (local % 8) * 16;
  *reinterpret_cast<uint4*>(core) = even;
  *reinterpret_cast<uint4*>(core + 512) = odd;
  return exponent;
}

// 2^(exponent - 8 + 14): undoes the scaling of queries and the 2^-14 of the keys' codes.
__device__ __forceinline__ float unscale(uint32_t exponent) {
  return __uint_as_float((exponent - 8u + 14u) << 23);
}

// Groups of up to GROUP_ROWS consecutive rows of one request.
template <int GROUP_ROWS>
struct Groups {
  const IndexLogitsParams& p;

  __device__ __forceinline__ int end(int start) const {
    if (GROUP_ROWS == 1) return start + 1;
    const int limit = p.long_runs ? (start / GROUP_ROWS + 1) * GROUP_ROWS : start + GROUP_ROWS;
    int row = start + 1;
    while (row < p.rows && row < limit && p.requests[row] == p.requests[start]) ++row;
    return row;
  }
  // The first group that starts at `row` or after it.
  __device__ __forceinline__ int first_from(int row) const {
    if (GROUP_ROWS == 1 || row >= p.rows) return row;
    int start = row;
    const int stop = p.long_runs ? row / GROUP_ROWS * GROUP_ROWS : 0;
    while (start > stop && p.requests[start - 1] == p.requests[row]) --start;
    const int before = row - (row - start) % GROUP_ROWS;
    return before == row ? row : end(before);
  }
  __device__ __forceinline__ int32_t length(int start, int end) const {
    int32_t longest = 0;
    for (int row = start; row < end; ++row) longest = max(longest, p.lens[row]);
    return longest;
  }
  __device__ __forceinline__ int32_t tiles(int start, int end) const { return (length(start, end) + kTile - 1) / kTile; }
};

template <int GROUP_ROWS, int HEAD_PASSES, bool MAXIMA>
__global__ __launch_bounds__(kThreads, HEAD_PASSES == 1 ? DSV41_BLOCKS_PER_SM : DSV41_BLOCKS_PER_SM - 1) void index_logits_kernel(
    const __grid_constant__ IndexLogitsParams p) {
  extern __shared__ uint8_t raw_storage[];
  using Storage = SharedStorage<GROUP_ROWS, HEAD_PASSES>;
  Storage& s = *reinterpret_cast<Storage*>((reinterpret_cast<uintptr_t>(raw_storage) + 127) & ~uintptr_t(127));
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int in_quad = lane & 3, key = lane >> 2;  // a thread's place in the operand layouts

  // What follows may start only once all before this kernel is done: it reads lengths before it waits for this one.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");

  // This block's even share of all live tiles, whatever the lengths of the rows.
  const Groups<GROUP_ROWS> groups{p};
  int64_t begin, end;
  int row0, first_tile;
  if (GROUP_ROWS == 1 && p.rows <= 32) {  // a warp sees all rows at once
    const int32_t mine = lane < p.rows ? (p.lens[lane] + kTile - 1) / kTile : 0;
    int32_t sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    const int64_t total = __shfl_sync(~0u, sum, 31);
    begin = total * blockIdx.x / gridDim.x;
    end = total * (blockIdx.x + 1) / gridDim.x;
    if (begin == end) return;
    row0 = __ffs(__ballot_sync(~0u, begin < sum)) - 1;
    first_tile = static_cast<int>(begin) - __shfl_sync(~0u, sum - mine, row0);
  } else {
    const int chunk = (p.rows + kThreads - 1) / kThreads;
    const int first_row = min(thread * chunk, p.rows), last_row = min(first_row + chunk, p.rows);
    int32_t mine = 0;
    for (int row = groups.first_from(first_row); row < last_row;) {
      const int next = groups.end(row);
      mine += groups.tiles(row, next);
      row = next;
    }
    int32_t sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) s.scan[warp] = sum;
    __syncthreads();
    int32_t before = sum - mine, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += s.scan[w];
      total += s.scan[w];
    }
    begin = static_cast<int64_t>(total) * blockIdx.x / gridDim.x;
    end = static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x;
    if (begin == end) return;
    if (before <= begin && begin < before + mine) {
      int32_t at = before;
      int row = groups.first_from(first_row);
      for (;;) {
        const int next = groups.end(row);
        const int32_t tiles = groups.tiles(row, next);
        if (begin < at + tiles) break;
        at += tiles;
        row = next;
      }
      s.start_row = row;
      s.start_tile = static_cast<int32_t>(begin - at);
    }
    __syncthreads();
    row0 = s.start_row;
    first_tile = s.start_tile;
  }
  int32_t left = static_cast<int32_t>(end - begin);

  const uint32_t table_mask = (1u << p.table_bits) - 1;
  const uint32_t num_entries = (p.num_slots + table_mask) >> p.table_bits;
  const uint32_t keys = shared_address(s.keys[warp]), scales = shared_address(s.scales[warp]);
  // Eight lanes copy a block, a lane four 16-byte pieces 128 B apart, and two of them its exponents. Pieces of a key
  // change places so that the same group of eight keys lies in different banks.
  const int piece = lane & 7, copied = lane >> 3;
  const uint32_t to_codes = copied * 512 + piece * 16, to_exponents = kExponentsAt + copied * 32 + piece * 16;
  const uint32_t read_from = (lane & 7) * 64 + ((lane >> 3) ^ ((lane & 7) >> 1)) * 16;
  // A slot's bytes lie at slot * size, and the rest of a page for each page before it.
  const uint8_t* codes_base = p.pool + piece * 16;
  const uint8_t* exponents_base = p.pool + (64u << p.page_bits) + piece * 16;
  const uint32_t codes_rest = p.page_stride - (64u << p.page_bits), exponents_rest = p.page_stride - (4u << p.page_bits);
  const uint64_t first_query = query_descriptor(shared_address(s.q[0]));

  for (int next_row; left > 0; row0 = next_row) {
    next_row = groups.end(row0);
    const int rows = GROUP_ROWS == 1 ? 1 : next_row - row0;
    const int32_t length = groups.length(row0, next_row);
    const int32_t tiles = min((length + kTile - 1) / kTile - first_tile, left);
    if (tiles <= 0) {
      first_tile = 0;
      continue;
    }
    const int32_t* line = p.table + row0 * p.table_stride;
    const int first_column = first_tile * kTile + warp * kWarpKeys;
    uint32_t outside = 0;  // four bits a stage: the block does not lie in the pool

    const auto entry_of = [&](int tile) {
      const int column = first_column + tile * kTile + copied * kBlock;
      return tile < tiles && column < length ? __ldg(line + (column >> p.table_bits)) : -1;
    };
    const auto copy = [&](int tile, int entry) {
      const uint32_t stage = tile % kStages, to = keys + stage * kStageBytes;
      const uint32_t column = first_column + tile * kTile + copied * kBlock;
      const uint32_t slot = static_cast<uint32_t>(entry) << p.table_bits | (column & table_mask);
      const bool valid = static_cast<uint32_t>(entry) < num_entries && slot < p.num_slots;
      const uint32_t page = slot >> p.page_bits;
      const uint8_t* codes = codes_base + static_cast<uint64_t>(slot) * 64 + static_cast<uint64_t>(page) * codes_rest;
#pragma unroll
      for (int i = 0; i < 4; ++i) copy_16(to + (to_codes ^ i * 16) + i * 128, codes + i * 128, valid);
      if (piece < 2)
        copy_16(
            to + to_exponents,
            exponents_base + static_cast<uint64_t>(slot) * 4 + static_cast<uint64_t>(page) * exponents_rest,
            valid);
      const uint32_t good = __ballot_sync(~0u, valid);
      if (outside != 0 || good != ~0u) {
        const uint32_t four = (good & 1) | (good >> 7 & 2) | (good >> 14 & 4) | (good >> 21 & 8);
        outside = (outside & ~(15u << (4 * stage))) | (four ^ 15u) << (4 * stage);
      }
    };

    int entries[kStages];
#pragma unroll
    for (int i = 0; i < kStages; ++i) entries[i] = entry_of(i);
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      copy(i, entries[i]);
      asm volatile("cp.async.commit_group;");
    }
    int next = entries[kStages - 1];

    __syncthreads();  // the last group's queries are read
    if (thread == 0) s.largest = 0;
    __syncthreads();
    for (int block = 0; block < rows * HEAD_PASSES; ++block) {
      const int head = block % HEAD_PASSES * kHeadsPerPass + thread / 4;
      const int64_t row = row0 + block / HEAD_PASSES;
      __nv_bfloat16 weight = __ushort_as_bfloat16(0);
      if (in_quad == 0 && head < p.heads) weight = p.weights[row * p.heads + head];
      const uint32_t exponent = prepare_queries(p, row, head, s.q[block]);
      if (in_quad == 0) {
        s.exponents[block][thread / 4] = exponent;
        s.weights[block][thread / 4] = weight;
      }
      const uint32_t of_warp = __reduce_max_sync(~0u, head < p.heads ? exponent : 0);
      if (lane == 0) atomicMax(&s.largest, of_warp);
    }
    if (GROUP_ROWS > 1 && thread < rows) s.lens[thread] = p.lens[row0 + thread];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    // The largest power of two of the queries goes into the keys' scales, what a head lacks to it into its weight.
    const float query_scale = unscale(s.largest);
    for (int i = thread; i < rows * HEAD_PASSES * kHeadsPerPass; i += kThreads) {
      const int block = i / kHeadsPerPass, local = i % kHeadsPerPass;
      const float weight = __bfloat162float(s.weights[block][local]);
      const int shift = static_cast<int>(s.exponents[block][local]) - static_cast<int>(s.largest) + 127;
      s.weights[block][local] = __float2bfloat16(weight * __uint_as_float(static_cast<uint32_t>(max(shift, 1)) << 23));
    }
    __syncthreads();

    uint32_t own_weights[4];  // of a lone row's heads, in registers
    if (GROUP_ROWS * HEAD_PASSES == 1) {
#pragma unroll
      for (int n = 0; n < 4; ++n) own_weights[n] = load_shared(shared_address(s.weights[0]) + (4 * n + in_quad) * 4);
    }

    for (int tile = 0; tile < tiles; ++tile) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncwarp();
      const uint32_t stage = tile % kStages, from = keys + stage * kStageBytes;
      {  // a lane turns a key's exponents into fp32 scales
        const uint32_t exponents = load_shared(from + kExponentsAt + lane * 4);
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(scales + lane * 16),
                     "f"(__uint_as_float(scale_bits(exponents & 255u)) * query_scale),
                     "f"(__uint_as_float(scale_bits(exponents >> 8 & 255u)) * query_scale),
                     "f"(__uint_as_float(scale_bits(exponents >> 16 & 255u)) * query_scale),
                     "f"(__uint_as_float(scale_bits(exponents >> 24)) * query_scale)
                     : "memory");
      }
      const uint32_t tile_outside = outside >> (4 * stage);

      uint32_t a[2][kGroups][4];  // a half is 64 columns, 16 a warp
      const auto decode = [&](int half) {
        uint32_t codes[2][4];
        load_matrices(codes[0], from + half * 1024 + read_from);
        load_matrices(codes[1], from + half * 1024 + 512 + read_from);
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          a[half][j][0] = low_codes(codes[0][j]);
          a[half][j][1] = low_codes(codes[1][j]);
          a[half][j][2] = high_codes(codes[0][j]);
          a[half][j][3] = high_codes(codes[1][j]);
        }
      };
      float d[kGroups][16];
      const auto start = [&](int half, int block) {
        const uint64_t query = first_query + block * (kQueryBytes / 16);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int j = 0; j < kGroups; ++j) multiply(d[j], a[half][j], query + j * (32 * kHeadsPerPass / 16));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      };
      const auto finish = [&](int half, int block, float (&sums)[4]) {
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        // Nothing that reads the products, or writes the codes, may move before the wait.
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
          for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(d[j][i])::"memory");
#pragma unroll
          for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[half][j][i])::"memory");
        }
        uint32_t scores[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float4 scale = load_shared_4(scales + (half * 16 + h * 8 + key) * 16);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            float dot[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int at = 4 * n + 2 * h + e;
              dot[e] = d[0][at] * scale.x;
              dot[e] = fmaf(d[1][at], scale.y, dot[e]);
              dot[e] = fmaf(d[2][at], scale.z, dot[e]);
              dot[e] = fmaf(d[3][at], scale.w, dot[e]);
            }
            scores[h][n] = round_relu(dot[0], dot[1]);
          }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint32_t weights = GROUP_ROWS * HEAD_PASSES == 1
                                       ? own_weights[n]
                                       : load_shared(shared_address(s.weights[block]) + (4 * n + in_quad) * 4);
          scores[0][n] = multiply_pair(scores[0][n], weights);
          scores[1][n] = multiply_pair(scores[1][n], weights);
        }
        add_heads(sums, scores[0][0], scores[1][0], scores[0][1], scores[1][1]);
        add_heads(sums, scores[0][2], scores[1][2], scores[0][3], scores[1][3]);
      };
      const int column = first_column + tile * kTile + in_quad * kBlock + key;  // a lane of a quad stores its block
      const auto store = [&](int r, const float (&first)[4], const float (&second)[4]) {
        const int32_t row_length = GROUP_ROWS == 1 ? length : s.lens[r];
        const float low = in_quad & 2 ? second[0] : first[0], high = in_quad & 2 ? second[2] : first[2];
        const bool is_outside = tile_outside >> in_quad & 1;
        const __nv_bfloat16 logit = __float2bfloat16(is_outside ? -INFINITY : in_quad & 1 ? high : low);
        if (column < row_length) p.out[static_cast<int64_t>(row0 + r) * p.out_stride + column] = logit;
        if (MAXIMA) {
          const __nv_bfloat16 lowest = __ushort_as_bfloat16(0xff7f);
          // A visible block of NaN or -inf logits stays a block, after every other; the newest comes first. One outside
          // the pool is none.
          uint32_t best = __bfloat16_as_ushort(column < row_length && logit > lowest ? logit : lowest);
#pragma unroll
          for (int step = 4; step < 32; step <<= 1) best = max_pair(best, __shfl_xor_sync(~0u, best, step));
          const int block = column >> 3;
          if (best == 0x7f80) best = 0x7f7f;  // an overflow must not tie with the newest block
          if (block == (row_length - 1) >> 3) best = 0x7f80;
          if (is_outside) best = 0xff80;
          if (lane < kWarpBlocks && block * kBlock < row_length)
            p.maxima[static_cast<int64_t>(row0 + r) * p.maxima_stride + block] =
                __ushort_as_bfloat16(static_cast<uint16_t>(best));
        }
      };
      const auto refill = [&] {
        copy(tile + kStages - 1, next);
        asm volatile("cp.async.commit_group;");
        next = entry_of(tile + kStages);
      };

      if (GROUP_ROWS * HEAD_PASSES == 1) {
        float first[4] = {0.0f, 0.0f, 0.0f, 0.0f}, second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        decode(0);
        start(0, 0);
        refill();
        decode(1);
        __syncwarp();  // the scales are written
        finish(0, 0, first);
        start(1, 0);
        finish(1, 0, second);
        store(0, first, second);
      } else {
        decode(0);
        decode(1);
        refill();
        __syncwarp();
        for (int r = 0; r < rows; ++r) {
          float first[4] = {0.0f, 0.0f, 0.0f, 0.0f}, second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int pass = 0; pass < HEAD_PASSES; ++pass) {
            start(0, r * HEAD_PASSES + pass);
            finish(0, r * HEAD_PASSES + pass, first);
            start(1, r * HEAD_PASSES + pass);
            finish(1, r * HEAD_PASSES + pass, second);
          }
          store(r, first, second);
        }
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    left -= tiles;
    first_tile = 0;
  }
}

template <int GROUP_ROWS, int HEAD_PASSES>
constexpr int shared_bytes() {
  return static_cast<int>(sizeof(SharedStorage<GROUP_ROWS, HEAD_PASSES>)) + 128;
}

}  // namespace dsv41
