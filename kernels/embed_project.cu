// embed_project and start_frame: what enters the CodePredictor, embedded and projected to its width.
//
// Layout   tables [G - 1, V, HT] WEIGHT; projection [H, HT] WEIGHT and bias [H] f32 (small_to_mtp_projection; both null
//          where the checkpoint has none, then HT == H); codes [B, G] i32; last [B]; out: embeds [B, W, H] INPUT,
//          positions [B, W] i32. The code of depth s stands at position s + 1; a row without a code is zero, at
//          position `padding`, a cache slot that nothing reads.
// Launch   grid (ceil(H / 8), B), block 256: one warp an output channel, which reads its weights once for all rows.
// Limits   H and HT multiples of 8, tables, hidden and projection 16-byte aligned, W <= 8.
//
// embed_project: W = n + 1 rows, the last committed code and the drafts [B, n] of the next depths, for a verify pass.
// start_frame:   W = 2 rows, the Talker's hidden state [B, HT] HIDDEN and its code 0, whose table is talker_table
//                [*, HT] WEIGHT. It also resets last, states, rounds and errors (each [B] i32) for the new frame.

#define MAX_W 8
#define NO_ERROR 0x7F7F7F7F

__device__ __forceinline__ const WEIGHT* embedding(const WEIGHT* tables, int depth, int code) {
  return tables + (u64(depth - 1) * V + code) * HT;
}

// One warp: one channel of COUNT projected vectors; null ones give 0. Without a projection it is a copy.
template <int COUNT, class T>
__device__ __forceinline__ void project(const WEIGHT* projection, const float* bias, int channel,
                                        const T* const (&vectors)[COUNT], float (&out)[COUNT]) {
  if (projection) {
    warp_dot<HT>(projection + u64(channel) * HT, vectors, out);
    for (int v = 0; v < COUNT; v++) out[v] = vectors[v] ? out[v] + bias[channel] : 0;
  } else {
    for (int v = 0; v < COUNT; v++) out[v] = vectors[v] ? to_float(vectors[v][channel]) : 0;
  }
}

KERNEL __launch_bounds__(256) embed_project(const WEIGHT* __restrict__ tables, const WEIGHT* __restrict__ projection,
                                            const float* __restrict__ bias, const int* __restrict__ codes,
                                            const int* __restrict__ drafts, const int* __restrict__ last,
                                            INPUT* __restrict__ embeds, int* __restrict__ positions, int n,
                                            int padding) {
  const int channel = blockIdx.x * 8 + warp_id(), row = blockIdx.y, depth = last[row];
  const int rows = depth > 0 ? min(n + 1, G - 1 - depth) : 0;
  if (blockIdx.x == 0 && int(threadIdx.x) <= n)
    positions[row * (n + 1) + threadIdx.x] = int(threadIdx.x) < rows ? depth + 1 + threadIdx.x : padding;
  if (channel >= H) return;
  const WEIGHT* vectors[MAX_W];
#pragma unroll
  for (int w = 0; w < MAX_W; w++) {
    vectors[w] = nullptr;
    if (w < rows) vectors[w] = embedding(tables, depth + w, w ? drafts[row * n + w - 1] : codes[row * G + depth]);
  }
  float out[MAX_W];
  project(projection, bias, channel, vectors, out);
  if (lane_id() != 0) return;
#pragma unroll
  for (int w = 0; w < MAX_W; w++)
    if (w <= n) store(embeds + (u64(row) * (n + 1) + w) * H + channel, out[w]);
}

KERNEL __launch_bounds__(256) start_frame(const HIDDEN* __restrict__ talker_hidden,
                                          const WEIGHT* __restrict__ talker_table,
                                          const WEIGHT* __restrict__ projection, const float* __restrict__ bias,
                                          const int* __restrict__ codes, INPUT* __restrict__ embeds,
                                          int* __restrict__ positions, int* __restrict__ last,
                                          int* __restrict__ states, int* __restrict__ rounds,
                                          int* __restrict__ errors) {
  const int channel = blockIdx.x * 8 + warp_id(), row = blockIdx.y;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    positions[row * 2] = 0, positions[row * 2 + 1] = 1;
    last[row] = states[row] = rounds[row] = 0;
    errors[row] = NO_ERROR;
  }
  if (channel >= H) return;
  const HIDDEN* const hidden[1] = {talker_hidden + u64(row) * HT};
  const WEIGHT* const embedded[1] = {talker_table + u64(codes[row * G]) * HT};
  float first[1], second[1];
  project(projection, bias, channel, hidden, first);
  project(projection, bias, channel, embedded, second);
  if (lane_id() != 0) return;
  store(embeds + u64(row) * 2 * H + channel, first[0]);
  store(embeds + (u64(row) * 2 + 1) * H + channel, second[0]);
}
