// What a source makes of its dense logits, a thread block of 1024 a row: its own top-k and its candidate schedule. Keys
// are bf16 and stay in registers, 16 a thread. The k-th largest is found by a search over the 16 bits of a threshold, two
// at a time, which no distribution of keys slows down; picks are compacted in their own order, so that nothing is sorted,
// and of keys equal to the k-th the first stay: reruns are alike.
//
// Selection goes through blocks: at most k blocks hold the k largest logits, so those with the largest maxima, one more
// than k because the newest is always among them, hold them, and only those logits are read again. Contexts of more than
// 131,072 positions spread over a cluster.
//
// What follows is SGLang's, and may read picks before it waits for its predecessor; so this kernel never lets it start
// early.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

namespace dsv41 {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kKeys = 16;                        // a thread
constexpr int kPairs = kKeys / 2;                // bf16x2
constexpr int kKeysPerCta = kSelectThreads * kKeys;
constexpr int kMaxBlocks = 2048;                 // most blocks that a source chooses
constexpr int kMaxCluster = 8;
constexpr int32_t kNoBlock = 0x7fffffff;
constexpr uint32_t kNoKey = 0xffffu;             // a NaN: no comparison holds, so it is never counted nor taken
constexpr uint32_t kLowestCode = 0x007fu;        // -inf in the order of `value_of`

// The intrinsics of sm_90_rt.h, which nvcc always includes; cooperative_groups.h would pull in a library whose version
// must fit the compiler's.
__device__ __forceinline__ void cluster_sync() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

template <typename T>
__device__ __forceinline__ T* in_block(T* shared, int rank) {
  return static_cast<T*>(__cluster_map_shared_rank(shared, rank));
}

struct SelectStorage {
  uint32_t counts[2][kSelectWarps];
  uint32_t totals[2][kMaxCluster][2];  // of each block of the cluster
  int32_t list[kMaxBlocks];
};

// The bf16 value of a code; unsigned codes are in the order of their values, NaN aside.
__device__ __forceinline__ uint32_t value_of(uint32_t code) {
  code = max(code, kLowestCode);
  return code & 0x8000u ? code ^ 0x8000u : code ^ 0xffffu;
}

__device__ __forceinline__ __nv_bfloat162 as_pair(uint32_t bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

__device__ __forceinline__ uint32_t count_of(const __nv_bfloat162& ones) {
  return static_cast<uint32_t>(__bfloat162float(ones.x) + __bfloat162float(ones.y));
}

template <int CLUSTER>
struct Row {
  SelectStorage& s;
  const int thread = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

  // Sums over the row of up to three counts, each at most 16 a thread.
  __device__ __forceinline__ void sum(uint32_t packed, int round, uint32_t& low, uint32_t& middle, uint32_t& high) {
    uint32_t* counts = s.counts[round & 1];
    const uint32_t of_warp = __reduce_add_sync(~0u, packed);  // 3 x 10 bits
    if (lane == 0) counts[warp] = of_warp;
    __syncthreads();
    const uint32_t mine = counts[lane];
    const uint32_t two = __reduce_add_sync(~0u, (mine & 1023u) | (mine >> 10 & 1023u) << 16);
    high = __reduce_add_sync(~0u, mine >> 20);
    low = two & 0xffffu;
    middle = two >> 16;
    if (CLUSTER > 1) {
      if (thread < CLUSTER) {
        uint32_t* to = in_block(&s.totals[round & 1][__clusterRelativeBlockRank()][0], thread);
        to[0] = two;
        to[1] = high;
      }
      cluster_sync();
      low = middle = high = 0;
#pragma unroll
      for (int r = 0; r < CLUSTER; ++r) {
        low += s.totals[round & 1][r][0] & 0xffffu;
        middle += s.totals[round & 1][r][0] >> 16;
        high += s.totals[round & 1][r][1];
      }
    }
  }

  // The largest value that at least k keys reach, as bf16 bits in both halves; -inf where fewer than k keys are any.
  __device__ __forceinline__ uint32_t kth_largest(const uint32_t (&keys)[kPairs], uint32_t k) {
    uint32_t code = 0;
#pragma unroll 1
    for (int shift = 14; shift >= 0; shift -= 2) {
      uint32_t packed = 0;
#pragma unroll
      for (int step = 1; step <= 3; ++step) {
        const uint32_t value = value_of(code + (static_cast<uint32_t>(step) << shift));
        const __nv_bfloat162 threshold = as_pair(value | value << 16);
        __nv_bfloat162 ones = __hge2(as_pair(keys[0]), threshold);
#pragma unroll
        for (int i = 1; i < kPairs; ++i) ones = __hadd2(ones, __hge2(as_pair(keys[i]), threshold));
        packed |= count_of(ones) << (10 * (step - 1));
      }
      uint32_t reached[3];
      sum(packed, shift >> 1, reached[0], reached[1], reached[2]);
      code += ((reached[0] >= k) + (reached[1] >= k) + (reached[2] >= k)) << shift;
    }
    const uint32_t value = value_of(code);
    return value | value << 16;
  }

  // Calls take(place, index of the thread's key) for the k largest keys, places in the order of keys; returns how many.
  template <typename Take>
  __device__ __forceinline__ uint32_t take_largest(const uint32_t (&keys)[kPairs], uint32_t k, bool all, Take&& take) {
    const uint32_t lowest = 0xff80ff80u;
    const uint32_t pivot = all ? lowest : kth_largest(keys, k);
    uint32_t greater = 0, equal = 0;  // a bit a key
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t g = __hgt2_mask(as_pair(keys[i]), as_pair(pivot)), e = __heq2_mask(as_pair(keys[i]), as_pair(pivot));
      greater |= (g & 1u) << (2 * i) | (g >> 31) << (2 * i + 1);
      equal |= (e & 1u) << (2 * i) | (e >> 31) << (2 * i + 1);
    }
    const uint32_t mine = __popc(greater) | __popc(equal) << 16;
    uint32_t inclusive = mine;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t other = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    uint32_t* counts = s.counts[0];
    __syncthreads();  // the search has read its counts
    if (lane == 31) counts[warp] = inclusive;
    __syncthreads();
    uint32_t of_warps = counts[lane];
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t other = __shfl_up_sync(~0u, of_warps, step);
      if (lane >= step) of_warps += other;
    }
    uint32_t total = __shfl_sync(~0u, of_warps, 31);
    uint32_t before = __shfl_sync(~0u, of_warps, (warp + 31) & 31);
    if (warp == 0) before = 0;
    before += inclusive - mine;
    uint32_t greater_before = before & 0xffffu, equal_before = before >> 16;
    uint32_t greater_total = total & 0xffffu, equal_total = total >> 16;
    if (CLUSTER > 1) {
      const int rank = __clusterRelativeBlockRank();
      cluster_sync();  // the search has read its totals
      if (thread < CLUSTER) {
        uint32_t* to = in_block(&s.totals[0][rank][0], thread);
        to[0] = greater_total;
        to[1] = equal_total;
      }
      cluster_sync();
      greater_total = equal_total = 0;
#pragma unroll
      for (int r = 0; r < CLUSTER; ++r) {
        if (r < rank) {
          greater_before += s.totals[0][r][0];
          equal_before += s.totals[0][r][1];
        }
        greater_total += s.totals[0][r][0];
        equal_total += s.totals[0][r][1];
      }
    }
    const uint32_t room = k > greater_total ? k - greater_total : 0;  // for keys equal to the pivot
    uint32_t places = greater | equal;
    while (places != 0) {
      const int i = __ffs(places) - 1;
      places &= places - 1;
      const bool is_greater = greater >> i & 1;
      if (is_greater || equal_before < room) take(greater_before + min(equal_before, room), i);
      greater_before += is_greater;
      equal_before += !is_greater;
    }
    return greater_total + min(equal_total, room);
  }
};

// Keys of 8 logits from `from`; those from `limit` on are none, and not read.
__device__ __forceinline__ void load_keys(uint32_t* keys, const __nv_bfloat16* from, int limit) {
  uint4 raw = make_uint4(~0u, ~0u, ~0u, ~0u);
  if (limit >= 8) raw = *reinterpret_cast<const uint4*>(from);
  keys[0] = raw.x, keys[1] = raw.y, keys[2] = raw.z, keys[3] = raw.w;
  if (limit <= 0 || limit >= 8) return;
  const uint16_t* one = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 2 * i < limit ? one[2 * i] : kNoKey, high = 2 * i + 1 < limit ? one[2 * i + 1] : kNoKey;
    keys[i] = low | high << 16;
  }
}

struct SourceTopkParams {
  const __nv_bfloat16* logits;  // [rows, columns] dense; rows on 16 B
  const __nv_bfloat16* maxima;  // [rows, blocks of 8]: +inf the newest, -inf outside the pool; rows on 16 B
  const int32_t* lens;          // [rows] visible positions
  const int32_t* table;         // [rows, entries], 2^table_bits positions an entry
  int32_t* slots;               // [rows, slots_width] or null, the row's own top-k as pool slots
  int32_t* positions;           // [rows, positions_width] or null, the same picks as positions
  int32_t* sparse_indices;      // [rows, blocks_kept], or null for a layer that publishes nothing
  int32_t* physical_blocks;     // [rows, blocks_kept] or null
  int32_t* valid_columns;       // [rows] or null
  int64_t logits_stride;
  int64_t maxima_stride;
  int64_t table_stride;
  int64_t slots_stride;
  int64_t positions_stride;
  int32_t slots_width;
  int32_t positions_width;
  int32_t blocks_kept;  // even, at most 2048, more than topk: the newest block takes one place
  int32_t topk;
  int32_t table_bits;
};

// The chosen blocks of a row, ascending, in the list of the cluster's first block; returns how many.
template <int CLUSTER>
__device__ __forceinline__ uint32_t choose_blocks(
    const SourceTopkParams& p, SelectStorage& s, int64_t r, int rank, int blocks) {
  Row<CLUSTER> row{s};
  const int first = rank * kKeysPerCta + row.thread * kKeys;
  uint32_t keys[kPairs];
  const __nv_bfloat16* maxima = p.maxima + r * p.maxima_stride;
  load_keys(keys, maxima + first, blocks - first);
  load_keys(keys + 4, maxima + first + 8, blocks - first - 8);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) keys[i] |= __heq2_mask(as_pair(keys[i]), as_pair(0xff80ff80u));  // no blocks of the row

  int32_t* list = s.list;
  if (CLUSTER > 1) list = in_block(s.list, 0);
  const uint32_t kept =
      row.take_largest(keys, p.blocks_kept, blocks <= p.blocks_kept, [&](uint32_t place, int i) { list[place] = first + i; });
  if (CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();
  return kept;
}

template <int CLUSTER>
__global__ __launch_bounds__(kSelectThreads, 1) void source_topk_kernel(const __grid_constant__ SourceTopkParams p) {
  __shared__ SelectStorage s;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int64_t r = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER;
  const int length = p.lens[r], blocks = (length + 7) / 8;
  uint32_t kept;
  if (CLUSTER > 1 && blocks > kKeysPerCta) {
    kept = choose_blocks<CLUSTER>(p, s, r, rank, blocks);
    if (rank != 0) return;
  } else {  // a short row needs no cluster, whatever the context limit
    if (rank != 0) return;
    kept = choose_blocks<1>(p, s, r, 0, blocks);
  }

  // One thread block goes on alone: the schedule, and the top-k among the chosen blocks' logits.
  Row<1> row{s};
  uint32_t keys[kPairs];
  const int32_t* line = p.table + r * p.table_stride;
  int32_t chosen[2], physical[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int at = row.thread * 2 + j;
    chosen[j] = at < kept ? s.list[at] : kNoBlock;
    physical[j] = -1;
    if (at < kept) {
      const int position = chosen[j] * 8;
      physical[j] = (line[position >> p.table_bits] << (p.table_bits - 3)) + ((position & ((1 << p.table_bits) - 1)) >> 3);
    }
    load_keys(keys + 4 * j, p.logits + r * p.logits_stride + static_cast<int64_t>(chosen[j]) * 8,
              at < kept ? length - chosen[j] * 8 : 0);
  }
  if (p.sparse_indices != nullptr && row.thread * 2 < p.blocks_kept) {
    const int64_t at = r * p.blocks_kept + row.thread * 2;
    *reinterpret_cast<int2*>(p.sparse_indices + at) = make_int2(chosen[0], chosen[1]);
    *reinterpret_cast<int2*>(p.physical_blocks + at) = make_int2(physical[0], physical[1]);
    // The newest block, which may be short, is last if it was kept.
    if (row.thread == 0)
      p.valid_columns[r] =
          static_cast<int32_t>(kept) * 8 - (kept > 0 && s.list[kept - 1] == blocks - 1 ? blocks * 8 - length : 0);
  }
  int32_t* slots = p.slots == nullptr ? nullptr : p.slots + r * p.slots_stride;
  int32_t* positions = p.positions == nullptr ? nullptr : p.positions + r * p.positions_stride;
  __syncthreads();  // the choice of blocks has read its counts
  const uint32_t taken = row.take_largest(keys, p.topk, kept * 8 <= p.topk, [&](uint32_t place, int i) {
    if (slots != nullptr) slots[place] = (i < 8 ? physical[0] : physical[1]) * 8 + (i & 7);
    if (positions != nullptr) positions[place] = (i < 8 ? chosen[0] : chosen[1]) * 8 + (i & 7);
  });
  for (int i = taken + row.thread; i < max(p.slots_width, p.positions_width); i += kSelectThreads) {
    if (i < p.slots_width) slots[i] = -1;
    if (i < p.positions_width) positions[i] = -1;
  }
}

}  // namespace dsv41
