// fused_frame and fused_pass: the whole CodePredictor in one persistent cooperative kernel.
//
// fused_frame decodes one frame for every row of a batch: prefill of two positions, then rounds of draft heads, select,
// verify pass, select, accept, until every row is complete, and the sum of the frame's embeddings. fused_pass runs one
// pass over given rows and returns their hidden states. select_sample.cu and accept.cu stand in front of this file.
//
// Layout   model: the addresses of Model below, in device memory. Weights are packed for the grid (see Product).
//          work buffers of a pass: columns are [B * W], column row * W + i for position i of a row; W <= 8, B <= 8.
//          keys and values [LAYERS, MAX_BATCH, G, KV_HEADS * HEAD_DIM] f32, not yet normed and rotated.
// Launch   cooperative, grid (CTAS), block THREADS, SHARED_BYTES of dynamic shared memory. counter[0] must be 0.
// Limits   H, HT, INTER and HEADS * HEAD_DIM multiples of 32; HEAD_DIM 64, 96 or 128; G <= 33; weights F16 or BF16.
//
// Every product is a [16 x 16] x [16 x 8] tensor-core product whose 16 rows are 8 positions twice: the high and the low
// part of each activation, so that nothing of its FP32 value is lost to the 16-bit operand, and a position's sums are the
// same whatever stands in the other rows. A block owns a few rows of each weight matrix, a warp a slice of the inner
// dimension; the 16 slices are added in one fixed order. RMSNorm is folded in: the gain multiplies the activation, the
// inverse root the sum.
//
// Weights do not depend on activations: each warp streams its own through a ring in shared memory, which it fills again
// as it empties, across the grid barriers. Every lane copies exactly the bytes that it later reads.

// ---------------------------------------------------------------------------------------------------------- intrinsics

#ifdef HOST_SHIM
#define DYNAMIC_SHARED(name) char* name = shim::dynamic_shared()
__device__ __forceinline__ void copy_16(void* to, const void* from) { std::memcpy(to, from, 16); }
__device__ __forceinline__ void copies_commit() {}
template <int PENDING>
__device__ __forceinline__ void copies_wait() {}
__device__ __forceinline__ void arrive(u32* counter) { ++*counter; }
__device__ __forceinline__ u32 arrived(const u32* counter) { shim::spin(); return *counter; }
__device__ __forceinline__ float load_fresh(const float* from) { return *from; }
__device__ __forceinline__ int load_fresh(const int* from) { return *from; }
__device__ __forceinline__ float4 load_fresh(const float4* from) { return *from; }
__device__ __forceinline__ u32 warp_or(u32 value) { return shim_reduce(ALL_LANES, value, [](unsigned a, unsigned b) { return a | b; }); }
__device__ __forceinline__ u32 pack_two(F16, float low, float high) { return float_to_half(low) | u32(float_to_half(high)) << 16; }
__device__ __forceinline__ u32 pack_two(BF16, float low, float high) { BF16 two[2]; store(two, low), store(two + 1, high); return two[0].bits | u32(two[1].bits) << 16; }
template <class T>
__device__ __forceinline__ void tensor_product(T, float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { shim_tensor_product<T>(sums, a0, a1, a2, a3, b0, b1); }
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]
// Around L1, into shared memory, without a register.
__device__ __forceinline__ void copy_16(void* to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(to))), "l"(from) : "memory"); }
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
__device__ __forceinline__ void arrive(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
__device__ __forceinline__ u32 arrived(const u32* counter) { u32 value; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory"); return value; }
// Past L1, which does not see what other multiprocessors store.
__device__ __forceinline__ float load_fresh(const float* from) { return __ldcg(from); }
__device__ __forceinline__ int load_fresh(const int* from) { return __ldcg(from); }
__device__ __forceinline__ float4 load_fresh(const float4* from) { return __ldcg(from); }
__device__ __forceinline__ u32 warp_or(u32 value) { return __reduce_or_sync(ALL_LANES, value); }
__device__ __forceinline__ u32 pack_two(F16, float low, float high) { u32 two; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low)); return two; }
__device__ __forceinline__ u32 pack_two(BF16, float low, float high) { u32 two; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low)); return two; }
__device__ __forceinline__ void tensor_product(F16, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); }
__device__ __forceinline__ void tensor_product(BF16, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); }
#endif

#ifdef WATCHDOG  // a barrier that waits for this many polls stops the kernel with an error
__device__ __forceinline__ void polled(u32& polls) { if (++polls > WATCHDOG) asm volatile("trap;"); }
#else
__device__ __forceinline__ void polled(u32&) {}
#endif

__device__ __forceinline__ float low_half(F16, u32 two) { return half_to_float(u16(two)); }
__device__ __forceinline__ float high_half(F16, u32 two) { return half_to_float(u16(two >> 16)); }
__device__ __forceinline__ float low_half(BF16, u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float high_half(BF16, u32 two) { return __uint_as_float(two & 0xFFFF0000u); }
// FP16 operands: activations up to 4e6 fit, and the low part stays above the denormal numbers.
__device__ __forceinline__ constexpr float operand_scale(F16) { return 1.0f / 64; }
__device__ __forceinline__ constexpr float low_scale(F16) { return 2048; }
__device__ __forceinline__ constexpr float operand_scale(BF16) { return 1; }
__device__ __forceinline__ constexpr float low_scale(BF16) { return 1; }

__device__ __forceinline__ void load_eight(float* to, const float* from) {
#pragma unroll
  for (int i = 0; i < 8; i++) to[i] = __ldg(from + i);
}
__device__ __forceinline__ void load_eight_fresh(float* to, const float* from) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float4 four = load_fresh(reinterpret_cast<const float4*>(from) + i);
    to[i * 4] = four.x, to[i * 4 + 1] = four.y, to[i * 4 + 2] = four.z, to[i * 4 + 3] = four.w;
  }
}

// --------------------------------------------------------------------------------------------------------------- sizes

constexpr int WARPS_A_BLOCK = THREADS / 32;
constexpr int TILE = 8;  // positions of one tensor-core product
constexpr int MAX_WIDTH = 8;
constexpr int Q_WIDTH = HEADS * HEAD_DIM, KV_WIDTH = KV_HEADS * HEAD_DIM;
constexpr int MAX_COLUMNS = MAX_BATCH * MAX_WIDTH;

static_assert(H % 32 == 0 && HT % 32 == 0 && INTER % 32 == 0 && Q_WIDTH % 32 == 0, "widths are multiples of 32");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 128 && HEADS % KV_HEADS == 0 && G <= 33, "heads and depths");
static_assert(WARPS_A_BLOCK % 4 == 0 && THREADS <= 512, "THREADS");
static_assert(CTAS >= MAX_BATCH && MAX_BATCH <= TILE, "a block a row");

// Addresses, in the order of FusedModel in trt_cpspec/fused.py.
struct Model {
  const char *projection, *qkv, *o, *gate_up, *down, *heads;  // packed
  const float *bias, *input_norm, *post_norm, *final_norm;    // [H], [LAYERS, H], [LAYERS, H], [H]
  const float *head_norm, *rotary;                            // [LAYERS, HEADS + KV_HEADS, HEAD_DIM], [G, HEAD_DIM / 2, 2]
  const WEIGHT *talker_table, *tables;                        // [*, HT], [G - 1, V, HT]
  float *embeds, *inputs, *hidden, *queries, *keys, *values, *mixed, *activated;
  float *logits, *laws, *draft_logits, *draft_laws;           // [B, W, V], [B, W, V], [B, W - 1, V] twice
  int *picks, *drafts, *last, *states;
  u32* counter;
  const Request* requests;
  const float* talker_hidden;
  int *codes, *history, *rounds, *errors;
  float* embedded;
};

// ------------------------------------------------------------------------------------------------------------ products

// A matrix [OUT, IN] of which each block owns GROUPS groups of 8 rows, and each warp UNITS units of 32 inner values.
// Packed [block, warp, unit, group, row of 8, quarter of 4, 8 values]: 512 bytes a unit and group, 16 a lane.
// Of a PAIRED matrix every second group belongs to the second of two matrices side by side.
template <int IN_, int OUT_, bool PAIRED_ = false>
struct Product {
  static constexpr int IN = IN_, OUT = OUT_;
  static constexpr bool PAIRED = PAIRED_;
  static constexpr int STEP = PAIRED ? 16 : 8;  // rows that stay together
  static constexpr int GROUPS = (OUT / STEP + CTAS - 1) / CTAS * (STEP / 8);
  static constexpr int ROWS = GROUPS * 8;
  static constexpr int UNITS = (IN / 32 + WARPS_A_BLOCK - 1) / WARPS_A_BLOCK;
  static constexpr int UNIT_BYTES = GROUPS * 512;
  static constexpr int UNITS_A_PIECE = SLOT_BYTES / UNIT_BYTES < UNITS ? SLOT_BYTES / UNIT_BYTES : UNITS;
  static constexpr int PIECES = UNITS_A_PIECE ? (UNITS + UNITS_A_PIECE - 1) / UNITS_A_PIECE : 0;
  static constexpr int WARP_BYTES = UNITS * UNIT_BYTES;
  static_assert(UNITS_A_PIECE > 0 && PIECES <= SLOTS, "the ring is too small for this matrix");
  __device__ __forceinline__ static bool mine() { return int(blockIdx.x) * ROWS < OUT; }
};
using Projection = Product<HT, H>;
using Qkv = Product<H, Q_WIDTH + 2 * KV_WIDTH>;
using Out = Product<Q_WIDTH, H>;
using GateUp = Product<H, 2 * INTER, true>;
using Down = Product<INTER, H>;
using Head = Product<H, V>;

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int MOST_ROWS = larger(larger(larger(Projection::ROWS, Qkv::ROWS), larger(Out::ROWS, GateUp::ROWS)), larger(Down::ROWS, Head::ROWS));
constexpr int PADDING = 8;

// What the warps of a block add up, and the statistics of RMSNorm.
struct Sums {
  float part[WARPS_A_BLOCK][TILE][MOST_ROWS + PADDING];
  float squares[WARPS_A_BLOCK][TILE];
};

constexpr int OUTS_A_THREAD = (TILE * MOST_ROWS + THREADS - 1) / THREADS;

struct Scores {
  float of_team[WARPS_A_BLOCK / 4][64];
};

// Where the block's part of a kind of matrix lies, and how it is cut into pieces; none where it has no rows of it.
enum Kind { PROJECTION, QKV, OUT, GATE_UP, DOWN, HEAD, KINDS };
struct Source {
  const char* base;
  u32 matrix_bytes;
  int warp_bytes, piece_bytes, pieces, chunks, last_chunks;

  template <class P>
  __device__ __forceinline__ void set(const char* matrices) {
    base = matrices + u64(blockIdx.x) * WARPS_A_BLOCK * P::WARP_BYTES;
    matrix_bytes = u32(CTAS) * WARPS_A_BLOCK * P::WARP_BYTES, warp_bytes = P::WARP_BYTES;
    piece_bytes = P::UNITS_A_PIECE * P::UNIT_BYTES, pieces = P::mine() ? P::PIECES : 0;
    chunks = P::UNITS_A_PIECE * P::GROUPS, last_chunks = (P::UNITS - (P::PIECES - 1) * P::UNITS_A_PIECE) * P::GROUPS;
  }
};

struct Block {
  Model model;
  Source sources[KINDS];
  int position[MAX_COLUMNS];  // of each column; negative: there is none
  int source[MAX_COLUMNS];    // of a draft's head: the column whose hidden state it reads
  int first_head[MAX_COLUMNS];
  int finished;
  u32 target;  // of the grid barrier
  union Scratch {
    __device__ Scratch() {}
    Sums sums;
    Scores scores;
    select_sample_part::Shared select;
    accept_part::Shared accept;
  } scratch;
};

// ------------------------------------------------------------------------------------------------------------- streams

constexpr int BLOCK_BYTES = (int(sizeof(Block)) + 127) / 128 * 128;
static_assert(BLOCK_BYTES + WARPS_A_BLOCK * SLOTS * SLOT_BYTES <= SHARED_BYTES, "SHARED_BYTES");

constexpr u32 BODY = 0;  // of the queue; anything else is a set of heads

// A warp's weights on their way: pieces are issued in the order in which they will be used.
struct Stream {
  const Source* sources;
  char* ring;  // this lane's bytes of the first slot
  u32 issued = 0, consumed = 0;
  u32 queue[3] = {};
  int queued = 0, product = 0, piece = 0;

  __device__ __forceinline__ Stream(const Block& block, char* ring)
      : sources(block.sources), ring(ring + u64(warp_id()) * SLOTS * SLOT_BYTES + lane_id() * 16) {}

  __device__ __forceinline__ void push(u32 what) {
    if (queued == 0) queue[0] = what;
    else if (queued == 1) queue[1] = what;
    else queue[2] = what;
    queued++;
    issue();
  }

  __device__ __forceinline__ void issue() {
    while (queued && issued - consumed < SLOTS) {
      const int kind = queue[0] != BODY ? HEAD : product < HAS_PROJECTION ? PROJECTION : QKV + ((product - HAS_PROJECTION) & 3);
      const int matrix = queue[0] != BODY ? __ffs(queue[0]) - 1 : product < HAS_PROJECTION ? 0 : (product - HAS_PROJECTION) >> 2;
      const Source& source = sources[kind];
      if (piece < source.pieces) {
        const char* from = source.base + u64(matrix) * source.matrix_bytes + warp_id() * source.warp_bytes + piece * source.piece_bytes + lane_id() * 16;
        char* to = ring + (issued % SLOTS) * SLOT_BYTES;
        const int chunks = piece + 1 < source.pieces ? source.chunks : source.last_chunks;
#pragma unroll 2
        for (int i = 0; i < chunks; i++) copy_16(to + i * 512, from + i * 512);
        copies_commit();
        issued++, piece++;
      }
      if (piece >= source.pieces) next();
    }
  }

  __device__ __forceinline__ void next() {
    piece = 0;
    if (queue[0] == BODY) {
      if (++product < HAS_PROJECTION + 4 * LAYERS) return;
      product = 0;
    } else {
      queue[0] &= queue[0] - 1;
      if (queue[0]) return;
    }
    queue[0] = queue[1], queue[1] = queue[2];
    queued--;
  }

  // Waits for piece `ahead` behind the one that is to be released next, and returns where it lies.
  __device__ __forceinline__ const char* wait(int ahead) const {
    const u32 later = issued - consumed - ahead - 1;
    if (later == 0) copies_wait<0>();
    else if (later == 1) copies_wait<1>();
    else if (later == 2) copies_wait<2>();
    else copies_wait<3>();
    return ring + ((consumed + ahead) % SLOTS) * SLOT_BYTES;
  }

  __device__ __forceinline__ void release() {
    consumed++;
    issue();
  }
};
static_assert(SLOTS >= 2 && SLOTS <= 4, "wait() knows up to four");

// All threads of the grid. Plain loads behind it see what was stored before it, by any block.
__device__ __forceinline__ void grid_barrier(Block& block) {
  __syncthreads();
  if (threadIdx.x == 0) {
    block.target += CTAS;
    arrive(block.model.counter);
    u32 polls = 0;
    while (arrived(block.model.counter) < block.target) polled(polls);
  }
  __syncthreads();
}

// ------------------------------------------------------------------------------------------------- one matrix product

// High and low part of two values, as an operand register each.
struct Split {
  u32 high, low;
  __device__ __forceinline__ Split(float first, float second) {
    first *= operand_scale(WEIGHT()), second *= operand_scale(WEIGHT());
    high = pack_two(WEIGHT(), first, second);
    const float scale = low_scale(WEIGHT());
    low = pack_two(WEIGHT(), (first - low_half(WEIGHT(), high)) * scale, (second - high_half(WEIGHT(), high)) * scale);
  }
};

// All threads of a block: the block's rows of a matrix times `tiles` tiles of columns.
// Task:  const float* row(int column): its IN values, or null; float before(int column, int out): what the sum is added
//        to, loaded early; void store(int column, int out, float sum, float before), of a paired matrix silu(first) times
//        second; const float* gain(): of the norm, null without one; bool wanted(int tile): whether it has any column.
template <class P, bool NORMED, class Task>
__device__ __forceinline__ void multiply(Block& block, Stream& stream, int tiles, const Task& task) {
  if (!P::mine()) return;
  Sums& sums = block.scratch.sums;
  const int quarter = lane_id() & 3, spot = lane_id() >> 2;
  const int first = warp_id() * P::UNITS * 32 + quarter * 8;
  float gain[NORMED ? P::UNITS * 8 : 1];
  if (NORMED) {
#pragma unroll
    for (int u = 0; u < P::UNITS; u++)
      if (first + u * 32 < P::IN) load_eight(gain + u * 8, task.gain() + first + u * 32);
  }
  for (int tile = 0; tile < tiles; tile++) {
    const bool last_tile = tile == tiles - 1, wanted = task.wanted(tile);
    const float* row = wanted ? task.row(tile * TILE + spot) : nullptr;
    float value[P::UNITS * 8];
#pragma unroll
    for (int u = 0; u < P::UNITS; u++) {
      if (row && first + u * 32 < P::IN) {
        load_eight_fresh(value + u * 8, row + first + u * 32);
      } else {
#pragma unroll
        for (int i = 0; i < 8; i++) value[u * 8 + i] = 0;
      }
    }
    constexpr int OUTS = P::PAIRED ? P::ROWS / 2 : P::ROWS;
    float before[OUTS_A_THREAD];
#pragma unroll
    for (int i = 0; i < OUTS_A_THREAD; i++) {
      const int index = i * THREADS + threadIdx.x, column = tile * TILE + index / OUTS, out = blockIdx.x * OUTS + index % OUTS;
      const bool mine = wanted && index < TILE * OUTS && out < P::OUT * OUTS / P::ROWS && task.row(column);
      before[i] = mine ? task.before(column, out) : 0;
    }

    float acc[P::GROUPS][4] = {}, squares = 0;
    const char* weights = nullptr;
#pragma unroll
    for (int u = 0; u < P::UNITS; u++) {
      if (u % P::UNITS_A_PIECE == 0) weights = stream.wait(last_tile ? 0 : u / P::UNITS_A_PIECE);
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        x[i] = value[u * 8 + i];
        if (NORMED) squares += x[i] * x[i], x[i] *= first + u * 32 < P::IN ? gain[u * 8 + i] : 0;
      }
      const Split a(x[0], x[1]), b(x[2], x[3]), c(x[4], x[5]), d(x[6], x[7]);
#pragma unroll
      for (int g = 0; g < P::GROUPS; g++) {
        const uint4 w = *reinterpret_cast<const uint4*>(weights + ((u % P::UNITS_A_PIECE) * P::GROUPS + g) * 512);
        tensor_product(WEIGHT(), acc[g], a.high, a.low, b.high, b.low, w.x, w.y);
        tensor_product(WEIGHT(), acc[g], c.high, c.low, d.high, d.low, w.z, w.w);
      }
      if (last_tile && (u % P::UNITS_A_PIECE == P::UNITS_A_PIECE - 1 || u == P::UNITS - 1)) stream.release();
    }
    if (!wanted) continue;  // the same for a whole block

    if (row) {
      const float scale = 1 / operand_scale(WEIGHT()), low = scale / low_scale(WEIGHT());
#pragma unroll
      for (int g = 0; g < P::GROUPS; g++) {
        float* to = &sums.part[warp_id()][spot][g * 8 + quarter * 2];
        to[0] = acc[g][0] * scale + acc[g][2] * low, to[1] = acc[g][1] * scale + acc[g][3] * low;
      }
    }
    if (NORMED) {
      squares += __shfl_xor_sync(ALL_LANES, squares, 1);
      squares += __shfl_xor_sync(ALL_LANES, squares, 2);
      if (quarter == 0) sums.squares[warp_id()][spot] = squares;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OUTS_A_THREAD; i++) {
      const int index = i * THREADS + threadIdx.x, place = index / OUTS, column = tile * TILE + place;
      const int local = index % OUTS, out = blockIdx.x * OUTS + local;
      if (index >= TILE * OUTS || out >= P::OUT * OUTS / P::ROWS || !task.row(column)) continue;
      const int line = P::PAIRED ? local / 8 * 16 + local % 8 : local;
      float sum[4] = {}, other[4] = {}, square[4] = {};
#pragma unroll
      for (int w = 0; w < WARPS_A_BLOCK; w++) {
        sum[w % 4] += sums.part[w][place][line];
        if (P::PAIRED) other[w % 4] += sums.part[w][place][line + 8];
        if (NORMED) square[w % 4] += sums.squares[w][place];
      }
      float total = (sum[0] + sum[1]) + (sum[2] + sum[3]), up = (other[0] + other[1]) + (other[2] + other[3]);
      if (NORMED) {
        const float inverse = 1 / sqrtf(((square[0] + square[1]) + (square[2] + square[3])) / P::IN + RMS_EPS);
        total *= inverse, up *= inverse;
      }
      task.store(column, out, P::PAIRED ? total / (1 + expf(-total)) * up : total, before[i]);
    }
    if (!last_tile) __syncthreads();
  }
}

struct Columns {
  const Block& block;
  __device__ __forceinline__ bool active(int column) const { return block.position[column] >= 0; }
  __device__ __forceinline__ bool wanted(int) const { return true; }
};

struct ProjectTask : Columns {
  __device__ __forceinline__ const float* row(int column) const { return active(column) ? block.model.embeds + column * HT : nullptr; }
  __device__ __forceinline__ const float* gain() const { return nullptr; }
  __device__ __forceinline__ float before(int, int out) const { return block.model.bias[out]; }
  __device__ __forceinline__ void store(int column, int out, float sum, float before) const { block.model.inputs[column * H + out] = sum + before; }
};

struct QkvTask : Columns {
  int layer, width;
  __device__ __forceinline__ const float* row(int column) const {
    return active(column) ? (layer ? block.model.hidden : block.model.inputs) + column * H : nullptr;
  }
  __device__ __forceinline__ const float* gain() const { return block.model.input_norm + layer * H; }
  __device__ __forceinline__ float before(int, int) const { return 0; }
  __device__ __forceinline__ void store(int column, int out, float sum, float) const {
    if (out < Q_WIDTH) {
      block.model.queries[column * Q_WIDTH + out] = sum;
      return;
    }
    out -= Q_WIDTH;
    float* cache = out < KV_WIDTH ? block.model.keys : block.model.values;
    const int row = column / width;
    cache[((layer * MAX_BATCH + row) * G + block.position[column]) * KV_WIDTH + out % KV_WIDTH] = sum;
  }
};

struct OutTask : Columns {
  int layer;
  __device__ __forceinline__ const float* row(int column) const { return active(column) ? block.model.mixed + column * Q_WIDTH : nullptr; }
  __device__ __forceinline__ const float* gain() const { return nullptr; }
  __device__ __forceinline__ float before(int column, int out) const {
    return load_fresh((layer ? block.model.hidden : block.model.inputs) + column * H + out);
  }
  __device__ __forceinline__ void store(int column, int out, float sum, float before) const { block.model.hidden[column * H + out] = before + sum; }
};

struct GateUpTask : Columns {
  int layer;
  __device__ __forceinline__ const float* row(int column) const { return active(column) ? block.model.hidden + column * H : nullptr; }
  __device__ __forceinline__ const float* gain() const { return block.model.post_norm + layer * H; }
  __device__ __forceinline__ float before(int, int) const { return 0; }
  __device__ __forceinline__ void store(int column, int out, float product, float) const { block.model.activated[column * INTER + out] = product; }
};

struct DownTask : Columns {
  __device__ __forceinline__ const float* row(int column) const { return active(column) ? block.model.activated + column * INTER : nullptr; }
  __device__ __forceinline__ const float* gain() const { return nullptr; }
  __device__ __forceinline__ float before(int column, int out) const { return load_fresh(block.model.hidden + column * H + out); }
  __device__ __forceinline__ void store(int column, int out, float sum, float before) const { block.model.hidden[column * H + out] = before + sum; }
};

// The heads of a verify pass: each column its own.
struct TargetHeadTask : Columns {
  int head;
  __device__ __forceinline__ bool wanted(int tile) const {
    bool any = false;
    for (int i = 0; i < TILE; i++) any |= block.position[tile * TILE + i] == head + 1;
    return any;
  }
  __device__ __forceinline__ const float* row(int column) const {
    return block.position[column] == head + 1 ? block.model.hidden + column * H : nullptr;
  }
  __device__ __forceinline__ const float* gain() const { return block.model.final_norm; }
  __device__ __forceinline__ float before(int, int) const { return 0; }
  __device__ __forceinline__ void store(int column, int out, float sum, float) const { block.model.logits[column * V + out] = sum; }
};

// The heads of the drafts: "column" is a row of the batch, which reads one hidden state for several depths.
struct DraftHeadTask : Columns {
  int head, drafts;
  __device__ __forceinline__ bool wanted(int) const { return true; }
  __device__ __forceinline__ const float* row(int row) const {
    const int entry = head - block.first_head[row];
    return block.source[row] >= 0 && entry >= 0 && entry < drafts && head < G - 2 ? block.model.hidden + block.source[row] * H : nullptr;
  }
  __device__ __forceinline__ const float* gain() const { return block.model.final_norm; }
  __device__ __forceinline__ float before(int, int) const { return 0; }
  __device__ __forceinline__ void store(int row, int out, float sum, float) const {
    block.model.draft_logits[(row * drafts + head - block.first_head[row]) * V + out] = sum;
  }
};

// ------------------------------------------------------------------------------------------------------------ attention

// A lane's values of one head: normed with its gain, not yet divided by the root, and rotated.
struct HeadVector {
  static constexpr int PER_LANE = HEAD_DIM / 32;
  float value[PER_LANE], squares;

  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) value[i] = load_fresh(from + lane_id() * PER_LANE + i);
  }
  __device__ __forceinline__ void turn(const float* gain, const float* rotary) {
    squares = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      squares += value[i] * value[i];
      value[i] *= gain[lane_id() * PER_LANE + i];
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const float other = __shfl_xor_sync(ALL_LANES, value[i], 16);
      const float* angle = rotary + ((lane_id() & 15) * PER_LANE + i) * 2;
      value[i] = value[i] * angle[0] + (lane_id() < 16 ? -other : other) * angle[1];
    }
  }
};

// All threads of the grid: four warps a head and column. Softmax over the positions up to the column's own.
__device__ __forceinline__ void attend(Block& block, int layer, int columns, int width) {
  constexpr int TEAMS = WARPS_A_BLOCK / 4, EACH = (G + 3) / 4;
  const Model& model = block.model;
  const int team = warp_id() / 4, member = warp_id() % 4, thread = threadIdx.x % 128;
  const float* gains = model.head_norm + layer * (HEADS + KV_HEADS) * HEAD_DIM;
  for (int first = 0; first < columns * HEADS; first += CTAS * TEAMS) {
    const int task = first + team * CTAS + blockIdx.x, column = task / HEADS, head = task % HEADS;
    const int position = task < columns * HEADS ? block.position[column] : -1;
    float* scores = block.scratch.scores.of_team[team];
    float value[G];
    if (position >= 0) {
      const int kv = head / (HEADS / KV_HEADS);
      const u64 cache = u64((layer * MAX_BATCH + column / width) * G) * KV_WIDTH + kv * HEAD_DIM;
#pragma unroll
      for (int p = 0; p < G; p++)
        value[p] = p <= position && thread < HEAD_DIM ? load_fresh(model.values + cache + p * KV_WIDTH + thread) : 0;
      HeadVector key[EACH], query;
      query.load(model.queries + column * Q_WIDTH + head * HEAD_DIM);
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (member + 4 * i <= position) key[i].load(model.keys + cache + (member + 4 * i) * KV_WIDTH);
      query.turn(gains + head * HEAD_DIM, model.rotary + position * HEAD_DIM);
      const float query_root = 1 / sqrtf(warp_sum(query.squares) / HEAD_DIM + RMS_EPS);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int p = member + 4 * i;
        if (p > position) continue;
        key[i].turn(gains + (HEADS + kv) * HEAD_DIM, model.rotary + p * HEAD_DIM);
        float product = 0;
#pragma unroll
        for (int j = 0; j < HeadVector::PER_LANE; j++) product += query.value[j] * key[i].value[j];
        product = warp_sum(product);
        const float key_root = 1 / sqrtf(warp_sum(key[i].squares) / HEAD_DIM + RMS_EPS);
        if (lane_id() == 0) scores[p] = product * query_root * key_root;
      }
    }
    __syncthreads();
    if (position >= 0) {
      const int lane = lane_id();
      const float low = lane <= position ? scores[lane] : MINUS_INFINITY;
      const float high = G > 32 && lane + 32 <= position ? scores[lane + 32] : MINUS_INFINITY;
      const float largest = key_to_float(warp_max(order_key(fmaxf(low, high))));
      const float share = lane <= position ? expf(low - largest) : 0, more = G > 32 && lane + 32 <= position ? expf(high - largest) : 0;
      const float total = warp_sum(share + more);
      float mixed = 0;
#pragma unroll
      for (int p = 0; p < G; p++) mixed += __shfl_sync(ALL_LANES, p < 32 ? share : more, p & 31) * value[p];
      if (thread < HEAD_DIM) model.mixed[column * Q_WIDTH + head * HEAD_DIM + thread] = mixed / total;
    }
    __syncthreads();
  }
}

// -------------------------------------------------------------------------------------------------------------- a pass

template <bool PROJECTED>
__device__ __forceinline__ void run_pass(Block& block, Stream& stream, int columns, int width) {
  const int tiles = (columns + TILE - 1) / TILE;
  if (PROJECTED) {
    multiply<Projection, false>(block, stream, tiles, ProjectTask{{block}});
    grid_barrier(block);
  }
  for (int layer = 0; layer < LAYERS; layer++) {
    multiply<Qkv, true>(block, stream, tiles, QkvTask{{block}, layer, width});
    grid_barrier(block);
    attend(block, layer, columns, width);
    grid_barrier(block);
    multiply<Out, false>(block, stream, tiles, OutTask{{block}, layer});
    grid_barrier(block);
    multiply<GateUp, true>(block, stream, tiles, GateUpTask{{block}, layer});
    grid_barrier(block);
    multiply<Down, false>(block, stream, tiles, DownTask{{block}});
    grid_barrier(block);
  }
}

__device__ __forceinline__ void run_target_heads(Block& block, Stream& stream, u32 heads, int columns) {
  const int tiles = (columns + TILE - 1) / TILE;
  for (; heads; heads &= heads - 1) {
    multiply<Head, true>(block, stream, tiles, TargetHeadTask{{block}, __ffs(heads) - 1});
    __syncthreads();
  }
  grid_barrier(block);
}

// All threads of a block: the state that the kernel begins with.
__device__ __forceinline__ void begin(Block& block, const u64* addresses) {
  u64* words = reinterpret_cast<u64*>(&block.model);
  for (int i = threadIdx.x; i < int(sizeof(Model) / 8); i += THREADS) words[i] = addresses[i];
  if (threadIdx.x == 0) block.target = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    const Model& model = block.model;
    block.sources[PROJECTION].set<Projection>(model.projection);
    block.sources[QKV].set<Qkv>(model.qkv);
    block.sources[OUT].set<Out>(model.o);
    block.sources[GATE_UP].set<GateUp>(model.gate_up);
    block.sources[DOWN].set<Down>(model.down);
    block.sources[HEAD].set<Head>(model.heads);
  }
  for (int i = threadIdx.x; i < MAX_COLUMNS; i += THREADS) block.position[i] = block.source[i] = -1;
  __syncthreads();
}

// All threads of a block: one row of what enters the pass, from a table or from the Talker.
__device__ __forceinline__ void embed(Block& block, int column, const WEIGHT* from) {
  float* to = (HAS_PROJECTION ? block.model.embeds : block.model.inputs) + column * HT;
  for (int i = threadIdx.x; i < HT; i += THREADS) to[i] = to_float(from[i]);
}
__device__ __forceinline__ const WEIGHT* embedding(const Model& model, int depth, int code) {
  return depth == 0 ? model.talker_table + u64(code) * HT : model.tables + (u64(depth - 1) * V + code) * HT;
}

__device__ __noinline__ void select_entry(Block& block, const float* logits, int row, int depth, int use, float* law, int* codes, int entry) {
  const Request request = block.model.requests[row];
  select_sample_part::select_row(block.scratch.select, logits, request, depth, G - 1, use, law, codes, entry, block.model.errors, row);
  __syncthreads();
}

__device__ __noinline__ void accept_entry(Block& block, int row, int drafts, int coupled) {
  const Model& m = block.model;
  accept_part::accept_row(block.scratch.accept, row, m.drafts, m.draft_laws, m.picks, m.laws, m.requests, m.last, m.codes,
                          m.states, m.rounds, m.history, drafts, coupled);
  __syncthreads();
}

// One thread: commits the pick of a pass of one position.
__device__ __forceinline__ void commit(const Model& model, int row, int depth, int state, bool record) {
  model.codes[row * G + depth] = model.picks[row];
  model.last[row] = depth;
  model.states[row] = state;
  if (!record) return;
  const int round = model.rounds[row];
  int* entry = model.history + (row * G + round) * 3;
  entry[0] = depth, entry[1] = 0, entry[2] = 0;
  model.rounds[row] = round + 1;
}

// All threads of a block: what the next round does, from the state in device memory. Sets `finished`.
__device__ __forceinline__ void plan_round(Block& block, int batch, int drafts, int width_before) {
  const Model& model = block.model;
  __syncthreads();
  if (threadIdx.x == 0) block.finished = 1;
  __syncthreads();
  const int width = drafts + 1;
  for (int i = threadIdx.x; i < MAX_COLUMNS; i += THREADS) {
    const int row = i / width, offset = i % width, last = row < batch ? load_fresh(model.last + row) : G;
    const int drafted = min(drafts, G - 2 - last);
    block.position[i] = last < G - 1 && offset <= drafted ? last + 1 + offset : -1;
    if (last < G - 1) block.finished = 0;
  }
  if (int(threadIdx.x) < batch) {
    const int row = threadIdx.x, last = load_fresh(model.last + row);
    block.first_head[row] = last;
    block.source[row] = last < G - 1 ? row * width_before + load_fresh(model.states + row) : -1;
  }
  __syncthreads();
}

// All threads: the heads that the columns of the pass need, and those that its drafts need.
__device__ __forceinline__ u32 target_heads(const Block& block, int columns) {
  u32 heads = 0;
  for (int i = lane_id(); i < columns; i += 32)
    if (block.position[i] > 0) heads |= 1u << (block.position[i] - 1);
  return warp_or(heads);
}
__device__ __forceinline__ u32 draft_heads_of(const Block& block, int batch, int drafts) {
  u32 heads = 0;
  if (lane_id() < batch && block.source[lane_id()] >= 0)
    for (int i = 0; i < drafts; i++)
      if (block.first_head[lane_id()] + i < G - 2) heads |= 1u << (block.first_head[lane_id()] + i);
  return warp_or(heads);
}

KERNEL __launch_bounds__(THREADS, 1) fused_frame(const u64* addresses, int batch, int drafts, int coupled) {
  DYNAMIC_SHARED(memory);
  Block& block = *reinterpret_cast<Block*>(memory);
  const Model& model = block.model;
  const int cta = blockIdx.x;
  begin(block, addresses);
  Stream stream(block, memory + BLOCK_BYTES);
  stream.push(BODY);
  stream.push(1u);

  // Prefill: the Talker's state and its code.
  if (int(threadIdx.x) < 2 * batch) block.position[threadIdx.x] = threadIdx.x & 1;
  if (cta < batch) {
    if (threadIdx.x == 0) model.last[cta] = 0, model.rounds[cta] = 0, model.errors[cta] = 0x7F7F7F7F;
    float* to = (HAS_PROJECTION ? model.embeds : model.inputs) + cta * 2 * HT;
    for (int i = threadIdx.x; i < HT; i += THREADS) to[i] = model.talker_hidden[cta * HT + i];
    embed(block, cta * 2 + 1, embedding(model, 0, model.codes[cta * G]));
  }
  grid_barrier(block);
  run_pass<HAS_PROJECTION>(block, stream, 2 * batch, 2);
  // Without drafts the next pass is known: its weights may come.
  if (drafts == 0 && G > 2) stream.push(BODY), stream.push(2u);
  run_target_heads(block, stream, 1u, 2 * batch);
  if (cta < batch) {
    select_entry(block, model.logits + (cta * 2 + 1) * V, cta, 1, USE_TARGET, nullptr, model.picks, cta);
    if (threadIdx.x == 0) commit(model, cta, 1, 1, false);
    embed(block, cta * (drafts + 1), embedding(model, 1, model.picks[cta]));
  }
  grid_barrier(block);

  const int width = drafts + 1, columns = batch * width;
  for (int round = 1, width_before = 2;; round++, width_before = width) {
    plan_round(block, batch, drafts, width_before);
    if (block.finished) break;
    const u32 heads = target_heads(block, columns);
    if (drafts) {
      const u32 for_drafts = draft_heads_of(block, batch, drafts);
      if (for_drafts) {
        stream.push(for_drafts);
        stream.push(BODY);
        stream.push(heads);
        for (u32 left = for_drafts; left; left &= left - 1) {
          multiply<Head, true>(block, stream, 1, DraftHeadTask{{block}, __ffs(left) - 1, drafts});
          __syncthreads();
        }
        grid_barrier(block);
        for (int entry = cta; entry < batch * drafts; entry += CTAS) {
          const int row = entry / drafts, depth = block.first_head[row] + 1 + entry % drafts;
          if (block.source[row] < 0 || depth > G - 2) continue;
          select_entry(block, model.draft_logits + entry * V, row, depth, coupled ? USE_TARGET : USE_DRAFT,
                       coupled ? nullptr : model.draft_laws + entry * V, model.drafts, entry);
          embed(block, row * width + 1 + entry % drafts, embedding(model, depth, model.drafts[entry]));
        }
        grid_barrier(block);
      } else {
        stream.push(BODY);
        stream.push(heads);
      }
    }
    run_pass<HAS_PROJECTION>(block, stream, columns, width);
    if (drafts == 0 && round + 1 < G - 1) stream.push(BODY), stream.push(1u << (round + 1));
    run_target_heads(block, stream, heads, columns);
    for (int entry = cta; entry < columns; entry += CTAS) {
      if (block.position[entry] < 0) continue;
      const int row = entry / width, depth = block.position[entry];
      select_entry(block, model.logits + entry * V, row, depth, USE_TARGET, drafts && !coupled ? model.laws + entry * V : nullptr,
                   model.picks, entry);
      if (drafts == 0) {
        if (threadIdx.x == 0) commit(model, row, depth, 0, true);
        if (depth < G - 1) embed(block, row, embedding(model, depth, model.picks[row]));
      }
    }
    grid_barrier(block);
    if (drafts == 0) continue;
    if (cta < batch && block.source[cta] >= 0) {
      accept_entry(block, cta, drafts, coupled);
      const int last = model.last[cta];
      if (last < G - 1) embed(block, cta * width, embedding(model, last, model.codes[cta * G + last]));
    }
    grid_barrier(block);
  }

  // The Talker's next input, added in the order of the depths.
  for (int i = cta * THREADS + threadIdx.x; i < batch * HT; i += CTAS * THREADS) {
    const int row = i / HT, channel = i % HT;
    float sum = 0;
    for (int depth = 0; depth < G; depth++) {
      const float value = to_float(embedding(model, depth, load_fresh(model.codes + row * G + depth))[channel]);
      sum = depth ? sum + value : value;
    }
    model.embedded[i] = sum;
  }
}

// One pass over rows that are given: inputs [B, W, H] f32 at positions [B, W] (negative: none), W <= 8; out: states
// [B, W, H] f32, after the final norm.
KERNEL __launch_bounds__(THREADS, 1) fused_pass(const u64* addresses, const float* inputs, const int* positions, float* states, int batch, int width) {
  DYNAMIC_SHARED(memory);
  Block& block = *reinterpret_cast<Block*>(memory);
  const int columns = batch * width;
  begin(block, addresses);
  if (threadIdx.x == 0) block.model.inputs = const_cast<float*>(inputs);
  for (int i = threadIdx.x; i < columns; i += THREADS) block.position[i] = positions[i];
  __syncthreads();
  Stream stream(block, memory + BLOCK_BYTES);
  stream.product = HAS_PROJECTION;  // the rows come projected
  stream.push(BODY);
  run_pass<false>(block, stream, columns, width);
  for (int column = blockIdx.x * WARPS_A_BLOCK + warp_id(); column < columns; column += CTAS * WARPS_A_BLOCK) {
    if (block.position[column] < 0) continue;
    const float* row = block.model.hidden + column * H;
    float squares = 0;
    for (int i = lane_id(); i < H; i += 32) squares += load_fresh(row + i) * load_fresh(row + i);
    const float inverse = 1 / sqrtf(warp_sum(squares) / H + RMS_EPS);
    for (int i = lane_id(); i < H; i += 32) states[column * H + i] = load_fresh(row + i) * inverse * block.model.final_norm[i];
  }
}
