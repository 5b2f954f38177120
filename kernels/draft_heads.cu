// draft_heads: hidden states times the heads of the depths that follow each row's last code, all rows in one launch.
//
// Layout   heads [G - 1, V, H] WEIGHT (F32, F16 or BF16); hidden [B, S, H] HIDDEN; last [B]: depth of each row's last
//          committed code; out: logits [B, W, V] f32.
//          Entry w of row b is head last[b] + w, the one of depth last[b] + 1 + w, applied to hidden row states[b]
//          (drafts: every depth reads the state of the last committed code), or to hidden row w where states is null
//          (verify pass: each depth reads its own). Above depth `deepest` there is nothing to do.
// Launch   grid (ceil(V / 8), W, B), block 256: one warp a logit.
// Limits   H a multiple of 8; heads and hidden 16-byte aligned. FP32 accumulation in a fixed order.

KERNEL __launch_bounds__(256) draft_heads(const WEIGHT* __restrict__ heads, const HIDDEN* __restrict__ hidden,
                                          const int* __restrict__ states, const int* __restrict__ last,
                                          float* __restrict__ logits, int rows_of_hidden, int deepest) {
  const int code = blockIdx.x * 8 + warp_id(), offset = blockIdx.y, row = blockIdx.z;
  const int head = last[row] + offset;
  if (code >= V || head + 1 > deepest) return;
  const int state = states ? states[row] : offset;
  const HIDDEN* const vector[1] = {hidden + (u64(row) * rows_of_hidden + state) * H};
  float sum[1];
  warp_dot<H>(heads + (u64(head) * V + code) * H, vector, sum);
  if (lane_id() == 0) logits[(u64(row) * gridDim.y + offset) * V + code] = sum[0];
}
