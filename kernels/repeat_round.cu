// repeat_round: whether the conditional node that it runs in goes round once more.
//
// Layout   last [rows] i32: depth of each row's last committed code; handle: of the conditional node.
// Launch   grid 1, block 32.
// Limits   Needs a driver of CUDA 12.4 or later, which provides cudaGraphSetConditional when the module is loaded.

extern "C" __device__ void cudaGraphSetConditional(u64 handle, u32 value);

KERNEL repeat_round(u64 handle, const int* __restrict__ last, int rows) {
  bool missing = false;
  for (int row = threadIdx.x; row < rows; row += 32) missing |= last[row] < G - 1;
  const bool repeat = __any_sync(ALL_LANES, missing);
  if (threadIdx.x == 0) cudaGraphSetConditional(handle, repeat);
}
