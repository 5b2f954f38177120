// What every kernel shares: types, warp intrinsics, stored dtypes, Philox, the order of logits, the Gumbel-max pick.
//
// trt_cpspec/nvrtc.py puts this file in front of each .cu file; nothing includes anything. tests/helpers/ compiles the
// same text with g++ and emulates what CUDA provides, so #if stands only around one-line wrappers of intrinsics.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define COMPILED_KERNEL extern "C" __global__ void
#define KERNEL COMPILED_KERNEL

// PARTICIPANTS, where it is defined: only so many of a block's threads take part in its barriers, the first ones.
#ifdef PARTICIPANTS
#ifdef HOST_SHIM
__device__ __forceinline__ void sync_participants() { shim::barrier_of(PARTICIPANTS, 1); }
#else
__device__ __forceinline__ void sync_participants() { asm volatile("bar.sync 1, %0;" ::"n"(PARTICIPANTS) : "memory"); }
#endif
#define __syncthreads sync_participants
// What a large kernel seldom runs: in line other instructions would have to be fetched around it.
#define SELDOM __noinline__
#else
#define PARTICIPANTS blockDim.x
#define SELDOM __forceinline__
#endif
#define ALL_LANES 0xFFFFFFFFu
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

// How a row of the batch is sampled; lives in device memory so that a graph replay sees changes (numpy: REQUEST).
struct Request {
  u64 seed;
  double temperature;  // 0 is argmax
  double top_p;        // in (0, 1]
  int top_k;           // 0, or V and above: all
  u32 frame;
};

// What a random number is for (counters are frame, depth, use, code >> 2).
enum Use { USE_TARGET = 0, USE_DRAFT = 1, USE_ACCEPT = 2, USE_RESIDUAL = 3 };

// ---------------------------------------------------------------------------------------------------- warp intrinsics

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

// A value that is the same in all lanes, so that the compiler knows it. Where a lane may have gone another way, for all that
// it knows, it moves no instruction past a shuffle or a vote (BRA.DIV in SASS), and each waits for the one before. So what
// stands around passes and picks hangs on kernel arguments or on this, and no lane waits alone.
__device__ __forceinline__ int same(int value) { return __shfl_sync(ALL_LANES, value, 0); }

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ u32 warp_max(u32 value) { return __reduce_max_sync(ALL_LANES, value); }
__device__ __forceinline__ u32 warp_min(u32 value) { return __reduce_min_sync(ALL_LANES, value); }
__device__ __forceinline__ u32 warp_sum(u32 value) { return __reduce_add_sync(ALL_LANES, value); }
#else
__device__ __forceinline__ u32 warp_max(u32 value) {
  for (int step = 16; step; step >>= 1) value = max(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}
__device__ __forceinline__ u32 warp_min(u32 value) { return ~warp_max(~value); }
__device__ __forceinline__ u32 warp_sum(u32 value) {
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}
#endif

__device__ __forceinline__ float warp_sum(float value) {
  for (int step = 16; step; step >>= 1) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

// Sum of 32 numbers below 2^48.
__device__ __forceinline__ u64 warp_sum(u64 value) {
  const u64 low = warp_sum(u32(value) & 0xFFFFFFu), high = warp_sum(u32(value >> 24));
  return low + (high << 24);
}

template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  for (int step = 1; step < 32; step <<= 1) {
    const T below = __shfl_up_sync(ALL_LANES, value, step);
    if (lane_id() >= step) value += below;
  }
  return value;
}

// Four neighbouring entries of a row of V floats, from a multiple of 4; `beyond` stands for those behind its end.
__device__ __forceinline__ float4 load_four(const float* row, int start, float beyond) {
  float4 four = make_float4(beyond, beyond, beyond, beyond);
  if (V % 4 == 0) {
    if (start < V) four = *reinterpret_cast<const float4*>(row + start);
  } else {
    if (start < V) four.x = row[start];
    if (start + 1 < V) four.y = row[start + 1];
    if (start + 2 < V) four.z = row[start + 2];
    if (start + 3 < V) four.w = row[start + 3];
  }
  return four;
}

// ------------------------------------------------------------------------------------------------------ stored dtypes

#ifdef HOST_SHIM
__device__ __forceinline__ float half_to_float(u16 bits) { return shim_half_to_float(bits); }
__device__ __forceinline__ u16 float_to_half(float value) { return shim_float_to_half(value); }
#else
__device__ __forceinline__ float half_to_float(u16 bits) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits)); return f; }
__device__ __forceinline__ u16 float_to_half(float value) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(value)); return h; }
#endif

struct F32 { float bits; };
struct F16 { u16 bits; };
struct BF16 { u16 bits; };

__device__ __forceinline__ float to_float(F32 value) { return value.bits; }
__device__ __forceinline__ float to_float(F16 value) { return half_to_float(value.bits); }
__device__ __forceinline__ float to_float(BF16 value) { return __uint_as_float(u32(value.bits) << 16); }

__device__ __forceinline__ void store(F32* out, float value) { out->bits = value; }
__device__ __forceinline__ void store(F16* out, float value) { out->bits = float_to_half(value); }
__device__ __forceinline__ void store(BF16* out, float value) {  // round to nearest even; a NaN stays one
  const u32 bits = __float_as_uint(value);
  out->bits = value != value ? u16(bits >> 16 | 0x40) : u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Eight neighbouring values, 16-byte aligned: loaded at once, converted when they are used.
template <class T>
struct Eight {
  uint4 raw[sizeof(T) / 2];
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 2); i++) raw[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  }
  __device__ __forceinline__ float operator[](int i) const;
};

__device__ __forceinline__ u32 word_of(const uint4& raw, int i) { return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w; }
template <>
__device__ __forceinline__ float Eight<F32>::operator[](int i) const { return __uint_as_float(word_of(raw[i / 4], i % 4)); }
template <>
__device__ __forceinline__ float Eight<F16>::operator[](int i) const { return half_to_float(u16(word_of(raw[0], i / 2) >> (i % 2 * 16))); }
template <>
__device__ __forceinline__ float Eight<BF16>::operator[](int i) const {
  const u32 word = word_of(raw[0], i / 2);
  return __uint_as_float(i % 2 ? word & 0xFFFF0000u : word << 16);
}

// ----------------------------------------------------------------------------------------------------- random numbers

// Philox4x32-10 (Salmon et al., SC 2011), the same bits as sampling.philox.
__device__ __forceinline__ uint4 philox(u64 seed, u32 frame, u32 depth, u32 use, u32 block) {
  u32 key0 = u32(seed), key1 = u32(seed >> 32), word0 = frame, word1 = depth, word2 = use, word3 = block;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u64 product0 = u64(word0) * 0xD2511F53u, product1 = u64(word2) * 0xCD9E8D57u;
    word0 = u32(product1 >> 32) ^ word1 ^ key0;
    word2 = u32(product0 >> 32) ^ word3 ^ key1;
    word1 = u32(product1);
    word3 = u32(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return make_uint4(word0, word1, word2, word3);
}

// The uniform number of a Philox word is ticks * 2^-25, ticks odd: 25 bits, more than a float holds above one half.
__device__ __forceinline__ u32 uniform_ticks(u32 word) { return (word >> 8 << 1) + 1; }
__device__ __forceinline__ double uniform(u32 word) { return uniform_ticks(word) * (1.0 / 33554432); }

// -log(-log(u)). Above one half the logarithm is taken of 1 - u, which a float holds exactly.
__device__ __forceinline__ float gumbel(u32 word) {
  const u32 ticks = uniform_ticks(word);
  const float scale = 1.0f / 33554432;
  const float log_u = ticks < (1u << 24) ? logf(float(ticks) * scale) : log1pf(-(float((1u << 25) - ticks) * scale));
  return -logf(-log_u);
}
__device__ __forceinline__ double gumbel_exact(u32 word) { return -log(-log(uniform(word))); }

// ---------------------------------------------------------------------------------------------------- order of floats

// Larger floats have larger keys; -0 equals 0; a NaN is above everything.
__device__ __forceinline__ u32 order_key(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);
  return value != value ? 0xFFFFFFFFu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float key_to_float(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }
#define KEY_MINUS_INFINITY 0x007FFFFFu
#define KEY_INFINITY 0xFF800000u

__device__ __forceinline__ u64 order_key(double value) {
  const u64 bits = __double_as_longlong(value + 0.0);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

// ---------------------------------------------------------------------------------------------------- Gumbel-max pick

// Scores are compared in float; the few codes within this of the best are compared again in double, so that the pick is
// that of exact arithmetic although hardly any double operations are done. The float error is below 1e-5 for any code
// that can win: the noise lies in [-2.9, 17.4], so such a code is within 20.3 of the largest logit.
#define PICK_MARGIN 1e-4f

struct Pick {
  u32 best_of_warp[32];
  u32 contenders, code[32];  // more than 32 within the margin do not occur: the noise alone spreads them
};

// Step 1, all threads: each thread's best score key. pick_reset and a barrier go before, a barrier follows.
__device__ __forceinline__ void pick_reset(Pick& s) { s.contenders = 0; }
__device__ __forceinline__ void pick_offer(Pick& s, u32 best) {
  best = warp_max(best);
  if (lane_id() == 0) s.best_of_warp[warp_id()] = best;
}

// Step 2, all threads: the lowest score that is still in question.
__device__ __forceinline__ float pick_bar(const Pick& s) {
  return key_to_float(warp_max(lane_id() < int(PARTICIPANTS) / 32 ? s.best_of_warp[lane_id()] : 0)) - PICK_MARGIN;
}

// Step 3, all threads, for each code whose score is at least the bar; a barrier follows.
__device__ __forceinline__ void pick_contend(Pick& s, u32 code) {
  const u32 slot = atomicAdd(&s.contenders, 1u);
  if (slot < 32) s.code[slot] = code;
}

// Step 4, one warp: the code whose exact score is best, ties to the lower one. There is seldom more than one.
template <class Exact>
__device__ SELDOM u32 settle_exactly(const Pick& s, Exact exact_score) {
  const bool mine = lane_id() < int(min(s.contenders, 32u));
  u32 code = mine ? s.code[lane_id()] : 0xFFFFFFFFu;
  u64 best = mine ? order_key(exact_score(code)) : 0;
  for (int step = 16; step; step >>= 1) {
    const u64 other = __shfl_xor_sync(ALL_LANES, best, step);
    const u32 other_code = __shfl_xor_sync(ALL_LANES, code, step);
    if (other > best || (other == best && other_code < code)) best = other, code = other_code;
  }
  return code;
}

template <class Exact>
__device__ __forceinline__ u32 pick_settle(const Pick& s, Exact exact_score) {
  return s.contenders == 1 ? s.code[0] : settle_exactly(s, exact_score);
}

// Steps 2 to 4 at once, for one warp that holds every score, two a lane: no barriers. Each lane gets the code.
template <class Exact>
__device__ __forceinline__ u32 warp_pick(Pick& s, const float (&score)[2], const u32 (&code)[2], Exact exact_score) {
  const float bar = key_to_float(warp_max(max(order_key(score[0]), order_key(score[1])))) - PICK_MARGIN;
  const u32 first = __ballot_sync(ALL_LANES, score[0] >= bar), second = __ballot_sync(ALL_LANES, score[1] >= bar);
  if (__popc(first) + __popc(second) == 1) return __shfl_sync(ALL_LANES, first ? code[0] : code[1], __ffs(first | second) - 1);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (score[i] >= bar) pick_contend(s, code[i]);
  __syncwarp();
  return pick_settle(s, exact_score);
}

// ------------------------------------------------------------------------------------------------------ dot products

// One warp: dot products of one row of weights with several vectors, all of LENGTH values, 16-byte aligned. Every lane
// gets the sums. A result depends on its own vector only, and the weights are read once. The loads of four steps are
// issued before their first use. A null vector gives 0.
template <int LENGTH, int COUNT, class A, class B>
__device__ __forceinline__ void warp_dot(const A* weights, const B* const (&vectors)[COUNT], float (&sums)[COUNT]) {
  static_assert(LENGTH % 8 == 0, "widths are multiples of 8");
  constexpr int STEP = 256, AHEAD = (LENGTH + STEP - 1) / STEP < 4 ? (LENGTH + STEP - 1) / STEP : 4;
  for (float& sum : sums) sum = 0;
  for (int start = lane_id() * 8; start < LENGTH; start += STEP * AHEAD) {
    Eight<A> weight[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++)
      if (start + j * STEP < LENGTH) weight[j].load(weights + start + j * STEP);
#pragma unroll
    for (int v = 0; v < COUNT; v++) {
      if (!vectors[v]) continue;
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        if (start + j * STEP >= LENGTH) continue;
        Eight<B> value;
        value.load(vectors[v] + start + j * STEP);
#pragma unroll
        for (int i = 0; i < 8; i++) sums[v] += weight[j][i] * value[i];
      }
    }
  }
#pragma unroll
  for (int v = 0; v < COUNT; v++) sums[v] = warp_sum(sums[v]);
}
