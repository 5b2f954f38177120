// select_sample_general: select_sample for any V. Slower, just as exact; the same parameters and results.
//
// Layout   as select_sample.
// Launch   grid (W, B), block 1024.
// Limits   V < 2^23 (sums of masses are 64 bits wide). Reads the row from memory about 20 times.
//
// Where select_sample keeps a row in registers, this one searches, 8 bits at a time, for the order key of the last
// entry that stays; what is at most that key is the law.

#define BLOCK 1024
#define WARPS (BLOCK / 32)
#define BINS 256
#define MASS_SCALE 549755813888.0f  // 2^39

static_assert(V < 1 << 23, "V");

struct Shared {
  u64 bins[BINS];
  u64 before, limit;
  u32 bin;
  u32 largest_of_warp[WARPS], finite_of_warp[WARPS];
  u64 mass_of_warp[WARPS];
  Pick pick;
};

struct Row {
  const float* logits;
  float largest, inverse;
  // Ascending: the largest logit first, of equal ones the lower code.
  __device__ __forceinline__ u64 order(int code) const { return u64(~order_key(logits[code])) << 32 | u32(code); }
  __device__ __forceinline__ float weight(int code) const { return expf((logits[code] - largest) * inverse); }
  __device__ __forceinline__ u64 mass(int code) const { return u64(weight(code) * MASS_SCALE); }
};
// What stays has an order of at most this; entries of -inf never do.
#define ORDER_FINITE (u64(~KEY_MINUS_INFINITY - 1) << 32 | 0xFFFFFFFFu)

// One warp: adds each active lane's measure, once for all lanes of one bin.
__device__ __forceinline__ void add(u64* bins, bool active, u32 bin, u64 measure) {
  for (u32 lanes = __ballot_sync(ALL_LANES, active); lanes;) {
    const int first = __ffs(lanes) - 1;
    const bool same = bin == __shfl_sync(ALL_LANES, bin, first) && active;
    const u64 sum = warp_sum(same ? measure : 0ull);
    if (lane_id() == first) atomicAdd(&bins[bin], sum);
    lanes &= ~__ballot_sync(ALL_LANES, same);
  }
}

// One warp: the bin in which the measure reaches the limit, and the measure before it.
__device__ __forceinline__ void find_bin(Shared& s) {
  constexpr int EACH = BINS / 32;
  u64 sum = 0;
  for (int i = 0; i < EACH; i++) sum += s.bins[lane_id() * EACH + i];
  u64 before = s.before + warp_inclusive_sum(sum) - sum;
  __syncwarp();
  if (before >= s.limit || before + sum < s.limit) return;
  for (int i = 0; i < EACH; i++) {
    const u64 here = s.bins[lane_id() * EACH + i];
    if (before < s.limit && s.limit <= before + here) {
      s.bin = lane_id() * EACH + i;
      s.before = before;
    }
    before += here;
  }
}

// All threads: the order of the last entry, of those up to `bound`, before which the measure is below the limit.
template <class Measure>
__device__ __forceinline__ u64 keep_first(Shared& s, const Row& row, u64 bound, u64 limit, Measure measure) {
  u64 found = 0;
  if (threadIdx.x == 0) s.before = 0, s.limit = limit;
  for (int shift = 56; shift >= 0; shift -= 8) {
    if (threadIdx.x < BINS) s.bins[threadIdx.x] = 0;
    __syncthreads();
    for (int start = 0; start < V; start += BLOCK) {
      const int code = start + threadIdx.x;
      const u64 order = code < V ? row.order(code) : ~0ull;
      const bool active = order <= bound && (shift == 56 || order >> (shift + 8) == found);
      add(s.bins, active, u32(order >> shift) & (BINS - 1), active ? measure(code) : 0);
    }
    __syncthreads();
    if (warp_id() == 0) find_bin(s);
    __syncthreads();
    found = found << 8 | s.bin;
  }
  return found;
}

// All threads: the sum of the masses of the entries up to `bound`. A barrier must pass between two calls.
__device__ __forceinline__ u64 mass_up_to(Shared& s, const Row& row, u64 bound) {
  u64 mass = 0;
  for (int code = threadIdx.x; code < V; code += BLOCK) mass += row.order(code) <= bound ? row.mass(code) : 0;
  for (int step = 16; step; step >>= 1) mass += __shfl_xor_sync(ALL_LANES, mass, step);
  if (lane_id() == 0) s.mass_of_warp[warp_id()] = mass;
  __syncthreads();
  mass = 0;
  for (int warp = 0; warp < WARPS; warp++) mass += s.mass_of_warp[warp];
  return mass;
}

// All threads: the largest logit's key, a NaN's if there is one.
__device__ __forceinline__ u32 largest_key(Shared& s, const float* logits) {
  u32 largest = 0;
  for (int code = threadIdx.x; code < V; code += BLOCK) largest = max(largest, order_key(logits[code]));
  largest = warp_max(largest);
  if (lane_id() == 0) s.largest_of_warp[warp_id()] = largest;
  __syncthreads();
  return warp_max(s.largest_of_warp[lane_id()]);
}

// All threads: the best of the entries up to `bound` under this address's noise; the first warp gets it.
__device__ __forceinline__ u32 pick_up_to(Shared& s, const Row& row, u64 bound, const Request& request,
                                          double temperature, u32 depth, u32 use) {
  const auto word = [&](u32 code) { return word_of(philox(request.seed, request.frame, depth, use, code >> 2), code & 3); };
  const auto code_of = [](int i) { return u32(i * BLOCK + threadIdx.x); };
  const auto score = [&](int i) {
    const u32 code = code_of(i);
    if (code >= V || row.order(code) > bound) return MINUS_INFINITY;
    return (row.logits[code] - row.largest) * row.inverse + gumbel(word(code));
  };
  constexpr int ITEMS = (V + BLOCK - 1) / BLOCK;
  u32 best = 0;
  for (int i = 0; i < ITEMS; i++) best = max(best, order_key(score(i)));
  pick_offer(s.pick, best);
  __syncthreads();
  const float bar = pick_bar(s.pick);
  for (int i = 0; i < ITEMS; i++)
    if (score(i) >= bar) pick_contend(s.pick, code_of(i));
  __syncthreads();
  if (warp_id() != 0) return 0;
  return pick_settle(s.pick, [&](u32 code) {
    return (double(row.logits[code]) - double(row.largest)) / temperature + gumbel_exact(word(code));
  });
}

KERNEL __launch_bounds__(BLOCK, 1)
    select_sample_general(const float* __restrict__ logits, const Request* __restrict__ requests,
                          const int* __restrict__ last, int* __restrict__ codes, float* __restrict__ laws,
                          int* __restrict__ errors, int use, int deepest) {
  __shared__ Shared s;
  const int batch_row = blockIdx.y, entry = batch_row * gridDim.x + blockIdx.x;
  const int depth = last[batch_row] + 1 + blockIdx.x;
  if (depth > deepest) return;
  const Request request = requests[batch_row];
  logits += u64(entry) * V;
  float* law = laws ? laws + u64(entry) * V : nullptr;

  if (threadIdx.x == 0) pick_reset(s.pick);
  const u32 largest = largest_key(s, logits);
  if (largest <= KEY_MINUS_INFINITY || largest >= KEY_INFINITY) {
    for (int code = threadIdx.x; law && code < V; code += BLOCK) law[code] = code == 0;
    if (threadIdx.x == 0) {
      codes[entry] = 0;
      atomicMin(&errors[batch_row], depth);
    }
    return;
  }

  const bool greedy = request.temperature == 0;  // argmax is top-1, at any temperature
  const double temperature = greedy ? 1 : request.temperature;
  const Row row = {logits, key_to_float(largest), 1 / float(temperature)};
  u64 bound = ORDER_FINITE;
  const int top_k = greedy ? 1 : request.top_k;
  if (top_k > 0 && top_k < V) {
    int finite = 0;
    for (int code = threadIdx.x; code < V; code += BLOCK) finite += row.order(code) <= bound;
    finite = warp_sum(u32(finite));
    if (lane_id() == 0) s.finite_of_warp[warp_id()] = finite;
    __syncthreads();
    finite = warp_sum(s.finite_of_warp[lane_id()]);
    if (top_k < finite) bound = keep_first(s, row, bound, top_k, [](int) { return 1ull; });
  }
  if (!greedy && request.top_p < 1) {
    const u64 limit = u64(ceil(request.top_p * double(mass_up_to(s, row, bound))));
    bound = keep_first(s, row, bound, limit, [&](int code) { return row.mass(code); });
  }

  if (law) {
    const float unit = MASS_SCALE / float(mass_up_to(s, row, bound));
    for (int code = threadIdx.x; code < V; code += BLOCK) law[code] = row.order(code) <= bound ? row.weight(code) * unit : 0;
  }
  const u32 code = pick_up_to(s, row, bound, request, temperature, depth, use);
  if (threadIdx.x == 0) codes[entry] = code;
}
