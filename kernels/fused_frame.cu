// fused_frame and fused_pass: the whole CodePredictor in one persistent cooperative kernel.
//
// fused_frame decodes one frame for every row of a batch: prefill of two positions, then rounds of draft heads, select,
// verify pass, select, accept, until every row is complete, and the sum of the frame's embeddings. fused_pass runs one
// pass over given rows and returns their hidden states. select_sample.cu and accept.cu stand in front of this file.
//
// Layout   model: the addresses of Model below, in device memory. Weights are packed for the grid (see Product), one
//          kind of matrix behind the other. Working memory of a pass: columns are [B * W], column row * W + i for
//          position i of a row; W <= 8, B <= MAX_BATCH.
//          keys and values [LAYERS, MAX_BATCH, G, KV_HEADS * HEAD_DIM] f32, not yet normed and rotated.
// Launch   cooperative, grid (CTAS), block THREADS + 32, SHARED_BYTES of dynamic shared memory. counter[0] must be 0.
// Limits   H, HT, INTER and HEADS * HEAD_DIM multiples of 32; HEAD_DIM 64, 96 or 128; G <= 33; weights F16 or BF16.
//
// Every product is a [16 x 16] x [16 x 8] tensor-core product whose 16 rows are 8 positions twice: the high and the low
// part of each activation, so that next to nothing of its FP32 value is lost to the 16-bit operand, and a position's sums
// are the same whatever stands in the other rows. A block owns a few rows of each weight matrix, a warp a slice of the
// inner dimension; the slices are added in one fixed order. Who stores an activation splits it, once, into the words that
// a lane of a product loads: of each two values the high parts, then the low ones. RMSNorm is folded in: the gain
// multiplies what is stored, each block adds the squares of its rows, and the inverse root multiplies the product.
//
// Weights do not depend on activations: one warp more than THREADS streams them through a ring in shared memory, across
// the grid barriers, by the copy engine where there is one. It keeps IN_FLIGHT chunks on their way and no more: what
// queues in the memory system stands before the activations and the barriers, which everyone waits for.

// FP16 operands: activations up to 4e6 fit, and the low part stays above the denormal numbers.
__device__ __forceinline__ constexpr float operand_scale(F16) { return 1.0f / 64; }
__device__ __forceinline__ constexpr float low_scale(F16) { return 2048; }
__device__ __forceinline__ constexpr float operand_scale(BF16) { return 1; }
__device__ __forceinline__ constexpr float low_scale(BF16) { return 1; }

// The two halves of a value among the words of its row.
__device__ __forceinline__ void store_split(u32* row, int index, float value) {
  WEIGHT* at = reinterpret_cast<WEIGHT*>(row) + index / 2 * 4 + (index & 1);
  WEIGHT high, low;
  value *= operand_scale(WEIGHT());
  store(&high, value);
  store(&low, (value - to_float(high)) * low_scale(WEIGHT()));
  at[0] = high, at[2] = low;
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

// Addresses, in the order of MODEL_FIELDS in trt_cpspec/fused.py.
struct Model {
  const char* weights;                                      // packed: projection, qkv, o, gate_up, down, heads
  const float *bias, *input_norm, *post_norm, *final_norm;  // [H], [LAYERS, H], [LAYERS, H], [H]
  const float *head_norm, *rotary;                          // [LAYERS, 2, HEAD_DIM]: queries, keys; [G, HEAD_DIM / 2, 2]
  const WEIGHT *talker_table, *tables;                      // [*, HT], [G - 1, V, HT]
  u32 *embeds, *input_words, *hidden_words, *mixed, *activated;  // split activations
  float *inputs, *input_squares, *hidden, *hidden_squares;     // [B * W, H], and sums of 8 squares each [B * W, H / 8]
  float *queries, *keys, *values;
  float *logits, *laws, *draft_logits, *draft_laws;         // [B, W, V], [B, W, V], [B, W - 1, V] twice
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
  static constexpr int WARP_BYTES = UNITS * UNIT_BYTES;
  static constexpr int PART_BYTES = WARPS_A_BLOCK * WARP_BYTES;  // of a block
  static constexpr int PART_CHUNKS = (PART_BYTES + CHUNK_BYTES - 1) / CHUNK_BYTES;
  static constexpr u64 BYTES = u64(CTAS) * PART_BYTES;
  static_assert(PART_CHUNKS <= CHUNKS, "the ring is too small for this matrix");
  __device__ __forceinline__ static bool mine() { return int(blockIdx.x) * ROWS < OUT; }
};
using Projection = Product<HT, H>;
using Qkv = Product<H, Q_WIDTH + 2 * KV_WIDTH>;
using Out = Product<Q_WIDTH, H>;
using GateUp = Product<H, 2 * INTER, true>;
using Down = Product<INTER, H>;
using Head = Product<H, V>;

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int MOST_ROWS = larger(larger(larger(HAS_PROJECTION ? Projection::ROWS : 0, Qkv::ROWS), larger(Out::ROWS, GateUp::ROWS)), larger(Down::ROWS, Head::ROWS));
constexpr int PADDING = 8;
constexpr int BODY_PARTS = (HAS_PROJECTION ? 1 : 0) + LAYERS * 4;
constexpr int RING_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int REGISTERS_FOR_OPERANDS = 96;  // of a thread: for the weights and activations of a product
static_assert(CHUNK_BYTES % 512 == 0 && IN_FLIGHT <= CHUNKS, "chunks");

// What the warps of a block add up, and the statistics of RMSNorm.
struct Sums {
  float part[WARPS_A_BLOCK][TILE][MOST_ROWS + PADDING];
  float inverse[TILE];  // root of the mean square of each position
};

struct Scores {
  float of_team[WARPS_A_BLOCK / 4][64];
};

// A block's part of a matrix: where it lies, in units of 16 bytes, and how much it is.
struct Part {
  u32 offset, bytes;
};

struct Block {
  Model model;
  Part body[BODY_PARTS], head;
  int body_parts;
  // What will be used, in its order; how much was said, and which chunk of the stream is the first not used up.
  u32 queue[8], pushed, consumed;
  int position[MAX_COLUMNS], row_of[MAX_COLUMNS];  // of each column; a negative position: there is none
  // Heads to apply: which, and to which column's hidden state; entries are columns, or drafts of the rows.
  int head_of[MAX_COLUMNS], source_of[MAX_COLUMNS];
  int first_head[MAX_BATCH], state[MAX_BATCH];
  Request request[MAX_BATCH];
  int pick;
  int finished;
  u32 target;  // of the grid barrier
  u64 arrival[CHUNKS];
  float head_norm[LAYERS * 2 * HEAD_DIM], rotary[G * HEAD_DIM];
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
static_assert(BLOCK_BYTES + RING_BYTES <= SHARED_BYTES, "SHARED_BYTES");

// Entries of the queue; anything else is a set of heads.
constexpr u32 BODY = 0, STOP = 0xFFFFFFFFu;

__device__ __forceinline__ bool has_arrived(Block& block, u32 chunk) {
  return arrived_by(&block.arrival[chunk % CHUNKS], chunk / CHUNKS & 1);
}

// The warp that streams: copies parts chunk by chunk, in the order of the queue, and not faster than memory gives them: what
// is ordered too early stands before what others wait for. With the copy engine one lane does it.
struct Producer {
  Block& block;
  char* ring;
  u32 issued = 0, slot = 0, last = 0;  // slot of the next chunk, and when the last one was ordered
  u32 oldest = 0, oldest_parity = 0;               // of the oldest on its way

  __device__ __forceinline__ void copy(const Part& part, u64 skipped) {
    const char* from = block.model.weights + skipped + u64(part.offset) * 16;
    for (u32 at = 0; at < part.bytes; at += CHUNK_BYTES) {
      while (issued - load_changing(&block.consumed) >= CHUNKS) {
      }
      if (issued >= IN_FLIGHT) {
        while (!arrived_by(&block.arrival[oldest], oldest_parity)) {
        }
        if (++oldest == CHUNKS) oldest = 0, oldest_parity ^= 1;
      }
      while (clocks() - last < CLOCKS_A_CHUNK && !ON_HOST) {
      }
      last = clocks();
      const u32 bytes = min(part.bytes - at, u32(CHUNK_BYTES));
      if (BULK_COPIES) copy_bulk(ring + slot * CHUNK_BYTES, from + at, bytes, &block.arrival[slot]);
      else copy_lanes(ring + slot * CHUNK_BYTES, from + at, bytes, &block.arrival[slot]);
      issued++;
      if (++slot == CHUNKS) slot = 0;
    }
  }

  __device__ __forceinline__ void run() {
    if (BULK_COPIES && lane_id() != 0) return;
    for (u32 taken = 0;; taken++) {
      while (load_changing(&block.pushed) == taken) {
      }
      const u32 what = load_changing(&block.queue[taken % 8]);
      if (what == STOP) return;
      if (what == BODY) {
        for (int i = 0; i < block.body_parts; i++) copy(block.body[i], 0);
      } else {
        for (u32 heads = what; heads; heads &= heads - 1) copy(block.head, u64(__ffs(heads) - 1) * Head::BYTES);
      }
    }
  }
};

// What the other warps know of the stream: the chunk at which the next part begins.
struct Stream {
  Block& block;
  const char* ring;
  u32 chunk = 0;

  // Says what will be used behind all that was said before.
  __device__ __forceinline__ void push(u32 what) {
    if (threadIdx.x != 0) return;
    block.queue[block.pushed % 8] = what;
    __threadfence_block();
    *static_cast<volatile u32*>(&block.pushed) = block.pushed + 1;
  }

  // Waits for the warp's share of the part of a matrix, and returns where it begins in the ring.
  template <class P>
  __device__ __forceinline__ u32 wait() const {
    const u32 begin = warp_id() * P::WARP_BYTES, end = begin + P::WARP_BYTES;
    if (lane_id() == 0) {
      for (u32 i = begin / CHUNK_BYTES; i <= (end - 1) / CHUNK_BYTES; i++)
        while (!has_arrived(block, chunk + i)) {
        }
    }
    __syncwarp();
    return (chunk % CHUNKS * CHUNK_BYTES + begin) % RING_BYTES;
  }

  // This lane's 16 bytes, so far behind the beginning.
  __device__ __forceinline__ uint4 load(u32 begin, u32 offset) const {
    const u32 at = begin + offset;
    return *reinterpret_cast<const uint4*>(ring + (at < RING_BYTES ? at : at - RING_BYTES) + lane_id() * 16);
  }

  // All threads, behind a barrier: the part has been used.
  template <class P>
  __device__ __forceinline__ void release() {
    chunk += P::PART_CHUNKS;
    if (threadIdx.x == 0) *static_cast<volatile u32*>(&block.consumed) = chunk;
  }
};

// Where the block's part of a matrix lies; of no bytes where it has no rows of it.
template <class P>
__device__ __forceinline__ Part part_of(u64 start) {
  return {u32((start + u64(blockIdx.x) * P::PART_BYTES) / 16), P::mine() ? u32(P::PART_BYTES) : 0};
}

constexpr u64 QKV_AT = HAS_PROJECTION ? Projection::BYTES : 0, OUT_AT = QKV_AT + LAYERS * Qkv::BYTES, GATE_UP_AT = OUT_AT + LAYERS * Out::BYTES,
              DOWN_AT = GATE_UP_AT + LAYERS * GateUp::BYTES, HEADS_AT = DOWN_AT + LAYERS * Down::BYTES;

__device__ __forceinline__ void list_body(Block& block, bool projected) {
  int count = 0;
  if (HAS_PROJECTION && projected) block.body[count++] = part_of<Projection>(0);
  for (int layer = 0; layer < LAYERS; layer++) {
    block.body[count++] = part_of<Qkv>(QKV_AT + layer * Qkv::BYTES);
    block.body[count++] = part_of<Out>(OUT_AT + layer * Out::BYTES);
    block.body[count++] = part_of<GateUp>(GATE_UP_AT + layer * GateUp::BYTES);
    block.body[count++] = part_of<Down>(DOWN_AT + layer * Down::BYTES);
  }
  block.body_parts = count;
  block.head = part_of<Head>(HEADS_AT);
}

// A barrier of all threads of the grid but those that stream, in two halves: what stands between them is done while others
// are waited for. Plain loads behind the second half see what was stored before the first, by any block.
__device__ __forceinline__ void grid_arrive(Block& block) {
  __syncthreads();
  if (threadIdx.x == 0) {
    block.target += CTAS;
    arrive(block.model.counter);
  }
}
__device__ __forceinline__ void grid_wait(Block& block) {
  if (threadIdx.x == 0) {
    u32 polls = 0;
    while (arrived(block.model.counter) < block.target) polled(polls);
  }
  __syncthreads();
}
__device__ __forceinline__ void grid_barrier(Block& block) {
  grid_arrive(block);
  grid_wait(block);
}

// ------------------------------------------------------------------------------------------------- one matrix product

// One warp: the inverse root of the mean square of a row of H values, from its sums of 8 squares. In two steps: to load,
// and to add up.
struct MeanSquare {
  float sum = 0;
  __device__ __forceinline__ void load(const float* squares) {
#pragma unroll
    for (int i = 0; i < (H / 8 + 31) / 32; i++)
      if (i * 32 + lane_id() < H / 8) sum += load_fresh(squares + i * 32 + lane_id());
  }
  __device__ __forceinline__ float inverse_root() const { return rsqrtf(warp_sum(sum) * (1.0f / H) + RMS_EPS); }
};

// Eight lanes, a value each: the sum of their squares.
__device__ __forceinline__ float sum_of_eight(float value) {
  float sum = value * value;
  sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  sum += __shfl_xor_sync(ALL_LANES, sum, 2);
  return sum + __shfl_xor_sync(ALL_LANES, sum, 4);
}

// All threads of the grid: a barrier, if `waits`, then each block's rows of a matrix times `tiles` tiles of columns. What
// does not depend on other blocks is done within the barrier: addresses, residuals and, as far as there are registers,
// the weights.
// Task:  const u32* row(int column): where its IN split values will be, or null; of a NORMED task const float* squares(int
//        column); Place place(int column, int out): where a result goes, and what of it this block knows before; void
//        store(const Place&, float sum) for 8 neighbouring lanes at a time, `valid` or not; int used(int tile): how many
//        of the tile's columns, from the first, may have a row. The result of a paired matrix is silu(first) times second.
template <class P, class Task>
__device__ __forceinline__ void multiply(Block& block, Stream& stream, int tiles, const Task& task, bool waits = true) {
  if (waits) grid_arrive(block);
  if (!P::mine()) {
    if (waits) grid_wait(block);
    return;
  }
  Sums& sums = block.scratch.sums;
  const int quarter = lane_id() & 3, spot = lane_id() >> 2;
  const int first = warp_id() * P::UNITS * 32 + quarter * 8;
  constexpr int OUTS = P::PAIRED ? P::ROWS / 2 : P::ROWS, LAST = P::OUT * OUTS / P::ROWS;
  constexpr int SPARE = REGISTERS_FOR_OPERANDS / 4 - P::UNITS * 2;
  constexpr int EARLY = SPARE < 0 ? 0 : SPARE / P::GROUPS < P::UNITS ? SPARE / P::GROUPS : P::UNITS;
#pragma unroll 1
  for (int tile = 0; tile < tiles; tile++) {
    const bool last_tile = tile == tiles - 1;
    const int used = task.used(tile);
    const u32* row = spot < used ? task.row(tile * TILE + spot) : nullptr;
    const int my_column = tile * TILE + int(threadIdx.x) / OUTS, my_out = blockIdx.x * OUTS + int(threadIdx.x) % OUTS;
    const bool mine = int(threadIdx.x) < used * OUTS && my_out < LAST && task.row(my_column);
    typename Task::Place early = {};
    if (mine) early = task.place(my_column, my_out);
    const u32 weights = stream.wait<P>();
    uint4 held[EARLY ? EARLY * P::GROUPS : 1];
#pragma unroll
    for (int i = 0; i < EARLY * P::GROUPS; i++) held[i] = stream.load(weights, i * 512);

    if (waits && tile == 0) grid_wait(block);

    uint4 words[P::UNITS * 2];
#pragma unroll
    for (int u = 0; u < P::UNITS; u++) {
      const bool inside = P::IN % (WARPS_A_BLOCK * 32) == 0 || first + u * 32 < P::IN;
#pragma unroll
      for (int i = 0; i < 2; i++)
        words[u * 2 + i] = row && inside ? load_fresh(reinterpret_cast<const uint4*>(row + first + u * 32) + i) : make_uint4(0, 0, 0, 0);
    }
    // A warp a position, as far as there are warps; of the others below.
    MeanSquare square;
    const bool squaring = Task::NORMED && warp_id() < used && task.row(tile * TILE + warp_id());
    if constexpr (Task::NORMED)
      if (squaring) square.load(task.squares(tile * TILE + warp_id()));

    // Sums that do not wait for each other.
    constexpr int CHAINS = P::GROUPS >= 4 ? 1 : P::GROUPS >= 2 ? 2 : 4;
    float acc[P::GROUPS][CHAINS][4] = {};
#pragma unroll
    for (int u = 0; u < P::UNITS; u++) {
      const uint4 a = words[u * 2], b = words[u * 2 + 1];
#pragma unroll
      for (int g = 0; g < P::GROUPS; g++) {
        const uint4 w = u < EARLY ? held[u * P::GROUPS + g] : stream.load(weights, (u * P::GROUPS + g) * 512);
        tensor_product(WEIGHT(), acc[g][u * 2 % CHAINS], a.x, a.y, a.z, a.w, w.x, w.y);
        tensor_product(WEIGHT(), acc[g][(u * 2 + 1) % CHAINS], b.x, b.y, b.z, b.w, w.z, w.w);
      }
    }
    if (used == 0 && !last_tile) continue;  // the same for a whole block

    if (row) {
      const float scale = 1 / operand_scale(WEIGHT()), low = scale / low_scale(WEIGHT());
#pragma unroll
      for (int g = 0; g < P::GROUPS; g++) {
        float2 both = make_float2(0, 0);
#pragma unroll
        for (int c = 0; c < CHAINS; c++)
          both.x += acc[g][c][0] * scale + acc[g][c][2] * low, both.y += acc[g][c][1] * scale + acc[g][c][3] * low;
        *reinterpret_cast<float2*>(&sums.part[warp_id()][spot][g * 8 + quarter * 2]) = both;
      }
    }
    if constexpr (Task::NORMED) {
      if (squaring) {
        const float inverse = square.inverse_root();
        if (lane_id() == 0) sums.inverse[warp_id()] = inverse;
      }
      for (int i = warp_id() + WARPS_A_BLOCK; i < used; i += WARPS_A_BLOCK) {
        if (!task.row(tile * TILE + i)) continue;
        MeanSquare other;
        other.load(task.squares(tile * TILE + i));
        const float inverse = other.inverse_root();
        if (lane_id() == 0) sums.inverse[i] = inverse;
      }
    }
    __syncthreads();
    if (last_tile) stream.release<P>();
#pragma unroll 1
    for (int begin = warp_id() * 32; begin < used * OUTS; begin += THREADS) {
      const int index = begin + lane_id(), place = index / OUTS, column = tile * TILE + place;
      const int local = index % OUTS, out = blockIdx.x * OUTS + local;
      bool valid = mine;
      if (begin >= THREADS) {
        valid = index < used * OUTS && out < LAST && task.row(column);
        if (valid) early = task.place(column, out);
      }
      float total = 0;
      if (valid) {
        const int line = P::PAIRED ? local / 8 * 16 + local % 8 : local;
        float sum[2] = {}, other[2] = {};
#pragma unroll
        for (int w = 0; w < WARPS_A_BLOCK; w++) {
          sum[w % 2] += sums.part[w][place][line];
          if (P::PAIRED) other[w % 2] += sums.part[w][place][line + 8];
        }
        const float inverse = Task::NORMED ? sums.inverse[place] : 1;
        total = (sum[0] + sum[1]) * inverse;
        if (P::PAIRED) total = __fdividef(total, 1 + expf(-total)) * ((other[0] + other[1]) * inverse);
      }
      task.store(early, total, valid);
    }
    if (!last_tile) __syncthreads();
  }
}

template <bool NORMED_>
struct Columns {
  static constexpr bool NORMED = NORMED_;
  const Block& block;
  int columns;
  __device__ __forceinline__ bool active(int column) const { return block.position[column] >= 0; }
  __device__ __forceinline__ int used(int tile) const { return min(columns - tile * TILE, TILE); }
};

// What makes the residual stream: the sum is added to what is there, and stored for the norm that follows.
struct StateTask : Columns<false> {
  const float* gain;
  struct Place {
    float* state;
    u32* words;
    float* squares;  // of its eight values
    int out;
    float before, gain;
  };
  __device__ __forceinline__ void store(const Place& place, float sum, bool valid) const {
    const float value = place.before + sum, squares = sum_of_eight(value);
    if (!valid) return;
    *place.state = value;
    store_split(place.words, place.out, value * place.gain);
    if (place.out % 8 == 0) *place.squares = squares;
  }
};

struct ProjectTask : StateTask {
  __device__ __forceinline__ const u32* row(int column) const { return active(column) ? block.model.embeds + column * HT : nullptr; }
  __device__ __forceinline__ Place place(int column, int out) const {
    const Model& m = block.model;
    return {m.inputs + column * H + out, m.input_words + column * H, m.input_squares + column * (H / 8) + out / 8, out, __ldg(m.bias + out), __ldg(gain + out)};
  }
};

struct HiddenTask : StateTask {
  __device__ __forceinline__ Place place_behind(const float* before, int column, int out) const {
    const Model& m = block.model;
    return {m.hidden + column * H + out, m.hidden_words + column * H, m.hidden_squares + column * (H / 8) + out / 8, out, load_fresh(before + column * H + out), __ldg(gain + out)};
  }
};

struct OutTask : HiddenTask {
  int layer;
  __device__ __forceinline__ const u32* row(int column) const { return active(column) ? block.model.mixed + column * Q_WIDTH : nullptr; }
  __device__ __forceinline__ Place place(int column, int out) const {
    return place_behind(layer ? block.model.hidden : block.model.inputs, column, out);
  }
};

struct DownTask : HiddenTask {
  __device__ __forceinline__ const u32* row(int column) const { return active(column) ? block.model.activated + column * INTER : nullptr; }
  __device__ __forceinline__ Place place(int column, int out) const { return place_behind(block.model.hidden, column, out); }
};

struct QkvTask : Columns<true> {
  int layer;
  struct Place {
    float* to;
  };
  __device__ __forceinline__ const u32* row(int column) const {
    return active(column) ? (layer ? block.model.hidden_words : block.model.input_words) + column * H : nullptr;
  }
  __device__ __forceinline__ const float* squares(int column) const {
    return (layer ? block.model.hidden_squares : block.model.input_squares) + column * (H / 8);
  }
  __device__ __forceinline__ Place place(int column, int out) const {
    if (out < Q_WIDTH) return {block.model.queries + column * Q_WIDTH + out};
    out -= Q_WIDTH;
    float* cache = out < KV_WIDTH ? block.model.keys : block.model.values;
    return {cache + ((layer * MAX_BATCH + block.row_of[column]) * G + block.position[column]) * KV_WIDTH + out % KV_WIDTH};
  }
  __device__ __forceinline__ void store(const Place& place, float sum, bool valid) const {
    if (valid) *place.to = sum;
  }
};

struct GateUpTask : Columns<true> {
  struct Place {
    u32* words;
    int out;
  };
  __device__ __forceinline__ const u32* row(int column) const { return active(column) ? block.model.hidden_words + column * H : nullptr; }
  __device__ __forceinline__ const float* squares(int column) const { return block.model.hidden_squares + column * (H / 8); }
  __device__ __forceinline__ Place place(int column, int out) const { return {block.model.activated + column * INTER, out}; }
  __device__ __forceinline__ void store(const Place& place, float product, bool valid) const {
    if (valid) store_split(place.words, place.out, product);
  }
};

// One head, for the entries that want it; `columns` counts entries.
struct HeadTask : Columns<true> {
  int head;
  float* logits;
  struct Place {
    float* to;
  };
  __device__ __forceinline__ const u32* row(int entry) const {
    return block.head_of[entry] == head ? block.model.hidden_words + block.source_of[entry] * H : nullptr;
  }
  __device__ __forceinline__ const float* squares(int entry) const { return block.model.hidden_squares + block.source_of[entry] * (H / 8); }
  __device__ __forceinline__ int used(int tile) const {
    const u32 wanted = __ballot_sync(ALL_LANES, lane_id() < TILE && tile * TILE + lane_id() < columns && block.head_of[tile * TILE + (lane_id() & 7)] == head);
    return 32 - __clz(wanted);
  }
  __device__ __forceinline__ Place place(int entry, int out) const { return {logits + entry * V + out}; }
  __device__ __forceinline__ void store(const Place& place, float sum, bool valid) const {
    if (valid) *place.to = sum;
  }
};

// ------------------------------------------------------------------------------------------------------------ attention

// A lane's values of one head: multiplied by the gain of its norm, not by the inverse root, and rotated.
struct HeadVector {
  static constexpr int PER_LANE = HEAD_DIM / 32;
  float value[PER_LANE], squares;

  __device__ __forceinline__ void load(const float* from) {
    from += lane_id() * PER_LANE;
    if (PER_LANE == 4) {
      const float4 four = load_fresh(reinterpret_cast<const float4*>(from));
      value[0] = four.x, value[1] = four.y, value[PER_LANE - 2] = four.z, value[PER_LANE - 1] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) value[i] = load_fresh(from + i);
    }
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
__device__ __forceinline__ void attend(Block& block, int layer, int columns) {
  constexpr int TEAMS = WARPS_A_BLOCK / 4, EACH = (G + 3) / 4;
  const Model& model = block.model;
  const int team = warp_id() / 4, member = warp_id() % 4, thread = threadIdx.x % 128;
  const float* gains = block.head_norm + layer * 2 * HEAD_DIM;
#pragma unroll 1
  for (int first = blockIdx.x; first < columns * HEADS; first += CTAS * TEAMS) {
    const int task = first + team * CTAS, column = task / HEADS, head = task % HEADS;
    const int position = task < columns * HEADS ? block.position[column] : -1;
    float* scores = block.scratch.scores.of_team[team];
    float value[G];
    if (position >= 0) {
      const int kv = head / (HEADS / KV_HEADS);
      const u64 cache = u64((layer * MAX_BATCH + block.row_of[column]) * G) * KV_WIDTH + kv * HEAD_DIM;
      HeadVector key[EACH], query;
      query.load(model.queries + column * Q_WIDTH + head * HEAD_DIM);
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (member + 4 * i <= position) key[i].load(model.keys + cache + (member + 4 * i) * KV_WIDTH);
#pragma unroll
      for (int p = 0; p < G; p++)
        value[p] = p <= position && thread < HEAD_DIM ? load_fresh(model.values + cache + p * KV_WIDTH + thread) : 0;
      query.turn(gains, block.rotary + position * HEAD_DIM);
      const float query_root = rsqrtf(warp_sum(query.squares) * (1.0f / HEAD_DIM) + RMS_EPS);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int p = member + 4 * i;
        if (p > position) break;
        key[i].turn(gains + HEAD_DIM, block.rotary + p * HEAD_DIM);
        float product = 0, squares = key[i].squares;
#pragma unroll
        for (int j = 0; j < HeadVector::PER_LANE; j++) product += query.value[j] * key[i].value[j];
#pragma unroll
        for (int step = 16; step; step >>= 1) {
          product += __shfl_xor_sync(ALL_LANES, product, step);
          squares += __shfl_xor_sync(ALL_LANES, squares, step);
        }
        if (lane_id() == 0) scores[p] = product * query_root * rsqrtf(squares * (1.0f / HEAD_DIM) + RMS_EPS);
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
      if (thread < HEAD_DIM) store_split(model.mixed + column * Q_WIDTH, head * HEAD_DIM + thread, __fdividef(mixed, total));
    }
    __syncthreads();
  }
}

// -------------------------------------------------------------------------------------------------------------- a pass

template <bool PROJECTED>
__device__ __forceinline__ void run_pass(Block& block, Stream& stream, int columns) {
  const int tiles = (columns + TILE - 1) / TILE;
  const Model& model = block.model;
  if constexpr (PROJECTED) multiply<Projection>(block, stream, tiles, ProjectTask{{{block, columns}, model.input_norm}});
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; layer++) {
    multiply<Qkv>(block, stream, tiles, QkvTask{{block, columns}, layer});
    grid_barrier(block);
    attend(block, layer, columns);
    multiply<Out>(block, stream, tiles, OutTask{{{{block, columns}, model.post_norm + layer * H}}, layer});
    multiply<GateUp>(block, stream, tiles, GateUpTask{{block, columns}});
    const float* next_norm = layer + 1 < LAYERS ? model.input_norm + (layer + 1) * H : model.final_norm;
    multiply<Down>(block, stream, tiles, DownTask{{{{block, columns}, next_norm}}});
  }
}

// All threads of the grid: a barrier, the heads of a set, for the entries that want them.
__device__ __forceinline__ void run_heads(Block& block, Stream& stream, u32 heads, int entries, float* logits) {
  bool first = true;
#pragma unroll 1
  for (; heads; heads &= heads - 1) {
    multiply<Head>(block, stream, (entries + TILE - 1) / TILE, HeadTask{{block, entries}, __ffs(heads) - 1, logits}, first);
    __syncthreads();
    first = false;
  }
  grid_barrier(block);
}

// All threads of a block: the state that the kernel begins with.
__device__ __forceinline__ void begin(Block& block, const u64* addresses, int batch, bool projected) {
  constexpr int ALL = THREADS + 32;
  u64* words = reinterpret_cast<u64*>(&block.model);
  for (int i = threadIdx.x; i < int(sizeof(Model) / 8); i += ALL) words[i] = addresses[i];
  for (int i = threadIdx.x; i < MAX_COLUMNS; i += ALL) block.position[i] = -1;
  for (int i = threadIdx.x; i < CHUNKS; i += ALL) arrival_init(&block.arrival[i], BULK_COPIES ? 1 : 32);
  arrivals_ready();
  if (threadIdx.x == 0) block.target = block.pushed = block.consumed = 0, list_body(block, projected);
  sync_block();
  for (int i = threadIdx.x; i < LAYERS * 2 * HEAD_DIM; i += ALL) block.head_norm[i] = block.model.head_norm[i];
  for (int i = threadIdx.x; i < G * HEAD_DIM; i += ALL) block.rotary[i] = block.model.rotary[i];
  if (int(threadIdx.x) < batch && block.model.requests) block.request[threadIdx.x] = block.model.requests[threadIdx.x];
  sync_block();
}

// All threads of a block: stores a row that enters the decoder, of values that `value_of` gives.
template <class Values>
__device__ __forceinline__ void enter_decoder(Block& block, int column, const Values& value_of) {
  const Model& model = block.model;
  constexpr int EACH = (H + THREADS - 1) / THREADS;
  float value[EACH], gain[EACH];
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int i = j * THREADS + threadIdx.x;
    value[j] = i < H ? value_of(i) : 0, gain[j] = i < H ? __ldg(model.input_norm + i) : 0;
  }
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int i = j * THREADS + threadIdx.x;
    const float squares = sum_of_eight(value[j]);
    if (i >= H) continue;
    model.inputs[column * H + i] = value[j];
    store_split(model.input_words + column * H, i, value[j] * gain[j]);
    if (i % 8 == 0) model.input_squares[column * (H / 8) + i / 8] = squares;
  }
}

// All threads of a block: stores a row that enters a pass, of HT values.
template <class Values>
__device__ __forceinline__ void enter(Block& block, int column, const Values& value_of) {
  if (HAS_PROJECTION) {
    for (int i = threadIdx.x; i < HT; i += THREADS) store_split(block.model.embeds + column * HT, i, value_of(i));
  } else {
    enter_decoder(block, column, value_of);
  }
}
__device__ __noinline__ void embed(Block& block, int column, const WEIGHT* from) {
  enter(block, column, [&](int i) { return to_float(from[i]); });
}
__device__ __forceinline__ const WEIGHT* embedding(const Model& model, int depth, int code) {
  return depth == 0 ? model.talker_table + u64(code) * HT : model.tables + (u64(depth - 1) * V + code) * HT;
}

// The code stands in `block.pick`.
__device__ __noinline__ void select_entry(Block& block, const float* logits, int row, int depth, int use, float* law) {
  const Request request = block.request[row];
  select_sample_part::select_row(block.scratch.select, logits, request, depth, G - 1, use, law, &block.pick, 0, block.model.errors, row);
  __syncthreads();
}

__device__ __noinline__ void accept_entry(Block& block, int row, int drafts, int coupled) {
  const Model& m = block.model;
  accept_part::accept_row(block.scratch.accept, row, m.drafts, m.draft_laws, m.picks, m.laws, m.requests, m.last, m.codes,
                          m.states, m.rounds, m.history, drafts, coupled);
  __syncthreads();
}

// One thread: commits the pick of a pass without drafts; round 0 is the prefill, which is not recorded.
__device__ __forceinline__ void commit(const Model& model, int row, int depth, int state, int pick, int round) {
  model.codes[row * G + depth] = pick;
  model.last[row] = depth;
  model.states[row] = state;
  model.rounds[row] = round;
  if (round == 0) return;
  int* entry = model.history + (row * G + round - 1) * 3;
  entry[0] = depth, entry[1] = 0, entry[2] = 0;
}

// All threads of a block: picks the code of one entry. In `round` 0 and above it is committed, with the state it comes
// from; it enters the next pass at column `place`, if that is not negative.
__device__ __noinline__ void pick_entry(Block& block, int entry, int row, const float* logits, int use, float* laws, int* codes,
                                        int round, int state, int place) {
  const int depth = block.head_of[entry] + 1;
  if (depth <= 0) return;  // there is no such entry
  select_entry(block, logits + entry * V, row, depth, use, laws ? laws + entry * V : nullptr);
  const int code = block.pick;
  if (threadIdx.x == 0) {
    codes[entry] = code;
    if (round >= 0) commit(block.model, row, depth, state, code, round);
  }
  if (place >= 0 && depth < G - 1) embed(block, place, embedding(block.model, depth, code));
}

// All threads of a block: the columns of the next round, from the state in device memory. Sets `finished`.
__device__ __forceinline__ void plan_round(Block& block, int batch, int drafts) {
  const Model& model = block.model;
  if (threadIdx.x == 0) block.finished = 1;
  __syncthreads();
  const int width = drafts + 1;
  for (int i = threadIdx.x; i < MAX_COLUMNS; i += THREADS) {
    const int row = i / width, offset = i % width, last = row < batch ? load_fresh(model.last + row) : G;
    block.row_of[i] = row;
    block.position[i] = last < G - 1 && offset <= min(drafts, G - 2 - last) ? last + 1 + offset : -1;
    if (last < G - 1) block.finished = 0;
    if (offset == 0 && row < batch) block.first_head[row] = last, block.state[row] = load_fresh(model.states + row);
  }
  __syncthreads();
}

// All lanes: the heads that the columns of a pass need.
__device__ __forceinline__ u32 set_of_targets(const Block& block, int columns) {
  u32 heads = 0;
  for (int i = lane_id(); i < columns; i += 32)
    if (block.position[i] > 0) heads |= 1u << (block.position[i] - 1);
  return warp_or(heads);
}

// All threads of a block: the heads of the pass, each column its own; returns the set.
__device__ __forceinline__ u32 list_target_heads(Block& block, int columns) {
  for (int i = threadIdx.x; i < columns; i += THREADS) block.head_of[i] = block.position[i] - 1, block.source_of[i] = i;
  __syncthreads();
  return set_of_targets(block, columns);
}

// All threads of a block: the heads of the drafts, several for the state of a row's last committed code.
__device__ __forceinline__ u32 list_draft_heads(Block& block, int batch, int drafts, int width_before) {
  u32 heads = 0;
  for (int i = lane_id(); i < batch * drafts; i += 32) {
    const int row = i / drafts, wanted = block.first_head[row] + i % drafts, head = wanted < G - 2 ? wanted : -1;
    if (head >= 0) heads |= 1u << head;
    if (warp_id() == 0) block.head_of[i] = head, block.source_of[i] = row * width_before + block.state[row];
  }
  __syncthreads();
  return warp_or(heads);
}

KERNEL __launch_bounds__(THREADS + 32, 1) fused_frame(const u64* addresses, int batch, int drafts, int coupled) {
  DYNAMIC_SHARED(memory);
  Block& block = *reinterpret_cast<Block*>(memory);
  const Model& model = block.model;
  const int cta = blockIdx.x;
  begin(block, addresses, batch, true);
  if (warp_id() == WARPS_A_BLOCK) return Producer{block, memory + BLOCK_BYTES}.run();
  Stream stream{block, memory + BLOCK_BYTES};
  stream.push(BODY);
  stream.push(1u);

  // Prefill: the Talker's state and its code.
  if (int(threadIdx.x) < 2 * batch) block.position[threadIdx.x] = threadIdx.x & 1, block.row_of[threadIdx.x] = threadIdx.x >> 1;
  __syncthreads();
  if (cta < batch) {
    if (threadIdx.x == 0) model.errors[cta] = 0x7F7F7F7F;
    enter(block, cta * 2, [&](int i) { return model.talker_hidden[cta * HT + i]; });
    embed(block, cta * 2 + 1, embedding(model, 0, model.codes[cta * G]));
  }

  const int full = drafts + 1;
#pragma unroll 1
  for (int round = 0;; round++) {
    const int width = round == 0 ? 2 : full, columns = batch * width;
    const bool plain = drafts == 0 || round == 0;
    if (round > 0) {
      plan_round(block, batch, drafts);
      if (block.finished) break;
    }
    // First the drafts, then the pass that verifies them; each ends in heads and picks.
#pragma unroll 1
    for (int verifying = plain; verifying < 2; verifying++) {
      u32 heads;
      if (verifying) {
        // Without drafts the next pass is known: its weights may come.
        if (drafts == 0 && round + 1 < G - 1) stream.push(BODY), stream.push(2u << round);
        run_pass<HAS_PROJECTION>(block, stream, columns);
        heads = list_target_heads(block, columns);
      } else {
        heads = list_draft_heads(block, batch, drafts, round == 1 ? 2 : full);
        if (heads) stream.push(heads);
        stream.push(BODY);
        stream.push(set_of_targets(block, columns));
        if (!heads) continue;
      }
      const int entries = verifying ? columns : batch * drafts;
      float* const logits = verifying ? model.logits : model.draft_logits;
      run_heads(block, stream, heads, entries, logits);

      const int a_row = verifying ? width : drafts, use = verifying || coupled ? USE_TARGET : USE_DRAFT;
      float* const laws = plain || coupled ? nullptr : verifying ? model.laws : model.draft_laws;
      int* const codes = verifying ? model.picks : model.drafts;
#pragma unroll 1
      for (int entry = cta; entry < entries; entry += CTAS) {  // a block an entry
        const int row = entry / a_row, place = verifying ? row * full : row * full + 1 + entry % drafts;
        pick_entry(block, entry, row, logits, use, laws, codes, plain ? round : -1, width - 1, plain || !verifying ? place : -1);
      }
      // The next pass begins with a barrier, and a round that is planned needs one before.
      if (verifying) grid_barrier(block);
    }
    if (plain) continue;
    if (cta < batch && block.first_head[cta] < G - 1) {
      accept_entry(block, cta, drafts, coupled);
      const int last = model.last[cta];
      if (last < G - 1) embed(block, cta * full, embedding(model, last, model.codes[cta * G + last]));
    }
    grid_barrier(block);
  }

  stream.push(STOP);
  // The Talker's next input, added in the order of the depths.
  for (int i = cta * THREADS + threadIdx.x; i < batch * HT; i += CTAS * THREADS) {
    const int row = i / HT, channel = i % HT;
    float sum = 0;
#pragma unroll
    for (int depth = 0; depth < G; depth++) {
      const float value = to_float(embedding(model, depth, load_fresh(model.codes + row * G + depth))[channel]);
      sum = depth ? sum + value : value;
    }
    model.embedded[i] = sum;
  }
}

// One pass over rows that are given: inputs [B, W, H] f32 at positions [B, W] (negative: none), W <= 8; out: states
// [B, W, H] f32, after the final norm.
KERNEL __launch_bounds__(THREADS + 32, 1) fused_pass(const u64* addresses, const float* inputs, const int* positions, float* states, int batch, int width) {
  DYNAMIC_SHARED(memory);
  Block& block = *reinterpret_cast<Block*>(memory);
  const int columns = batch * width;
  begin(block, addresses, batch, false);
  if (warp_id() == WARPS_A_BLOCK) return Producer{block, memory + BLOCK_BYTES}.run();
  Stream stream{block, memory + BLOCK_BYTES};
  for (int i = threadIdx.x; i < columns; i += THREADS) block.position[i] = positions[i], block.row_of[i] = i / width;
  __syncthreads();
  stream.push(BODY);
  stream.push(STOP);
  for (int column = blockIdx.x; column < columns; column += CTAS)
    enter_decoder(block, column, [&](int i) { return inputs[column * H + i]; });
  run_pass<false>(block, stream, columns);
  grid_barrier(block);
#pragma unroll 1
  for (int column = blockIdx.x * WARPS_A_BLOCK + warp_id(); column < columns; column += CTAS * WARPS_A_BLOCK) {
    if (block.position[column] < 0) continue;
    const float* row = block.model.hidden + column * H;
    MeanSquare square;
    square.load(block.model.hidden_squares + column * (H / 8));
    const float inverse = square.inverse_root();
    for (int i = lane_id(); i < H; i += 32) states[column * H + i] = load_fresh(row + i) * inverse * block.model.final_norm[i];
  }
}
