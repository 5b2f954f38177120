// sum_embeddings: the Talker's next input, before the text side is added. advance_frame: the next frame's numbers.
//
// Layout   talker_table [*, HT] WEIGHT (code 0), tables [G - 1, V, HT] WEIGHT (depths 1 up), codes [B, G] i32;
//          out: sums [B, HT] f32. Added in the order of the depths, in FP32: bit by bit CodePredictor.embed_frame.
//          requests [B] of advance_frame: the frame number, which addresses the random numbers, goes up by one.
// Launch   sum_embeddings: grid (ceil(HT / 256), B), block 256. advance_frame: grid 1, block 256.

KERNEL __launch_bounds__(256) sum_embeddings(const WEIGHT* __restrict__ talker_table,
                                             const WEIGHT* __restrict__ tables, const int* __restrict__ codes,
                                             float* __restrict__ sums) {
  const int channel = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
  if (channel >= HT) return;
  float sum = to_float(talker_table[u64(codes[row * G]) * HT + channel]);
#pragma unroll
  for (int depth = 1; depth < G; depth++)
    sum += to_float(tables[(u64(depth - 1) * V + codes[row * G + depth]) * HT + channel]);
  sums[u64(row) * HT + channel] = sum;
}

KERNEL __launch_bounds__(256) advance_frame(Request* __restrict__ requests, int rows) {
  for (int row = threadIdx.x; row < rows; row += 256) requests[row].frame++;
}
