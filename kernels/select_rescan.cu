// select_rescan: the plain way to sample, kept as the baseline that benchmarks/kernels.py compares select_sample with.
//
// Layout, launch grid and results as select_sample; block 256; any V; top_k in [1, V) only, no errors.
//
// It rescans the row once per selected entry: the largest of those below the previous one, by a tree in shared memory.

#define BLOCK 256
#define MAX_SELECTED 1024

struct Shared {
  u64 tree[BLOCK];
  u64 order[MAX_SELECTED];
  float weight[MAX_SELECTED], score[MAX_SELECTED];
  int kept;
};

// All threads: the smallest of their values.
__device__ __forceinline__ u64 smallest(Shared& s, u64 value) {
  s.tree[threadIdx.x] = value;
  for (int step = BLOCK / 2; step; step >>= 1) {
    __syncthreads();
    if (int(threadIdx.x) < step && s.tree[threadIdx.x + step] < s.tree[threadIdx.x])
      s.tree[threadIdx.x] = s.tree[threadIdx.x + step];
  }
  __syncthreads();
  const u64 found = s.tree[0];
  __syncthreads();
  return found;
}

KERNEL __launch_bounds__(BLOCK, 1)
    select_rescan(const float* __restrict__ logits, const Request* __restrict__ requests,
                  const int* __restrict__ last, int* __restrict__ codes, float* __restrict__ laws,
                  int* __restrict__ errors, int use, int deepest) {
  __shared__ Shared s;
  const int batch_row = blockIdx.y, entry = batch_row * gridDim.x + blockIdx.x;
  const int depth = last[batch_row] + 1 + blockIdx.x;
  if (depth > deepest) return;
  const Request request = requests[batch_row];
  const int top_k = min(request.top_k, MAX_SELECTED);
  logits += u64(entry) * V;
  laws += u64(entry) * V;

  u64 previous = 0;
  for (int i = 0; i < top_k; i++) {
    u64 best = ~0ull;
    for (int code = threadIdx.x; code < V; code += BLOCK) {
      const u64 order = (u64(~order_key(logits[code])) << 32 | u32(code)) + 1;
      if (order > previous && order < best) best = order;
    }
    previous = smallest(s, best);
    if (threadIdx.x == 0) s.order[i] = previous - 1;
  }
  __syncthreads();
  const float largest = logits[u32(s.order[0])];
  for (int i = threadIdx.x; i < top_k; i += BLOCK) {
    const u32 code = u32(s.order[i]);
    s.weight[i] = expf((logits[code] - largest) / float(request.temperature));
    s.score[i] = (logits[code] - largest) / float(request.temperature) +
                 gumbel(word_of(philox(request.seed, request.frame, depth, use, code >> 2), code & 3));
  }
  for (int code = threadIdx.x; code < V; code += BLOCK) laws[code] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0, before = 0;
    for (int i = 0; i < top_k; i++) total += s.weight[i];
    int kept = 0, best = 0;
    while (kept < top_k && before < float(request.top_p) * total) before += s.weight[kept++];
    for (int i = 0; i < kept; i++) {
      laws[u32(s.order[i])] = s.weight[i] / before;
      if (s.score[i] > s.score[best]) best = i;
    }
    codes[entry] = u32(s.order[best]);
  }
}
