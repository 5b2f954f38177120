// fused_frame and fused_pass: the whole CodePredictor in one persistent cooperative kernel.
//
// fused_frame decodes one frame for every row of a batch: prefill of two positions, then rounds of a verify pass, the heads
// of its targets and of all drafts that may follow, picks and decisions, until every row is complete, and the sum of the
// frame's embeddings. fused_pass runs one pass over given rows and returns their hidden states. select_sample.cu and accept.cu
// stand in front of this file.
//
// Layout   model: the addresses of Model below, in device memory. Weights are packed for the grid (see Product), one
//          kind of matrix behind the other. Working memory of a pass: columns are [B * W], column row * W + i for
//          position i of a row; W <= 8, B <= MAX_BATCH. Positions of a row follow one another; a negative one: there is
//          none, nor any behind it.
//          keys [LAYERS, MAX_BATCH, MAX_COPIES, KV_HEADS, G, KEY_FLOATS] and values [.., HEAD_DIM] f32, as attention
//          wants them.
// Launch   cooperative, grid (CTAS), block THREADS + HELPERS, SHARED_BYTES of dynamic shared memory. counter[2] must be 0.
// Limits   H, HT, INTER and HEADS * HEAD_DIM multiples of 32; HEAD_DIM 64, 96 or 128; G <= 33; weights F16 or BF16.
//
// Every product is a [16 x 16] x [16 x 8] tensor-core product whose 16 rows are 8 positions twice: the high and the low
// part of each activation, so that next to nothing of its FP32 value is lost to the 16-bit operand, and a position's sums
// are the same whatever stands in the other rows. A block owns a few rows of each weight matrix, a warp a slice of the
// inner dimension; the slices are added in one fixed order. Who stores an activation splits it, once, into the words that
// a lane of a product loads: of each two values the high parts, then the low ones. RMSNorm is folded in: the gain
// multiplies what is stored, each block adds the squares of its rows, and the inverse root multiplies the product.
//
// Blocks do not meet at barriers between the products: what one tells another brings its own tag, and who needs it loads
// it until the tag is the one that is due (see Exchange).
//
// Of a block's warps the first THREADS / 32 multiply, attend and pick, the next ADDERS add the slices up and store them,
// while the others are at the next matrix already, and the last one streams. The first that adds also finds out, while others
// pick, where each row goes on, and says what is to be streamed.
//
// Weights do not depend on activations: the last warp streams them through a ring in shared memory, while others wait, by
// the copy engine where there is one. It keeps IN_FLIGHT chunks on their way (IN_FLIGHT_WIDE in a launch whose passes have
// more than 4 columns) and no more: what queues in the memory system stands before the activations, which everyone waits for.

// A bit of a low half is free for a tag (see Exchange). FP16 operands: activations up to 4e6 fit, the low part stays above
// the denormal numbers, and its lowest bit is beyond what an FP32 value holds. BF16 operands: the scale keeps the upper
// bit of every exponent at 0; it is cleared before use.
constexpr float SCALE_OF_BF16 = 8.673617379884035e-19f;  // 2^-60
__device__ __forceinline__ constexpr float operand_scale(F16) { return 1.0f / 64; }
__device__ __forceinline__ constexpr float low_scale(F16) { return 2048; }
__device__ __forceinline__ constexpr u32 free_bit(F16) { return 1; }
__device__ __forceinline__ constexpr bool harmless(F16) { return true; }
__device__ __forceinline__ constexpr float operand_scale(BF16) { return SCALE_OF_BF16; }
__device__ __forceinline__ constexpr float low_scale(BF16) { return 1; }
__device__ __forceinline__ constexpr u32 free_bit(BF16) { return 0x4000; }
__device__ __forceinline__ constexpr bool harmless(BF16) { return false; }

// Four values as the words of a row: of each two the high halves, then the low ones.
__device__ __forceinline__ void split_two(float first, float second, u32& high, u32& low) {
  first *= operand_scale(WEIGHT()), second *= operand_scale(WEIGHT());
  high = two_halves(WEIGHT(), first, second);
  const float scale = low_scale(WEIGHT());
  low = two_halves(WEIGHT(), (first - low_half(WEIGHT(), high)) * scale, (second - high_half(WEIGHT(), high)) * scale);
}
__device__ __forceinline__ uint4 split_four(float4 four) {
  uint4 words;
  split_two(four.x, four.y, words.x, words.y), split_two(four.z, four.w, words.z, words.w);
  return words;
}

// --------------------------------------------------------------------------------------------------------------- sizes

constexpr int WARPS_A_BLOCK = THREADS / 32;
constexpr int ADDERS = HELPERS / 32 - 1;
constexpr int TILE = 8;  // positions of one tensor-core product
constexpr int MAX_WIDTH = 8;
constexpr int Q_WIDTH = HEADS * HEAD_DIM, KV_WIDTH = KV_HEADS * HEAD_DIM;
constexpr int RATIO = HEADS / KV_HEADS;  // queries of a key
constexpr int MAX_COLUMNS = MAX_BATCH * MAX_WIDTH;
constexpr int KEY_FLOATS = HEAD_DIM + 4;  // a key, its norm, and what keeps the next one aligned

static_assert(H % 32 == 0 && HT % 32 == 0 && INTER % 32 == 0 && Q_WIDTH % 32 == 0, "widths are multiples of 32");
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 128 && HEADS % KV_HEADS == 0 && G <= 33, "heads and depths");
static_assert(WARPS_A_BLOCK % 4 == 0 && THREADS <= 512 && ADDERS > 0, "THREADS and HELPERS");
static_assert(CTAS >= MAX_BATCH && MAX_BATCH <= TILE, "a block a row");

// Addresses, in the order of MODEL_FIELDS in trt_cpspec/fused.py.
struct Model {
  const char* weights;                                      // packed: projection, qkv, o, gate_up, down, heads
  const float *bias, *input_norm, *post_norm, *final_norm;  // [H], [LAYERS, H], [LAYERS, H], [H]
  const float *head_norm, *rotary;                          // [LAYERS, 2, HEAD_DIM]: queries, keys; [G, HEAD_DIM / 2, 2]
  const WEIGHT *talker_table, *tables;                      // [*, HT], [G - 1, V, HT]
  uint4* exchange;                                          // see Exchange
  float *hidden, *keys, *values;                            // hidden [B * W, H]: a thread's own rows
  float *laws, *draft_laws;                                 // [B, W, V]; [2, B, W - 1, V]: of rounds in turn, see Candidates
  u32* counter;
  const Request* requests;
  const float* talker_hidden;
  int *codes, *history, *rounds, *errors;
  float* embedded;
};

// ------------------------------------------------------------------------------------------------------------ products

// A matrix [OUT, IN] in slabs, of each of which a block owns GROUPS groups of 8 rows, and each warp UNITS units of 32 inner
// values. Packed [slab, block, warp, unit, group, row of 8, quarter of 4, 8 values]: 512 bytes a unit and group, 16 a lane.
// Of a PAIRED matrix every second group belongs to the second of two matrices side by side.
template <int IN_, int OUT_, bool PAIRED_ = false>
struct Product {
  static constexpr int IN = IN_, OUT = OUT_;
  static constexpr bool PAIRED = PAIRED_;
  static constexpr int STEP = PAIRED ? 16 : 8;  // rows that stay together
  static constexpr int ALL_GROUPS = (OUT / STEP + CTAS - 1) / CTAS * (STEP / 8), MOST_GROUPS = (MAX_GROUPS * 8 > STEP ? MAX_GROUPS * 8 / STEP : 1) * (STEP / 8);
  static constexpr int GROUPS = ALL_GROUPS < MOST_GROUPS ? ALL_GROUPS : MOST_GROUPS;
  static constexpr int ROWS = GROUPS * 8;
  static constexpr int SLABS = (OUT + CTAS * ROWS - 1) / (CTAS * ROWS);
  static constexpr int BUSY = SLABS > 1 ? CTAS : (OUT + ROWS - 1) / ROWS;  // blocks that have rows, the first ones
  static constexpr int UNITS = (IN / 32 + WARPS_A_BLOCK - 1) / WARPS_A_BLOCK;
  static constexpr int UNIT_BYTES = GROUPS * 512;
  static constexpr int WARP_BYTES = UNITS * UNIT_BYTES;
  static constexpr int PART_BYTES = WARPS_A_BLOCK * WARP_BYTES;  // of a block
  static constexpr int PART_CHUNKS = (PART_BYTES + CHUNK_BYTES - 1) / CHUNK_BYTES;
  static constexpr u64 BYTES = u64(SLABS) * CTAS * PART_BYTES;
  static_assert(PART_CHUNKS <= CHUNKS, "the ring is too small for this matrix");
  __device__ __forceinline__ static int first_row(int slab) { return (slab * CTAS + int(blockIdx.x)) * ROWS; }
  __device__ __forceinline__ static bool mine(int slab) { return first_row(slab) < OUT; }
};
using Projection = Product<HT, H>;
using Qkv = Product<H, Q_WIDTH + 2 * KV_WIDTH>;
using Out = Product<Q_WIDTH, H>;
using GateUp = Product<H, 2 * INTER, true>;
using Down = Product<INTER, H>;
using Head = Product<H, V>;

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int MOST_ROWS = larger(larger(larger(HAS_PROJECTION ? Projection::ROWS : 0, Qkv::ROWS), larger(Out::ROWS, GateUp::ROWS)), larger(Down::ROWS, Head::ROWS));
constexpr int PADDING = 4;
// Blocks that have rows of some matrix, the first ones; and who makes the laws of drafts: the others, if there are any.
constexpr int BUSY = larger(larger(larger(HAS_PROJECTION ? Projection::BUSY : 0, Qkv::BUSY), larger(Out::BUSY, GateUp::BUSY)), larger(Down::BUSY, Head::BUSY));
constexpr int LAW_DESKS = BUSY < CTAS ? CTAS - BUSY : CTAS;
constexpr int BODY_PARTS = (HAS_PROJECTION ? Projection::SLABS : 0) + LAYERS * (Qkv::SLABS + Out::SLABS + GateUp::SLABS + Down::SLABS);
constexpr int RING_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int REGISTERS_FOR_OPERANDS = 96;  // of a thread: for the weights and activations of a product
static_assert(CHUNK_BYTES % 512 == 0 && IN_FLIGHT <= CHUNKS && IN_FLIGHT_WIDE <= CHUNKS, "chunks");

// What is to be added up: of each warp, position and row; and what it is normed by.
struct Sums {
  alignas(16) float part[WARPS_A_BLOCK][TILE][MOST_ROWS + PADDING];
  float inverse[TILE];  // root of the mean square of each position
};

// A block's part of a matrix: where it lies, in units of 16 bytes, and how much it is.
struct Part {
  u32 offset, bytes;
};

// ------------------------------------------------------------------------------------------------------------ exchange

// The logits of a thread that picks stand apart, those of a warp together. Where the pair of an even code stands:
constexpr int CODES_A_THREAD = sizeof(select_sample_part::Row::logit) / sizeof(float), CODE_THREADS = (V + CODES_A_THREAD - 1) / CODES_A_THREAD;
constexpr int LOGIT_PIECES = CODES_A_THREAD / 2 * CODE_THREADS;
__device__ __forceinline__ int logit_place(int code) { return code % CODES_A_THREAD / 2 * CODE_THREADS + code / CODES_A_THREAD; }

// What the blocks of a grid tell each other lies here, in pieces of 16 or 8 bytes that are seen whole or not at all, each
// with a tag. A reader loads a piece until its tag is the one of the use that is due. Words are four split values, with a
// tag of two bits. A pair is two times a float and a tag of 32 bits, the number of the use.
//
// A piece is written once in a use, and its uses follow one another: it is not written again before all who read it have
// stored something that the writer has waited for. So a reader finds the use before, or its own. Of the hidden state, which
// has two uses a layer, it may have missed the use before, of whose product it has no rows, and find the one before that.
// In a column that no pass had before it finds what clearing left: of those of the prefill use 0, of others what the prefill
// would have left there. Who stores nothing that is waited for may be late: a block that keeps keys and values and has no
// query of its own, one whose logits are of drafts that are not taken. So with drafts all that enters the next pass waits until
// all who multiply or add, in all blocks, are done with the heads, which is the end of a round; who picks or weighs drafts
// later than that reads what has turns (see Candidates). Without drafts all have queries, and all that is picked enters.
// A block that has no rows of a matrix waits for a norm's squares of its use, or of a later one, and so stays with those
// that have. Uses are counted from 1, and the kernel begins by clearing.
constexpr int QKV_WIDTH = Q_WIDTH + 2 * KV_WIDTH;
struct Exchange {
  uint4 *embeds, *input_words, *hidden_words, *mixed, *activated;           // of HT | H | H | Q_WIDTH | INTER values, see words_of
  uint4 *inputs, *input_squares, *hidden_squares;                           // [columns, H | H / 8 | H / 8], / 2
  uint4 *attended_by_layer, *all_logits;                                    // [LAYERS, columns, QKV / 2], [1 | 2, columns, W, V / 2]
  uint2 *decisions, *draft_codes, *draft_shares;                            // [2, MAX_BATCH, MAX_WIDTH]: see Candidates
  u32 pieces;
  int columns;
  __device__ __forceinline__ uint4* attended(int layer, int column) const { return attended_by_layer + (layer * columns + column) * (QKV_WIDTH / 2); }
  __device__ __forceinline__ uint4* logits(int entry) const { return all_logits + entry * LOGIT_PIECES; }
};

// Where the words of a column stand, those from value `index` on, a multiple of 4. The columns of a tile stand together, so
// that what a warp loads at once for a product is 512 bytes: [tile, unit of 32, half of a lane's 8 values, column, quarter].
template <int WIDTH>
__device__ __forceinline__ uint4* words_of(uint4* all, u32 column, u32 index) {
  return all + column / TILE * (TILE * WIDTH / 4) + ((index / 32 * 2 + index / 4 % 2) * TILE + column % TILE) * 4 + index / 8 % 4;
}

// `picks`: of a column, its target's and those of the drafts behind it.
__device__ __forceinline__ void lay_out(Exchange& e, uint4* at, int columns, int picks) {
  uint4* const start = at;
  const auto take = [&](int width) { uint4* const here = at; at += columns * width; return here; };
  const auto words = [&](int width) { uint4* const here = at; at += (columns + TILE - 1) / TILE * TILE * width / 4; return here; };
  e.embeds = words(HAS_PROJECTION ? HT : 0), e.input_words = words(H), e.hidden_words = words(H), e.mixed = words(Q_WIDTH), e.activated = words(INTER);
  e.inputs = take(H / 2), e.input_squares = take(H / 16), e.hidden_squares = take(H / 16);
  e.attended_by_layer = take(LAYERS * (QKV_WIDTH / 2)), e.all_logits = take((picks > 1 ? 2 : 1) * picks * LOGIT_PIECES);
  const auto rows = [&]() { uint2* const here = reinterpret_cast<uint2*>(at); at += MAX_BATCH * MAX_WIDTH; return here; };
  e.decisions = rows(), e.draft_codes = rows(), e.draft_shares = rows();
  e.pieces = u32(at - start), e.columns = columns;
}

// The tag of words: the number of their use modulo 4, in the free bits of the fourth word.
struct WordTag {
  static constexpr u32 FREE = free_bit(WEIGHT()), BITS = FREE | FREE << 16;
  u32 bits;
  __device__ __forceinline__ explicit WordTag(u32 use) : bits((use & 1) * FREE | (use >> 1 & 1) * (FREE << 16)) {}
  __device__ __forceinline__ u32 difference(const uint4& words) const { return words.w ^ bits; }
  __device__ __forceinline__ u32 stale(const uint4& words) const { return difference(words) & BITS; }
  __device__ __forceinline__ uint4 blank() const { return make_uint4(0, 0, 0, bits); }
  __device__ __forceinline__ static void remove(uint4& words) {
    if (!harmless(WEIGHT())) words.w &= ~BITS;
  }
  __device__ __forceinline__ void store(uint4* to, uint4 words) const {
    words.w = (words.w & ~BITS) | bits;
    store_whole(to, words);
  }
};

__device__ __forceinline__ u32 stale(const uint4& pair, u32 use) { return (pair.y ^ use) | (pair.w ^ use); }
__device__ __forceinline__ void store_pair(uint4* to, float first, float second, u32 use) {
  store_whole(to, make_uint4(__float_as_uint(first), use, __float_as_uint(second), use));
}
__device__ __forceinline__ void store_single(uint4* pairs, int index, float value, u32 use) {
  store_whole(reinterpret_cast<uint2*>(pairs) + index, make_uint2(__float_as_uint(value), use));
}
__device__ __forceinline__ float2 wait_for_pair(const uint4* from, u32 use) {
  u32 polls = 0;
  for (;;) {
    const uint4 pair = load_whole(from);
    if (!stale(pair, use)) return make_float2(__uint_as_float(pair.x), __uint_as_float(pair.z));
    poll_again(polls);
  }
}

// All lanes: wait for a pair of this use, or a later one.
__device__ __forceinline__ void wait_since(const uint4* from, u32 use) {
  u32 polls = 0;
  while (__any_sync(ALL_LANES, int(load_whole(from).y - use) < 0)) poll_again(polls);
}

// The numbers of the uses, the same in all blocks: passes, each with its set of heads, and layers of all passes, counted from 1.
struct Uses {
  u32 pass = 0, layer = 0;
  // Of the hidden state: after attention, and after the layer.
  __device__ __forceinline__ u32 inner() const { return 2 * layer - 1; }
  __device__ __forceinline__ u32 outer() const { return 2 * layer; }
};

// The place of a block where picks and attention are dealt out: from the last block on.
__device__ __forceinline__ int this_desk() { return CTAS - 1 - int(blockIdx.x); }

// Entries of Candidates that a block has at most, and what their codes are marked with: a draft that is not replaced.
constexpr int MOST_ENTRIES = (MAX_COLUMNS * MAX_WIDTH + CTAS - 1) / CTAS;
constexpr u32 KEPT = 1 << 16;

// What a block wants of an entry: its pick, the law alone, or what becomes of the draft behind it.
enum Aim { PICK, WEIGH, DECIDE };
// Where the logits of an entry are, what they are of, and what is wanted; `law` gets the law, of a decision if it is of many.
struct Selection {
  const uint4* logits;
  u32 pass;  // whose heads they are from, which is their use
  int row, depth, use;
  Aim aim;
  float* law;
  uint2* piece;  // where all blocks are told what came of it, but of a pick
  u32 tag;
};

// A law of few codes.
struct ShortLaw {
  u32 code[64];
  float share[64];
  __device__ __forceinline__ float of(u32 wanted) const {
    float found = 0;
#pragma unroll 1
    for (int i = 0; i < 64; i++)
      if (code[i] == wanted && share[i] >= 0) found = share[i];
    return found;
  }
};

// For measuring: when the rows of a pass had come to a block, when it had stored its logits of all targets, and when logits
// that it picks from had come; of pass 0 when the launch began, and ended. stamps [CTAS, G, 3]: ns by the clock of the GPU,
// or what stood there if that is less. Only a build with STAMPS has them; their address stands behind those of Model.
enum Stamp { ENTERED, SCORED, PICKED };
template <bool THERE_ARE>
struct Stamps {
  __device__ __forceinline__ void find_stamps(const u64*) {}
  __device__ __forceinline__ u64* stamp_of(u32, Stamp) const { return nullptr; }
};
template <>
struct Stamps<true> {
  u64* stamps;
  __device__ __forceinline__ void find_stamps(const u64* address) { stamps = reinterpret_cast<u64*>(*address); }
  __device__ __forceinline__ u64* stamp_of(u32 pass, Stamp what) const { return stamps + (blockIdx.x * G + pass) * 3 + what; }
};
// Whole warps.
__device__ __forceinline__ void stamp(u64* to) {
  if (!to) return;
  if (threadIdx.x % THREADS == 0) store_first_time(to);  // who multiplies, and who adds
  __syncwarp();
}

struct Block : Stamps<STAMPS> {
  Model model;
  Exchange exchange;
  Part body[BODY_PARTS], head[Head::SLABS];
  int body_parts;
  // What will be used, in its order, and how much was said and taken.
  u32 queue[8], pushed, taken;
  alignas(16) u32 used[WARPS_A_BLOCK];  // of each warp: the chunks of the stream that it is done with
  int position[MAX_COLUMNS];  // of each column; negative: there is none
  u32 wanted[MAX_BATCH];      // of each tile: the columns that there are
  // Of each row: depth of the last committed code, and the column it was picked from; those of the plan that is being made;
  // and, for who has picked drafts, that column as soon as it is known, with the tag of the round.
  int last[MAX_BATCH], state[MAX_BATCH], next_last[MAX_BATCH], next_state[MAX_BATCH];
  u32 decided[MAX_BATCH];
  Request request[MAX_BATCH];
  Selection selection;  // what select_entry is to do
  u32 pick, told;     // a code, and what was told of a draft
  u32 draft, word;    // the code that is being decided on, by this random word,
  float draft_share;  // and its probability where it was picked
  ShortLaw short_law;  // what replaces it is among these
  u32 picked[MOST_ENTRIES];  // of this block's entries in turn: the code, and KEPT
  int first_to_go;
  u32 finished[2];  // whether all rows are, by the plans of rounds in turn
  // Of the launch: rows of the batch, columns of a row in a round, whether drafts are coupled, and who keeps keys and
  // values: how many blocks the same ones, which are those before the last `desks`.
  int batch, full, coupled, copies, desks;
  u32 target, rounds_ended, rounds_waited;  // of the two barriers; and of how many rounds the end has been waited for
  u64 arrival[CHUNKS];
  float head_norm[LAYERS * 2 * HEAD_DIM], rotary[G * HEAD_DIM];
  Sums sums[2];  // in turn
  float scores[2][WARPS_A_BLOCK / 4][64];  // of a team's queries, in turn
  union Scratch {
    __device__ Scratch() {}
    select_sample_part::Shared select;
    accept_part::Shared accept;
  } scratch;
  union Prepared {  // for a pick; for a decision
    __device__ Prepared() {}
    select_sample_part::Noise noise;
    float draft_law[V];
  } prepared;
};

// ------------------------------------------------------------------------------------------------------------- streams

constexpr int BLOCK_BYTES = (int(sizeof(Block)) + 127) / 128 * 128;
static_assert(BLOCK_BYTES + RING_BYTES <= SHARED_BYTES, "SHARED_BYTES");

// Entries of the queue; anything else is a set of heads.
constexpr u32 BODY = 0, STOP = 0xFFFFFFFFu;

// The warp that streams: copies parts chunk by chunk, in the order of the queue. With the copy engine one lane does it. A
// chunk must cost it fewer instructions than memory needs for one.
struct Producer {
  Block& block;
  const SharedPlace ring, arrivals, done;  // places in shared memory: a pointer would be made of its window each time
  SharedPlace to, arrival;                 // of the next chunk
  u32 issued = 0, room = CHUNKS;           // chunks, and how many more the ring can take
  u32 oldest = 0, oldest_parity = 0;       // of those on their way, when there are as many as may be
  u32 unlimited;                           // how many more may come before there are

  __device__ __forceinline__ Producer(Block& block, char* memory)
      : block(block), ring(shared_place(memory)), arrivals(shared_place(block.arrival)), done(shared_place(block.used)), to(ring), arrival(arrivals),
        unlimited(block.batch * block.full > TILE / 2 ? IN_FLIGHT_WIDE : IN_FLIGHT) {}
  __device__ __forceinline__ void wait_for_room() {
    for (;;) {
      u32 used = issued;
#pragma unroll
      for (int i = 0; i < WARPS_A_BLOCK; i += 4) {
        const uint4 four = load_changing_four(done + i * 4);
        used = min(used, min(min(four.x, four.y), min(four.z, four.w)));
      }
      room = CHUNKS - (issued - used);
      if (!BULK_COPIES) {
        __syncwarp();
        room = same(room);
      }
      if (room) return;
      rest();
    }
  }
  __device__ __forceinline__ void copy_chunk(const char* from, u32 bytes) {
    if (room == 0) wait_for_room();
    if (unlimited) {
      unlimited--;
    } else {
      while (!arrived_at(arrivals + oldest * 8, oldest_parity)) {
      }
      if (++oldest == CHUNKS) oldest = 0, oldest_parity ^= 1;
    }
    if (BULK_COPIES) copy_bulk(to, from, bytes, arrival);
    else copy_lanes(to, from, bytes, arrival);
    issued++, room--, to += CHUNK_BYTES, arrival += 8;
    if (to == ring + RING_BYTES) to = ring, arrival = arrivals;
  }
  __device__ __forceinline__ void copy(const Part& part, u64 skipped) {
    const char* from = block.model.weights + skipped + u64(part.offset) * 16;
    u32 left = part.bytes;
#pragma unroll 1
    for (; left >= CHUNK_BYTES; left -= CHUNK_BYTES, from += CHUNK_BYTES) copy_chunk(from, CHUNK_BYTES);
    if (left) copy_chunk(from, left);
  }

  __device__ __forceinline__ void run() {
    if (BULK_COPIES && lane_id() != 0) return;
    for (u32 taken = 0;;) {
      while (load_changing(&block.pushed) == taken) rest();
      const u32 what = load_changing(&block.queue[taken % 8]);
      if (!BULK_COPIES) __syncwarp();
      *static_cast<volatile u32*>(&block.taken) = ++taken;
      if (what == STOP) return;
      if (what == BODY) {
        for (int i = 0; i < block.body_parts; i++) copy(block.body[i], 0);
      } else {
        for (u32 heads = what; heads; heads &= heads - 1)
          for (const Part& part : block.head) copy(part, u64(__ffs(heads) - 1) * Head::BYTES);
      }
    }
  }
};

// A lane's place in the weights of its warp, which may go on at the beginning of the ring, but not within a grain.
template <class P>
struct Share {
  static constexpr u32 GRAIN = P::WARP_BYTES % CHUNK_BYTES ? P::WARP_BYTES & -P::WARP_BYTES : CHUNK_BYTES, GRAINS = P::WARP_BYTES / GRAIN;
  const char* grain[GRAINS];
  __device__ __forceinline__ uint4 load(u32 offset) const { return *reinterpret_cast<const uint4*>(grain[offset / GRAIN] + offset % GRAIN); }
};

// A value that the compiler does not keep from before, for want of registers to keep it in.
__device__ __forceinline__ int computed_here(int value) {
  opaque(value);
  return value;
}

// What the other warps know of the stream: the chunk at which the next part begins.
struct Stream {
  Block& block;
  const char* ring;
  const u32 warp;  // in a register that all lanes are known to share
  u32 chunk = 0, slot = 0, parity = 0;
  int turn = 0;  // of the sums
  Uses uses = {};

  // Whether this warp says what will be used: one of those that add, who wait while others pick.
  __device__ __forceinline__ bool pushes() const { return warp == WARPS_A_BLOCK; }
  // Says it, behind all that was said before.
  __device__ __forceinline__ void push(u32 what) {
    if (!pushes()) return;
    const u32 at = load_changing(&block.pushed);
    while (__any_sync(ALL_LANES, at - load_changing(&block.taken) == 8)) {
    }
    if (lane_id() == 0) {
      block.queue[at % 8] = what;
      __threadfence_block();
      *static_cast<volatile u32*>(&block.pushed) = at + 1;
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool adds() const { return warp >= WARPS_A_BLOCK; }

  // Waits for the warp's share of the part of a matrix; the lane's place in it.
  template <class P>
  __device__ __forceinline__ Share<P> wait(int lane) const {
    const u32 begin = u32(computed_here(int(warp))) * P::WARP_BYTES, within = begin % CHUNK_BYTES;
    const u32 place = slot + begin / CHUNK_BYTES, start = (place < CHUNKS ? place : place - CHUNKS) * CHUNK_BYTES + within;
    // A lane a chunk.
    const u32 mine = place + lane, turned = mine < CHUNKS ? parity : parity ^ 1;
    u64* const arrival = &block.arrival[mine < CHUNKS ? mine : mine - CHUNKS];
    const bool needed = lane * CHUNK_BYTES < within + P::WARP_BYTES;
    while (__any_sync(ALL_LANES, needed && !arrived_by(arrival, turned))) {
    }
    __syncwarp();
    Share<P> share;
#pragma unroll
    for (u32 i = 0; i < Share<P>::GRAINS; i++) {
      const u32 at = start + i * Share<P>::GRAIN;
      share.grain[i] = ring + (at < RING_BYTES ? at : at - RING_BYTES) + lane * 16;
    }
    return share;
  }

  // On to the next part; and, of one who multiplies: the share of this one has been read.
  template <class P>
  __device__ __forceinline__ void advance() {
    chunk += P::PART_CHUNKS, slot += P::PART_CHUNKS;
    if (slot >= CHUNKS) slot -= CHUNKS, parity ^= 1;
  }
  template <class P>
  __device__ __forceinline__ void done() const {
    __syncwarp();
    if (lane_id() == 0) *static_cast<volatile u32*>(&block.used[warp]) = chunk + P::PART_CHUNKS;
  }
};

// Lists where the block's parts of a matrix lie; of no bytes where it has no rows of a slab.
template <class P>
__device__ __forceinline__ Part* list_parts(Part* to, u64 start) {
  for (int slab = 0; slab < P::SLABS; slab++)
    *to++ = {u32((start + u64(slab * CTAS + int(blockIdx.x)) * P::PART_BYTES) / 16), P::mine(slab) ? u32(P::PART_BYTES) : 0};
  return to;
}

constexpr u64 QKV_AT = HAS_PROJECTION ? Projection::BYTES : 0, OUT_AT = QKV_AT + LAYERS * Qkv::BYTES, GATE_UP_AT = OUT_AT + LAYERS * Out::BYTES,
              DOWN_AT = GATE_UP_AT + LAYERS * GateUp::BYTES, HEADS_AT = DOWN_AT + LAYERS * Down::BYTES;

__device__ __forceinline__ void list_body(Block& block, bool projected) {
  Part* to = block.body;
  if (HAS_PROJECTION && projected) to = list_parts<Projection>(to, 0);
  for (int layer = 0; layer < LAYERS; layer++) {
    to = list_parts<Qkv>(to, QKV_AT + layer * Qkv::BYTES);
    to = list_parts<Out>(to, OUT_AT + layer * Out::BYTES);
    to = list_parts<GateUp>(to, GATE_UP_AT + layer * GateUp::BYTES);
    to = list_parts<Down>(to, DOWN_AT + layer * Down::BYTES);
  }
  block.body_parts = int(to - block.body);
  list_parts<Head>(block.head, HEADS_AT);
}

// Barriers of a block: of those who multiply (__syncthreads), of them and those who add, two for each of the sums, whether
// it is full, and whether it is empty, of those who add (7), and of each team that attends.
constexpr int FIRST_OF_TEAMS = 8;
constexpr int TEAM = THREADS + ADDERS * 32;
__device__ __forceinline__ void sync_team() { named_sync(2, TEAM); }
__device__ __forceinline__ int full(int turn) { return 3 + turn; }
__device__ __forceinline__ int empty(int turn) { return 5 + turn; }

// A barrier of all threads of the grid that multiply: plain loads behind it see what was stored before it, by any
// block.
__device__ __forceinline__ void grid_barrier(Block& block) {
  __syncthreads();
  if (same(warp_id()) == 0) {
    if (lane_id() == 0) block.target += CTAS, arrive(block.model.counter);
    __syncwarp();
    u32 polls = 0;
    while (__any_sync(ALL_LANES, arrived(block.model.counter) < block.target)) polled(polls);
  }
  __syncthreads();
}

// ------------------------------------------------------------------------------------------------- one matrix product

// Eight neighbouring lanes: the inverse root of the mean square of a row of H values, from its sums of 8 squares.
struct MeanSquare {
  static constexpr int PIECES = H / 16, EACH = (PIECES + 7) / 8;
  uint4 pair[EACH];

  // Returns 0 where all squares of a use were there.
  __device__ __forceinline__ u32 load(const uint4* squares, u32 use) {
    u32 missing = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int piece = i * 8 + lane_id() % 8;
      pair[i] = PIECES % 8 == 0 || piece < PIECES ? load_whole(squares + piece) : make_uint4(0, use, 0, use);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) missing |= stale(pair[i], use);
    return missing;
  }
  __device__ __forceinline__ float inverse_root() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += __uint_as_float(pair[i].x) + __uint_as_float(pair[i].z);
    for (int step = 4; step; step >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return rsqrtf(sum * (1.0f / H) + RMS_EPS);
  }
};

__device__ __forceinline__ float sum_of_squares(float4 v) { return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w); }
__device__ __forceinline__ float4 scaled(float4 v, float by) { return make_float4(v.x * by, v.y * by, v.z * by, v.w * by); }
__device__ __forceinline__ float4 product(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
__device__ __forceinline__ float4 sum(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 four_at(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ float4 constant_four(const float* from) { return __ldg(reinterpret_cast<const float4*>(from)); }
__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1 + expf(-gate)) * up; }

// Two lanes, `apart`, with four neighbouring values each, from `out` on: stores their words, and of a row the sum of eight
// squares.
__device__ __forceinline__ void store_state(uint4* words, WordTag tag, uint4* squares, u32 use, int out, float4 value, float4 gain, bool valid, int apart) {
  float eight = sum_of_squares(value);
  eight += __shfl_xor_sync(ALL_LANES, eight, apart);
  if (!valid) return;
  tag.store(words, split_four(product(value, gain)));
  if (out % 8 == 0) store_single(squares, out / 8, eight, use);
}

// What a product is made of, for those who multiply and those who add:
// Task:  u32 wanted(int tile): a bit for each of the tile's columns that there is; uint4* words(): where the split values of
//        all columns will be, IN of each; WordTag tag() of them; of a NORMED task const uint4* squares(int column) and u32
//        use() of those; bool starts(): whether it is the first of a pass; Place place(int column, int out): where four
//        results go, and what of them this block knows before; void store(const Place&, float4 sums, bool valid, int apart),
//        all lanes: the next four are `apart` lanes away. The result of a paired matrix is silu(first) times second.

// A warp that multiplies: its slice of the inner dimension, for one tile. Before the columns are waited for, as many weights
// as there are registers for are in them.
template <class P, class Task>
__device__ __forceinline__ void multiply_tile(const Stream& stream, Sums& sums, int tile, u32 wanted, bool last, const Task& task) {
  const int lane = computed_here(lane_id()), quarter = lane & 3, spot = lane >> 2, warp = stream.warp;
  constexpr int SLICE = P::UNITS * 32;
  constexpr int SPARE = REGISTERS_FOR_OPERANDS / 4 - P::UNITS * 2;
  constexpr int EARLY = SPARE < 0 ? 0 : SPARE / P::GROUPS < P::UNITS ? SPARE / P::GROUPS : P::UNITS;
  constexpr bool EVEN = P::IN % (WARPS_A_BLOCK * 32) == 0;
  const int units = EVEN ? P::UNITS : min(max((P::IN - warp * SLICE) / 32, 0), P::UNITS);  // of this warp
  const WordTag tag = task.tag();
  named_sync(empty(stream.turn), TEAM);  // long since, but here nobody waits for it
  // Lanes of a column that there is not take another one's values: their sums go nowhere.
  const int source = wanted >> spot & 1 ? spot : __ffs(wanted) - 1;
  const uint4* const row = words_of<P::IN>(task.words(), tile * TILE + source, warp * SLICE + quarter * 8);
  const Share<P> weights = stream.wait<P>(lane);
  uint4 held[EARLY ? EARLY * P::GROUPS : 1];
#pragma unroll
  for (int i = 0; i < EARLY * P::GROUPS; i++) held[i] = weights.load(i * 512);
  if (EARLY == P::UNITS && last) stream.done<P>();

  uint4 words[P::UNITS * 2];
  u32 polls = 0;
  // One word is waited for first: all of them, again and again, would stand in the way of those who make them. Of many
  // columns, whose words are many, one warp looks for some of a row, and the others wait for it.
  if (__popc(wanted) > TILE / 2) {
    if (warp == 0) {
      const uint4* const first = words_of<P::IN>(task.words(), tile * TILE + __ffs(wanted) - 1, lane_id() % 8 * (P::IN / 8));
      while (__any_sync(ALL_LANES, tag.stale(load_whole(first)))) poll_again(polls);
    }
    __syncthreads();
  } else if (EVEN || units > 0) {
    while (__any_sync(ALL_LANES, tag.stale(load_whole(row)))) poll_again(polls);
  }
  for (;;) {
    u32 missing = 0;
#pragma unroll
    for (int i = 0; i < P::UNITS * 2; i++) words[i] = EVEN || i / 2 < units ? load_whole(row + i * (TILE * 4)) : tag.blank();
#pragma unroll
    for (int i = 0; i < P::UNITS * 2; i++) missing |= tag.difference(words[i]);
    if (!__any_sync(ALL_LANES, missing & WordTag::BITS)) break;
    poll_again(polls);
  }
#pragma unroll
  for (int i = 0; i < P::UNITS * 2; i++) WordTag::remove(words[i]);
  if (task.starts()) stamp(stream.block.stamp_of(stream.uses.pass, ENTERED));

  // Sums that do not wait for each other.
  constexpr int CHAINS = P::GROUPS >= 4 ? 1 : P::GROUPS >= 2 ? 2 : 4;
  float acc[P::GROUPS][CHAINS][4] = {};
#pragma unroll
  for (int u = 0; u < P::UNITS; u++) {
    const uint4 a = words[u * 2], b = words[u * 2 + 1];
#pragma unroll
    for (int g = 0; g < P::GROUPS; g++) {
      const uint4 w = u < EARLY ? held[u * P::GROUPS + g] : weights.load((u * P::GROUPS + g) * 512);
      tensor_product(WEIGHT(), acc[g][u * 2 % CHAINS], a.x, a.y, a.z, a.w, w.x, w.y);
      tensor_product(WEIGHT(), acc[g][(u * 2 + 1) % CHAINS], b.x, b.y, b.z, b.w, w.z, w.w);
    }
  }
  if (EARLY < P::UNITS && last) stream.done<P>();
#pragma unroll
  for (int g = 0; g < P::GROUPS; g++) {
    float2 both = make_float2(0, 0);
#pragma unroll
    for (int c = 0; c < CHAINS; c++)
      both.x += acc[g][c][0] + acc[g][c][2] * (1 / low_scale(WEIGHT())), both.y += acc[g][c][1] + acc[g][c][3] * (1 / low_scale(WEIGHT()));
    *reinterpret_cast<float2*>(&sums.part[warp][spot][g * 8 + quarter * 2]) = both;
  }
  named_arrive(full(stream.turn), TEAM);
}

// Those who add, for one tile: a thread has four rows of a column, or one where columns are few, and it is always the same
// thread that stores four of a state. First, eight lanes a column, the inverse root of its mean square.
template <class P, class Task>
__device__ __forceinline__ void add_tile(const Stream& stream, Sums& sums, int slab, int tile, u32 wanted, const Task& task) {
  constexpr int OUTS = P::PAIRED ? P::ROWS / 2 : P::ROWS, LAST = P::OUT * OUTS / P::ROWS, FOURS = OUTS / 4, ALL = ADDERS * 32;
  const int thread = computed_here(threadIdx.x) - THREADS;
  typename Task::Place early = {};
  if constexpr (Task::NORMED) {
    const int place = thread / 8;
    const bool mine = place < TILE && (wanted >> place & 1);
    if (wanted >> (stream.warp - WARPS_A_BLOCK) * 4 & 15) {  // one of the warp's columns
      MeanSquare square;
      const uint4* const squares = task.squares(tile * TILE + (mine ? place : __ffs(wanted) - 1));
      u32 polls = 0;
      while (__any_sync(ALL_LANES, stale(load_whole(squares), task.use()))) poll_again(polls);  // as for words
      while (__any_sync(ALL_LANES, square.load(squares, task.use()))) poll_again(polls);
      const float inverse = square.inverse_root();
      if (mine) sums.inverse[place] = inverse;
    }
    named_sync(7, ALL);
  }
  const auto by = [&](int place) { return Task::NORMED ? sums.inverse[place] * (1 / operand_scale(WEIGHT())) : 1 / operand_scale(WEIGHT()); };
  constexpr int STEP = sizeof(sums.part[0]) / sizeof(float), FEW = ALL / OUTS < TILE ? ALL / OUTS : TILE;
  if (FEW > 0 && wanted < 1u << FEW) {
    // Of few columns a thread adds one row, and of four threads one stores.
    const int place = thread / OUTS, local = thread % OUTS, out = P::first_row(slab) / (P::ROWS / OUTS) + local;
    const bool valid = wanted >> place & 1 && out < LAST, stores = valid && thread % 4 == 0;
    if (stores) early = task.place(tile * TILE + place, out);
    named_sync(full(stream.turn), TEAM);
    const float* const from = &sums.part[0][place < FEW ? place : 0][P::PAIRED ? local / 8 * 16 + local % 8 : local];
    float total = 0, up = 0;
#pragma unroll
    for (int w = 0; w < WARPS_A_BLOCK; w++) {
      total += from[w * STEP];
      if (P::PAIRED) up += from[w * STEP + 8];
    }
    total *= by(place < FEW ? place : 0);
    if (P::PAIRED) total = gated(total, up * by(place < FEW ? place : 0));
    const float second = __shfl_xor_sync(ALL_LANES, total, 1), third = __shfl_xor_sync(ALL_LANES, total, 2), fourth = __shfl_xor_sync(ALL_LANES, second, 2);
    task.store(early, make_float4(total, second, third, fourth), stores, 4);
  } else {
    bool waited = false;
#pragma unroll 1
    for (int first = 0; first < TILE * FOURS; first += ALL) {
      const int index = first + thread, place = index / FOURS, local = index % FOURS * 4, out = P::first_row(slab) / (P::ROWS / OUTS) + local;
      const bool valid = place < TILE && (wanted >> place & 1) && out < LAST;
      if (valid) early = task.place(tile * TILE + place, out);
      if (!waited) named_sync(full(stream.turn), TEAM);
      waited = true;
      float4 total = make_float4(0, 0, 0, 0);
      if (valid) {
        const float* from = &sums.part[0][place][P::PAIRED ? local / 8 * 16 + local % 8 : local];
        float4 up = total;
#pragma unroll
        for (int w = 0; w < WARPS_A_BLOCK; w++) {
          total = sum(total, four_at(from + w * STEP));
          if (P::PAIRED) up = sum(up, four_at(from + w * STEP + 8));
        }
        total = scaled(total, by(place));
        if (P::PAIRED) {
          up = scaled(up, by(place));
          total = make_float4(gated(total.x, up.x), gated(total.y, up.y), gated(total.z, up.z), gated(total.w, up.w));
        }
      }
      if (__any_sync(ALL_LANES, valid)) task.store(early, total, valid, 1);
    }
  }
  named_arrive(empty(stream.turn), TEAM);
}

// All who multiply or add: each block's rows of a matrix times `tiles` tiles of columns.
template <class P, class Task>
__device__ __forceinline__ void multiply(Block& block, Stream& stream, int tiles, const Task& task) {
#pragma unroll 1
  for (int slab = 0; slab < P::SLABS; slab++) {
    const bool mine = P::mine(slab);
    if (!mine && slab > 0) break;
    bool left = true;  // something to be done with this part
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
      const u32 wanted = task.wanted(tile);
      if (!wanted) continue;
      left = tile < tiles - 1;
      if (!mine) {
        if constexpr (Task::NORMED) wait_since(task.squares(tile * TILE + __ffs(wanted) - 1), task.use());
        continue;
      }
      if (stream.adds()) add_tile<P>(stream, block.sums[stream.turn], slab, tile, wanted, task);
      else multiply_tile<P>(stream, block.sums[stream.turn], tile, wanted, !left, task);
      stream.turn ^= 1;
    }
    if (!mine) break;
    if (left && !stream.adds()) stream.done<P>();
    stream.advance<P>();
  }
}

template <bool NORMED_>
struct Columns {
  static constexpr bool NORMED = NORMED_;
  const Block& block;
  const Uses& uses;
  __device__ __forceinline__ u32 wanted(int tile) const { return same(block.wanted[tile]); }
  __device__ __forceinline__ bool starts() const { return false; }
};

// What makes the residual stream: the sum is added to what is there, and stored for the norm that follows.
struct StateTask : Columns<false> {
  const float* gain;
  u32 made;  // the use that it makes
  struct Place {
    float* state;
    uint4 *words, *squares;
    int out;
    float4 before, gain;
  };
  __device__ __forceinline__ void store(const Place& place, float4 added, bool valid, int apart) const {
    const float4 value = sum(place.before, added);
    if (valid) *reinterpret_cast<float4*>(place.state) = value;
    store_state(place.words, WordTag(made), place.squares, made, place.out, value, place.gain, valid, apart);
  }
};

struct ProjectTask : StateTask {
  __device__ __forceinline__ bool starts() const { return true; }
  __device__ __forceinline__ WordTag tag() const { return WordTag(uses.pass); }
  __device__ __forceinline__ uint4* words() const { return block.exchange.embeds; }
  __device__ __forceinline__ Place place(int column, int out) const {
    const Exchange& e = block.exchange;
    return {block.model.hidden + column * H + out, words_of<H>(e.input_words, column, out), e.input_squares + column * (H / 16), out, constant_four(block.model.bias + out), constant_four(gain + out)};
  }
};

struct HiddenTask : StateTask {
  // The residual of a row that entered the decoder comes from another block; a later one is this thread's own.
  __device__ __forceinline__ Place place_behind(int column, int out, bool entered) const {
    const Exchange& e = block.exchange;
    float* const state = block.model.hidden + column * H + out;
    float4 before;
    if (entered) {
      const uint4* from = e.inputs + column * (H / 2) + out / 2;
      const float2 first = wait_for_pair(from, uses.pass), second = wait_for_pair(from + 1, uses.pass);
      before = make_float4(first.x, first.y, second.x, second.y);
    } else {
      before = four_at(state);
    }
    return {state, words_of<H>(e.hidden_words, column, out), e.hidden_squares + column * (H / 16), out, before, constant_four(gain + out)};
  }
};

struct OutTask : HiddenTask {
  bool entered;
  __device__ __forceinline__ WordTag tag() const { return WordTag(uses.layer); }
  __device__ __forceinline__ uint4* words() const { return block.exchange.mixed; }
  __device__ __forceinline__ Place place(int column, int out) const { return place_behind(column, out, entered); }
};

struct DownTask : HiddenTask {
  __device__ __forceinline__ WordTag tag() const { return WordTag(uses.layer); }
  __device__ __forceinline__ uint4* words() const { return block.exchange.activated; }
  __device__ __forceinline__ Place place(int column, int out) const { return place_behind(column, out, false); }
};

// Four floats for others, as pairs.
struct FloatPlace {
  uint4* pairs;
  __device__ __forceinline__ void store(float4 four, u32 use, int apart) const {
    store_pair(pairs, four.x, four.y, use), store_pair(pairs + apart, four.z, four.w, use);
  }
};

struct QkvTask : Columns<true> {
  int layer;
  bool entered;
  using Place = FloatPlace;
  __device__ __forceinline__ bool starts() const { return entered && !HAS_PROJECTION; }
  __device__ __forceinline__ u32 use() const { return entered ? uses.pass : uses.inner() - 1; }
  __device__ __forceinline__ WordTag tag() const { return WordTag(use()); }
  __device__ __forceinline__ uint4* words() const { return entered ? block.exchange.input_words : block.exchange.hidden_words; }
  __device__ __forceinline__ const uint4* squares(int column) const {
    return (entered ? block.exchange.input_squares : block.exchange.hidden_squares) + column * (H / 16);
  }
  __device__ __forceinline__ Place place(int column, int out) const { return {block.exchange.attended(layer, column) + out / 2}; }
  __device__ __forceinline__ void store(const Place& place, float4 sums, bool valid, int) const {
    if (valid) place.store(sums, uses.layer, 1);
  }
};

struct GateUpTask : Columns<true> {
  struct Place {
    uint4* words;
  };
  __device__ __forceinline__ u32 use() const { return uses.inner(); }
  __device__ __forceinline__ WordTag tag() const { return WordTag(use()); }
  __device__ __forceinline__ uint4* words() const { return block.exchange.hidden_words; }
  __device__ __forceinline__ const uint4* squares(int column) const { return block.exchange.hidden_squares + column * (H / 16); }
  __device__ __forceinline__ Place place(int column, int out) const { return {words_of<INTER>(block.exchange.activated, column, out)}; }
  __device__ __forceinline__ void store(const Place& place, float4 products, bool valid, int) const {
    if (valid) WordTag(uses.layer).store(place.words, split_four(products));
  }
};

// The depth of a code that is picked from a column's state: of its target for 0, of the draft so far behind it otherwise; 0
// where there is none. A code of the last depth is never a draft.
__device__ __forceinline__ int depth_of(int position, int behind) {
  const int depth = position + behind;
  return position > 0 && (behind == 0 || depth < G - 1) ? depth : 0;
}

// One head, for the columns that want it: as that of their target, or of a draft.
struct HeadTask : Columns<true> {
  int head, columns, picks, first;  // the place of the first logits
  using Place = FloatPlace;
  __device__ __forceinline__ u32 use() const { return uses.outer(); }
  __device__ __forceinline__ WordTag tag() const { return WordTag(use()); }
  __device__ __forceinline__ uint4* words() const { return block.exchange.hidden_words; }
  __device__ __forceinline__ const uint4* squares(int column) const { return block.exchange.hidden_squares + column * (H / 16); }
  __device__ __forceinline__ u32 wanted(int tile) const {
    const int column = tile * TILE + (lane_id() & (TILE - 1)), position = column < columns ? block.position[column] : -1, behind = head + 1 - position;
    return __ballot_sync(ALL_LANES, lane_id() < TILE && behind >= 0 && behind < picks && depth_of(position, behind));
  }
  __device__ __forceinline__ Place place(int column, int out) const { return {block.exchange.logits(first + column * picks + head + 1 - block.position[column]) + logit_place(out)}; }
  __device__ __forceinline__ void store(const Place& place, float4 sums, bool valid, int) const {
    if (valid) place.store(sums, uses.pass, CODE_THREADS);
  }
};

// ------------------------------------------------------------------------------------------------------------ attention

constexpr int PER_LANE = HEAD_DIM / 32;

// One lane's part of a vector of a head: the values from lane * PER_LANE on.
struct LanePart {
  float value[PER_LANE];
  __device__ __forceinline__ void load(const float* from) {
    from += lane_id() * PER_LANE;
    if (PER_LANE == 4) {
      const float4 four = four_at(from);
      value[0] = four.x, value[1] = four.y, value[PER_LANE - 2] = four.z, value[PER_LANE - 1] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) value[i] = from[i];
    }
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) to[lane_id() * PER_LANE + i] = value[i];
  }
  __device__ __forceinline__ float times(const LanePart& other) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sum = fmaf(value[i], other.value[i], sum);
    return sum;
  }
};

// What a vector is multiplied by for its gain and its place: each value, and the one that is rotated into it. Its norm is
// left to be multiplied by.
struct Turn {
  float own[PER_LANE], other[PER_LANE];
  __device__ __forceinline__ Turn(const float* gain, const float* rotary) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const float* const angle = rotary + ((lane_id() & 15) * PER_LANE + i) * 2;
      own[i] = gain[lane_id() * PER_LANE + i] * angle[0];
      other[i] = gain[(lane_id() ^ 16) * PER_LANE + i] * (lane_id() < 16 ? -angle[1] : angle[1]);
    }
  }
  // One warp.
  __device__ __forceinline__ LanePart of(const LanePart& part) const {
    LanePart turned;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) turned.value[i] = fmaf(part.value[i], own[i], __shfl_xor_sync(ALL_LANES, part.value[i], 16) * other[i]);
    return turned;
  }
};

// The same, of a vector that other blocks make.
struct DuePart {
  static constexpr int PAIRS = (PER_LANE + 1) / 2;
  uint4 pair[PAIRS];
  __device__ __forceinline__ void load(const uint4* vector) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) pair[i] = load_whole(vector + lane_id() * PER_LANE / 2 + i);
  }
  __device__ __forceinline__ u32 missing(u32 use) const {
    u32 any = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) any |= stale(pair[i], use);
    return any;
  }
  __device__ __forceinline__ LanePart part() const {
    const bool shifted = PER_LANE % 2 && lane_id() % 2;  // the first value is the second of a pair
    LanePart part;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      const float here = __uint_as_float(i % 2 ? pair[i / 2].z : pair[i / 2].x);
      const float next = __uint_as_float(i % 2 ? pair[PAIRS - 1].x : pair[i / 2].z);  // of those of 3
      part.value[i] = shifted ? next : here;
    }
    return part;
  }
};

// One warp: sums over its lanes. Of several at a time lane l gets that of value l % N; they are added in the same order.
constexpr int SUMS = 3 + (G + 3) / 4 <= 8 ? 8 : 16;
template <int N>
__device__ __forceinline__ float sums_of_lanes(float (&value)[N]) {
  if constexpr (N == 1) {
    float sum = value[0];
#pragma unroll
    for (int step = SUMS; step < 32; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
  } else {
    constexpr int HALF = N / 2;
    const bool upper = lane_id() & HALF;
    float half[HALF];
#pragma unroll
    for (int i = 0; i < HALF; i++) half[i] = (upper ? value[i + HALF] : value[i]) + __shfl_xor_sync(ALL_LANES, upper ? value[i] : value[i + HALF], HALF);
    return sums_of_lanes(half);
  }
}
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int step = SUMS / 2; step; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
#pragma unroll
  for (int step = SUMS; step < 32; step *= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}
__device__ __forceinline__ float head_norm(float squares) { return rsqrtf(squares * (1.0f / HEAD_DIM) + RMS_EPS); }

// A block's task in attention: a row and a head of keys, whose keys and values always the same blocks keep: `copies` of
// them, each to itself, which share the queries.
struct AttentionTask {
  static constexpr int TEAMS = WARPS_A_BLOCK / 4, EACH = (G + 3) / 4;  // four warps a query
  int kv, copy, copies, column, begin, count;  // the first position, and how many there are
  float *keys, *values;
  __device__ __forceinline__ AttentionTask(const Block& block, int task, int layer, int width, int copies) : copies(copies) {
    const int tasks = KV_HEADS * copies, row = task / tasks;
    kv = task % tasks / copies, copy = task % copies, column = row * width, begin = same(block.position[column]), count = 0;
    while (count < width && same(block.position[column + count]) >= 0) count++;
    const u64 cache = u64(((layer * MAX_BATCH + row) * MAX_COPIES + copy) * KV_HEADS + kv) * G;
    keys = block.model.keys + cache * KEY_FLOATS, values = block.model.values + cache * HEAD_DIM;
  }
  // The queries of this block, and of each its place among the positions.
  __device__ __forceinline__ int queries() const { return count > copy ? (count - copy + copies - 1) / copies * RATIO : 0; }
  __device__ __forceinline__ int place(int query) const { return copy + query / RATIO * copies; }
  __device__ __forceinline__ int head(int query) const { return kv * RATIO + query % RATIO; }
};

// Of a warp's scores lane FIRST_KEY + i has that of its key i, at position member + 4 * i.
constexpr int FIRST_KEY = 3;

// One warp: softmax over the scores up to a position, before they are divided by their sum.
struct Shares {
  float low, high, total;
  __device__ __forceinline__ Shares(const float* scores, int position) {
    const int lane = lane_id();
    const float first = lane <= position ? scores[lane] : MINUS_INFINITY;
    const float second = G > 32 && lane + 32 <= position ? scores[lane + 32] : MINUS_INFINITY;
    const float largest = key_to_float(warp_max(order_key(G > 32 ? fmaxf(first, second) : first)));
    low = expf(first - largest), high = G > 32 ? expf(second - largest) : 0;  // of those behind the position 0
    total = warp_sum(low + high);
  }
  __device__ __forceinline__ float of(int p) const { return __shfl_sync(ALL_LANES, p < 32 ? low : high, p & 31); }
};

// Four warps, a thread a channel: stores what a query mixed. Four lanes, a value each, make a piece.
__device__ __forceinline__ void store_mixed(uint4* all, int column, int head, WordTag tag, const Shares& shares, const float (&mixed)[2]) {
  const int thread = threadIdx.x % 128;
  const float a = __fdividef(mixed[0] + mixed[1], shares.total), b = __shfl_xor_sync(ALL_LANES, a, 1);
  const float c = __shfl_xor_sync(ALL_LANES, a, 2), d = __shfl_xor_sync(ALL_LANES, b, 2);
  if (thread < HEAD_DIM && thread % 4 == 0) tag.store(words_of<Q_WIDTH>(all, column, head * HEAD_DIM + thread), split_four(make_float4(a, b, c, d)));
}

// A team of four warps, for up to MOST positions of a row: without shared memory but for the scores, and with few
// instructions behind the wait. A warp has every fourth key, a thread a channel of the values.
template <int MOST>
__device__ __forceinline__ void attend_row(Block& block, const AttentionTask& task, u32 warp, const float* gains, int layer, u32 use) {
  using T = AttentionTask;
  constexpr int NEW = (MOST + 3) / 4;  // new keys of a warp at most
  const int lane = computed_here(lane_id()), team = warp / 4, member = warp % 4, thread = member * 32 + lane;
  const int begin = task.begin, count = task.count, queries = task.queries();
  // What earlier passes left, while this pass's vectors are on their way.
  const float* const keys = task.keys + computed_here(member) * KEY_FLOATS;
  LanePart key[T::EACH];
  float value[G];
#pragma unroll
  for (int i = 0; i < T::EACH; i++) {
    if (member + 4 * i < begin) key[i].load(keys + 4 * i * KEY_FLOATS);
    else
#pragma unroll
      for (float& v : key[i].value) v = 0;
  }
#pragma unroll
  for (int p = 0; p < G; p++) value[p] = p < begin && thread < HEAD_DIM ? task.values[p * HEAD_DIM + thread] : 0;
  // The first of the positions whose key is new and this warp's; and this lane's score.
  const int ahead = (member - begin) & 3;
  const int position = member + 4 * (lane - FIRST_KEY);
  const bool has_key = lane >= FIRST_KEY && lane < FIRST_KEY + T::EACH && position < begin + count;
  const float kept_norm = has_key && position < begin ? task.keys[position * KEY_FLOATS + HEAD_DIM] : 0;

  const uint4* const vectors = block.exchange.attended(layer, task.column);
  const auto query_vector = [&](int query) { return vectors + task.place(query) * (QKV_WIDTH / 2) + task.head(query) * HEAD_DIM / 2; };
  const uint4* const key_vectors = vectors + (Q_WIDTH + task.kv * HEAD_DIM) / 2;
  const uint2* const values = reinterpret_cast<const uint2*>(vectors) + Q_WIDTH + KV_WIDTH + task.kv * HEAD_DIM + min(thread, HEAD_DIM - 1);
  const auto place_of = [&](int j) { return min(ahead + 4 * j, count - 1); };  // those behind the last: that again
  DuePart due, due_key[NEW];
  uint2 due_value[MOST];
  for (u32 polls = 0;; poll_again(polls)) {
    due.load(team < queries ? query_vector(team) : key_vectors);
#pragma unroll
    for (int j = 0; j < NEW; j++) due_key[j].load(key_vectors + place_of(j) * (QKV_WIDTH / 2));
#pragma unroll
    for (int j = 0; j < MOST; j++) due_value[j] = load_whole(values + min(j, count - 1) * QKV_WIDTH);
    u32 missing = due.missing(use);
#pragma unroll
    for (int j = 0; j < NEW; j++) missing |= due_key[j].missing(use);
#pragma unroll
    for (int j = 0; j < MOST; j++) missing |= due_value[j].y ^ use;
    if (!__any_sync(ALL_LANES, missing)) break;
  }
  const bool keeps = team == 0;
#pragma unroll
  for (int j = 0; j < MOST; j++)
    if (keeps && j < count && thread < HEAD_DIM) task.values[(begin + j) * HEAD_DIM + thread] = __uint_as_float(due_value[j].x);
  float squares[NEW];
#pragma unroll
  for (int j = 0; j < NEW; j++) {
    const LanePart plain = due_key[j].part(), turned = Turn(gains + HEAD_DIM, block.rotary + (begin + place_of(j)) * HEAD_DIM).of(plain);
    squares[j] = plain.times(plain);
#pragma unroll
    for (int i = 0; i < T::EACH; i++)
      if (member + 4 * i == begin + ahead + 4 * j) key[i] = turned;
    if (!keeps || ahead + 4 * j >= count) continue;
    float* const to = task.keys + (begin + ahead + 4 * j) * KEY_FLOATS;
    turned.store(to);
    if (queries > 0) continue;
    const float norm = head_norm(sum_of_lanes(squares[j]));
    if (lane == 0) to[HEAD_DIM] = norm;
  }
#pragma unroll 1
  for (int query = team, turn = 0; query < queries; turn ^= 1) {
    const int place = task.place(query), last = begin + place;
    const LanePart plain = due.part(), mine = Turn(gains, block.rotary + last * HEAD_DIM).of(plain);
    float sums[SUMS] = {plain.times(plain), squares[0], squares[NEW - 1]};
#pragma unroll
    for (int i = 0; i < T::EACH; i++) sums[FIRST_KEY + i] = mine.times(key[i]);
    const float sum = sums_of_lanes(sums), norm = head_norm(sum);
    if (keeps && query == 0 && lane >= 1 && lane <= NEW && ahead + 4 * (lane - 1) < count) task.keys[(begin + ahead + 4 * (lane - 1)) * KEY_FLOATS + HEAD_DIM] = norm;
    const float own = __shfl_sync(ALL_LANES, norm, 0), near = __shfl_sync(ALL_LANES, norm, 1), far = NEW > 1 ? __shfl_sync(ALL_LANES, norm, 2) : near;
    float* const scores = block.scores[turn][team];
    if (has_key) scores[position] = sum * own * (position < begin ? kept_norm : position < begin + 4 ? near : far);
    named_sync(FIRST_OF_TEAMS + team, 128);
    const Shares shares(scores, last);
    float mixed[2] = {};
#pragma unroll
    for (int p = 0; p < G - 1; p++) mixed[p % 2] = fmaf(shares.of(p), value[p], mixed[p % 2]);  // 0 from `begin` on
    if (begin % 2) {
      const float even = mixed[0];
      mixed[0] = mixed[1], mixed[1] = even;
    }
#pragma unroll
    for (int j = 0; j < MOST; j++) {
      const int p = begin + j;
      const float share = __shfl_sync(ALL_LANES, G > 32 && p >= 32 ? shares.high : shares.low, p & 31);
      mixed[j % 2] = fmaf(share, p <= last ? __uint_as_float(due_value[j].x) : 0, mixed[j % 2]);
    }
    store_mixed(block.exchange.mixed, task.column + place, task.head(query), WordTag(use), shares, mixed);
    query += T::TEAMS;
    if (query >= queries) break;
    for (u32 polls = 0;; poll_again(polls)) {
      due.load(query_vector(query));
      if (!__any_sync(ALL_LANES, due.missing(use))) break;
    }
  }
}

// How many blocks keep the same keys and values; and from how many blocks attention keeps away, the last ones: those that
// pick, or, where there are not enough others, those that pick targets.
__device__ __forceinline__ int copies_of(int batch, int useful) { return max(min(CTAS / (batch * KV_HEADS), min(useful, MAX_COPIES)), 1); }
__device__ __forceinline__ int desks_of(int batch, int drafts) {
  const int targets = batch * (drafts + 1), all = targets * (drafts + 1);
  return all + batch * KV_HEADS * copies_of(batch, drafts + 1) <= CTAS ? all : targets < CTAS ? targets : 0;
}

// A block's first task in attention, and how many all have.
__device__ __forceinline__ int first_task(const Block& block) {
  const int first = this_desk() - same(block.desks);
  return first < 0 ? first + CTAS : first;
}
__device__ __forceinline__ int tasks_of(const Block& block) { return same(block.batch) * KV_HEADS * same(block.copies); }

// All who multiply.
__device__ __forceinline__ void attend(Block& block, const Stream& stream, int layer, int width) {
  const float* const gains = block.head_norm + layer * 2 * HEAD_DIM;
  const u32 use = stream.uses.layer;
  const int copies = same(block.copies), tasks = tasks_of(block);
#pragma unroll 1
  for (int index = first_task(block); index < tasks; index += CTAS) {
    __syncwarp();
    __syncthreads();  // keys and values of the last pass are there for all, and all have read the scores of the task before
    const AttentionTask task(block, index, layer, width, copies);
    // Without a query the first team keeps keys and values still; others may not wait for what nobody holds back for them.
    if (task.count == 0 || int(stream.warp / 4) >= max(task.queries(), 1)) continue;
    if (width <= 4) attend_row<4>(block, task, stream.warp, gains, layer, use);
    else attend_row<MAX_WIDTH>(block, task, stream.warp, gains, layer, use);
  }
}

// -------------------------------------------------------------------------------------------------------------- a pass

// All threads of the grid; `uses.pass` is the pass already. `meanwhile` is done by who multiplies, in the last layer, while
// others attend.
template <bool PROJECTED, class Meanwhile>
__device__ __forceinline__ void run_pass(Block& block, Stream& stream, int batch, int width, const Meanwhile& meanwhile) {
  const int tiles = (batch * width + TILE - 1) / TILE;
  const Model& model = block.model;
  Uses& uses = stream.uses;
  if constexpr (PROJECTED) multiply<Projection>(block, stream, tiles, ProjectTask{{{block, uses}, model.input_norm, uses.pass}});
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; layer++) {
    uses.layer = (uses.pass - 1) * LAYERS + layer + 1;
    multiply<Qkv>(block, stream, tiles, QkvTask{{block, uses}, layer, layer == 0});
    if (!stream.adds()) {
      attend(block, stream, layer, width);
      if (layer == LAYERS - 1) meanwhile();
    }
    multiply<Out>(block, stream, tiles, OutTask{{{{block, uses}, model.post_norm + layer * H, uses.inner()}}, layer == 0 && !PROJECTED});
    multiply<GateUp>(block, stream, tiles, GateUpTask{{block, uses}});
    const float* next_norm = layer + 1 < LAYERS ? model.input_norm + (layer + 1) * H : model.final_norm;
    multiply<Down>(block, stream, tiles, DownTask{{{{block, uses}, next_norm, uses.outer()}}});
  }
}

// All lanes: the last one of the columns, whose target's head is the last of the targets'.
__device__ __forceinline__ int last_position(const Block& block, int columns) {
  int last = 0;
  for (int i = lane_id(); i < columns; i += 32) last = max(last, block.position[i]);
  return int(warp_max(u32(last)));
}

// All threads of the grid: the heads of a set, for the columns that want them, of each of which `picks` codes are picked.
__device__ __forceinline__ void run_heads(Block& block, Stream& stream, u32 heads, int columns, int picks, int first) {
#pragma unroll 1
  for (; heads; heads &= heads - 1) {
    multiply<Head>(block, stream, (columns + TILE - 1) / TILE, HeadTask{{block, stream.uses}, __ffs(heads) - 1, columns, picks, first});
    if (STAMPS && stream.adds() && __ffs(heads) == last_position(block, columns)) stamp(block.stamp_of(stream.uses.pass, SCORED));
  }
}

// Whole warps: the position of column i.
__device__ __forceinline__ void place_column(Block& block, int i, int position) {
  const u32 there = __ballot_sync(ALL_LANES, i < MAX_COLUMNS && position >= 0);
  if (i < MAX_COLUMNS) block.position[i] = position;
  if (i < MAX_COLUMNS && i % TILE == 0) block.wanted[i / TILE] = there >> (lane_id() & ~(TILE - 1)) & ((1u << TILE) - 1);
}
constexpr int PLACES = (MAX_COLUMNS + 31) / 32 * 32;
template <class Do>
__device__ __forceinline__ void for_places(const Do& what) {
  for (int start = same(warp_id()) * 32; start < PLACES; start += TEAM) what(start + lane_id());
}

// All threads of the grid: the state that the kernel begins with.
__device__ __forceinline__ void begin(Block& block, const u64* addresses, int batch, int full, int useful, bool projected) {
  constexpr int ALL = THREADS + HELPERS;
  u64* words = reinterpret_cast<u64*>(&block.model);
  for (int i = threadIdx.x; i < int(sizeof(Model) / 8); i += ALL) words[i] = addresses[i];
  for (int i = threadIdx.x; i < CHUNKS; i += ALL) arrival_init(&block.arrival[i], BULK_COPIES ? 1 : 32);
  arrivals_ready();
  if (threadIdx.x == 0) {
    block.target = block.rounds_ended = block.rounds_waited = block.pushed = block.taken = 0;
    block.batch = batch, block.full = full;
    block.copies = copies_of(batch, useful);
    list_body(block, projected);
    block.find_stamps(addresses + sizeof(Model) / sizeof(u64));
  }
  if (threadIdx.x < WARPS_A_BLOCK) block.used[threadIdx.x] = 0;
  if (threadIdx.x < MAX_BATCH) block.decided[threadIdx.x] = 0;
  sync_block();
  if (threadIdx.x == 0) lay_out(block.exchange, block.model.exchange, batch * max(full, 2), projected ? full : 0);
  for (int i = threadIdx.x; i < LAYERS * 2 * HEAD_DIM; i += ALL) block.head_norm[i] = block.model.head_norm[i];
  for (int i = threadIdx.x; i < G * HEAD_DIM; i += ALL) block.rotary[i] = block.model.rotary[i];
  if (int(threadIdx.x) < batch && block.model.requests) block.request[threadIdx.x] = block.model.requests[threadIdx.x];
  sync_block();
}

// The pieces of an exchange from one to another, those of a thread of the grid.
template <class Do>
__device__ __forceinline__ void for_pieces(const uint4* from, const uint4* to, const Do& what) {
  const u32 count = u32(to - from);
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += CTAS * THREADS) what(i);
}
// Words of columns, of which the first ones are in the prefill; the others get the tag of its last use.
template <int WIDTH>
__device__ __forceinline__ void clear_words(uint4* words, const uint4* end, u32 in_prefill, u32 last_use) {
  for_pieces(words, end, [&](u32 i) {
    const u32 column = i / (TILE * WIDTH / 4) * TILE + i / 4 % TILE;
    words[i] = WordTag(column < in_prefill ? 0 : last_use).blank();
  });
}

// All but those that stream: pieces have the tags of no use that is waited for, and no sums are full.
__device__ __forceinline__ void clear_exchange(Block& block, const Stream& stream, int in_prefill) {
  if (stream.adds()) {
    named_arrive(empty(0), TEAM), named_arrive(empty(1), TEAM);
  } else {
    const Exchange& e = block.exchange;
    const auto zero = [&](uint4* from, const uint4* to) { for_pieces(from, to, [&](u32 i) { from[i] = make_uint4(0, 0, 0, 0); }); };
    zero(e.embeds, e.hidden_words);
    clear_words<H>(e.hidden_words, e.mixed, in_prefill, 2 * LAYERS);
    clear_words<Q_WIDTH>(e.mixed, e.activated, in_prefill, LAYERS);
    clear_words<INTER>(e.activated, e.inputs, in_prefill, LAYERS);
    zero(e.inputs, e.embeds + e.pieces);
    grid_barrier(block);
  }
  sync_team();
}

// All threads of a block: stores a row that enters the decoder in a pass; `four_of` gives the values i to i + 3.
template <class Values>
__device__ __forceinline__ void enter_decoder(Block& block, u32 pass, int column, const Values& four_of) {
  const Exchange& e = block.exchange;
#pragma unroll 1
  for (int start = same(warp_id()) * 128; start < H; start += THREADS * 4) {  // whole warps
    const int i = start + lane_id() * 4;
    const bool valid = i < H;
    const float4 zero = make_float4(0, 0, 0, 0), gain = valid ? constant_four(block.model.input_norm + i) : zero, value = valid ? four_of(i) : zero;
    store_state(words_of<H>(e.input_words, column, i), WordTag(pass), e.input_squares + column * (H / 16), pass, i, value, gain, valid, 1);
    if (!valid) continue;
    uint4* const pairs = e.inputs + column * (H / 2) + i / 2;
    store_pair(pairs, value.x, value.y, pass), store_pair(pairs + 1, value.z, value.w, pass);
  }
}

// All threads of a block: stores a row that enters a pass, of HT values.
template <class Values>
__device__ __forceinline__ void enter(Block& block, u32 pass, int column, const Values& four_of) {
  if (HAS_PROJECTION) {
    for (int i = threadIdx.x * 4; i < HT; i += THREADS * 4) WordTag(pass).store(words_of<HT>(block.exchange.embeds, column, i), split_four(four_of(i)));
  } else {
    enter_decoder(block, pass, column, four_of);
  }
}
__device__ __forceinline__ float4 four_weights(const WEIGHT* from) {
  const uint2 two = *reinterpret_cast<const uint2*>(from);
  return make_float4(to_float(WEIGHT{u16(two.x)}), to_float(WEIGHT{u16(two.x >> 16)}), to_float(WEIGHT{u16(two.y)}), to_float(WEIGHT{u16(two.y >> 16)}));
}
__device__ __noinline__ void embed(Block& block, u32 pass, int column, const WEIGHT* from) {
  enter(block, pass, column, [&](int i) { return four_weights(from + i); });
}
__device__ __forceinline__ const WEIGHT* embedding(const Model& model, int depth, int code) {
  return depth == 0 ? model.talker_table + u64(code) * HT : model.tables + (u64(depth - 1) * V + code) * HT;
}

// All threads of a block: brings the embedding near that may enter next, in lines of 128 bytes.
__device__ __forceinline__ void fetch_embedding(const Model& model, int depth, int code) {
  if (threadIdx.x * 64 < HT) fetch_line(embedding(model, depth, code) + threadIdx.x * 64);
  __syncwarp();
}

// A row of logits that other blocks make, and the noise of its codes.
struct DueLogits {
  static constexpr bool KNOWS_NOISE = true;
  const uint4* row;
  u32 use;
  const float* noise;
  u64* stamps;  // where it is noted when they were there, or null

  template <int N>
  __device__ __forceinline__ void load(float (&values)[N]) const {
    uint4 pair[N / 2];
    u32 polls = 0;
    for (;;) {
      u32 missing = 0;
#pragma unroll
      for (int i = 0; i < N / 2; i++) {
        const int code = threadIdx.x * N + i * 2;
        pair[i] = code < V ? load_whole(row + logit_place(code)) : make_uint4(__float_as_uint(MINUS_INFINITY), use, __float_as_uint(MINUS_INFINITY), use);
        missing |= stale(pair[i], use);
      }
      if (!missing) break;
      poll_again(polls);
    }
    __syncwarp();
    stamp(stamps);
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = __uint_as_float(i % 2 ? pair[i / 2].z : pair[i / 2].x);
  }
  __device__ __forceinline__ float operator[](u32 code) const {
    const uint4 pair = load_whole(row + logit_place(code & ~1u));
    return __uint_as_float(code % 2 ? pair.z : pair.x);
  }
};

// The codes that are picked from the states of a pass: the target of each column, and behind them of each the drafts that
// would follow if it were the last to stay. So they are there when that is known, and their heads are applied but once.
//
// A target with a draft behind it decides on that draft, alone: whether it is kept, and what replaces it if not. The first
// column whose draft goes, or that has none, is the one from which the row goes on; whoever has to do with that finds it out
// from the decisions of the columns before: the target commits its code, or the draft, and it and the drafts behind that
// column enter the next pass. Only then, while it runs, are the laws made that those drafts were picked from.
//
// What is told of a round lies in pieces that take turns with those of the next one, as its logits do: they are written again
// two rounds later, and by then all blocks have come to the end of the round between.
struct Candidates {
  int batch, width, drafts, round;
  __device__ __forceinline__ int columns() const { return batch * width; }
  __device__ __forceinline__ int all() const { return columns() * (drafts + 1); }
  __device__ __forceinline__ int column(int entry) const { return entry < columns() ? entry : (entry - columns()) / drafts; }
  __device__ __forceinline__ int behind(int entry) const { return entry < columns() ? 0 : 1 + (entry - columns()) % drafts; }
  __device__ __forceinline__ int turn() const { return drafts ? round & 1 : 0; }
  __device__ __forceinline__ u32 pass() const { return u32(round) + 1; }  // and the tag of what is told
  __device__ __forceinline__ int piece(int row, int offset) const { return ((round & 1) * MAX_BATCH + row) * MAX_WIDTH + offset; }
  // Of the column from which the row goes on.
  __device__ __forceinline__ u64 draft_law(int row, int behind) const { return u64((turn() * batch + row) * drafts + behind - 1) * V; }
  __device__ __forceinline__ int first_logits() const { return turn() * batch * max(drafts + 1, 2) * (drafts + 1); }
};

// The drafts of a round behind the code of depth `last`.
__device__ __forceinline__ int proposed(int last, int drafts) { return min(drafts, G - 2 - last); }

// One of them.
struct Entry {
  int row, offset, column, behind, depth;  // depth 0: there is none
  bool checks;                             // there is a draft behind this target
  __device__ __forceinline__ Entry(const Block& block, const Candidates& made, int index) : column(made.column(index)), behind(made.behind(index)) {
    row = column / made.width, offset = column % made.width, depth = depth_of(same(block.position[column]), behind);
    checks = made.round > 0 && behind == 0 && offset < proposed(same(block.last[row]), made.drafts);
  }
  // What the noise of the pick is for.
  __device__ __forceinline__ int use(const Block& block) const { return behind == 0 || block.coupled ? USE_TARGET : USE_DRAFT; }
  __device__ __forceinline__ bool decides(const Block& block) const { return checks && !block.coupled; }
};

// All threads: waits for what was told of one draft of the round before, and what its law is; its value.
__device__ __forceinline__ u32 told(Block& block, const uint2* piece, u32 tag) {
  __syncthreads();
  if (same(warp_id()) == 0) {
    uint2 found;
    for (u32 polls = 0;; poll_again(polls)) {
      found = load_acquired(piece);
      if (!__any_sync(ALL_LANES, found.y != tag)) break;
    }
    if (lane_id() == 0) block.told = found.x;
    __syncwarp();
  }
  __syncthreads();
  return block.told;
}

// All threads: what an entry needs that depends on no logits: the noise of its pick, or the draft that it decides on.
__device__ __noinline__ void prepare(Block& block, const Candidates made, int index) {
  const Entry entry(block, made, index);
  if (entry.depth <= 0) return;
  if (entry.checks) {
    const Candidates before = {made.batch, made.width, made.drafts, made.round - 1};
    const int piece = before.piece(entry.row, entry.offset);
    const u32 draft = told(block, block.exchange.draft_codes + piece, before.pass());
    if (!block.coupled) {
      const u32 share = told(block, block.exchange.draft_shares + piece, before.pass());
      const float* const law = block.model.draft_laws + before.draft_law(entry.row, entry.offset + 1);
      for (int i = threadIdx.x * 4; i < V; i += THREADS * 4) *reinterpret_cast<float4*>(block.prepared.draft_law + i) = load_fresh_four(law + i);
      if (threadIdx.x == 0) block.draft_share = __uint_as_float(share);
    }
    if (threadIdx.x == 0) block.draft = draft, block.word = philox(block.request[entry.row].seed, block.request[entry.row].frame, u32(entry.depth), USE_ACCEPT, 0).x;
  }
  __syncthreads();  // whoever used this memory before
  if (!entry.decides(block)) select_sample_part::store_noise(block.prepared.noise, block.request[entry.row], entry.depth, entry.use(block));
  __syncwarp();
}

// All who multiply or add: this block has come to the end of a round when its heads are applied.
__device__ __forceinline__ void end_round(Block& block) {
  sync_team();
  if (threadIdx.x == 0) block.rounds_ended++, arrive(block.model.counter + 1);
  __syncwarp();
}
__device__ __forceinline__ bool ended_by_all(const Block& block) { return arrived(block.model.counter + 1) >= block.rounds_ended * CTAS; }

// One warp, and all who multiply: wait until all blocks have come to the end of as many rounds as this one.
__device__ __forceinline__ void await_all(Block& block) {
  for (u32 polls = 0; __any_sync(ALL_LANES, !ended_by_all(block));) polled(polls);
  if (lane_id() == 0) block.rounds_waited = block.rounds_ended;
}
__device__ __forceinline__ void wait_for_all(Block& block) {
  __syncthreads();
  if (same(warp_id()) == 0 && same(block.rounds_waited != block.rounds_ended)) {
    await_all(block);
    __syncwarp();
  }
  __syncthreads();
}

constexpr u32 UNDECIDED = 0xFFFFFFFFu;  // a draft whose law is of many codes

// What a draft is kept by, and what replaces it.
struct Decision {
  Request request;
  u32 depth, draft, word;  // the random word that accepts it, or not
  float draft_share;
  const float* draft_law;

  __device__ SELDOM static bool keeps_exactly(u32 word, float share, float draft_share) { return uniform(word) < double(share) / double(draft_share); }
  __device__ __forceinline__ bool keeps(float share) const {
    // Nearly always a float knows.
    const float number = float(uniform_ticks(word)) * (1.0f / 33554432), ratio = __fdividef(share, draft_share);
    return fabsf(number - ratio) > 1e-5f + 1e-5f * ratio ? number < ratio : keeps_exactly(word, share, draft_share);
  }

  // The score of a code that may replace it, in exact arithmetic.
  struct Exact {
    u64 seed;
    u32 frame, depth;
    const ShortLaw& law;
    const float* draft_law;  // null: of the law itself
    __device__ __forceinline__ u32 word(u32 code) const { return word_of(philox(seed, frame, depth, USE_RESIDUAL, code / 4), code % 4); }
    __device__ __forceinline__ double operator()(u32 code) const {
      return log(double(law.of(code)) - (draft_law ? double(draft_law[code]) : 0.0)) + gumbel_exact(word(code));
    }
  };
  // The first warp, for a law of few codes: the draft and KEPT, or a draw from what the law has beyond that of the draft, or,
  // where rounding left none, from the law.
  __device__ __forceinline__ u32 among(const select_sample_part::Kept& kept, Pick& pick, ShortLaw& law) const {
    float share = 0, mass[2], score[2];
    bool residual = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool stays = kept.share[i] >= 0;
      const u32 here = __ballot_sync(ALL_LANES, stays && kept.code[i] == draft);
      const float found = __shfl_sync(ALL_LANES, kept.share[i], here ? __ffs(here) - 1 : 0);
      share = here ? found : share;
      mass[i] = stays ? kept.share[i] - draft_law[kept.code[i]] : 0;
      residual |= __any_sync(ALL_LANES, mass[i] > 0);
      law.code[lane_id() + 32 * i] = kept.code[i], law.share[lane_id() + 32 * i] = kept.share[i];
    }
    if (keeps(share)) return draft | KEPT;
    const Exact exact = {request.seed, request.frame, depth, law, residual ? draft_law : nullptr};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!residual) mass[i] = kept.share[i];
      score[i] = mass[i] > 0 ? logf(mass[i]) + gumbel(exact.word(kept.code[i])) : MINUS_INFINITY;
    }
    __syncwarp();
    return warp_pick(pick, score, kept.code, exact);
  }
};

// The first warp: what was found, to `pick` of the block; and a decision to all blocks.
struct EntryOut {
  Block& block;
  Aim aim;
  const Decision& decision;
  uint2* piece;
  u32 tag;

  __device__ __forceinline__ void put(u32 found) const {
    block.pick = found;
    if (aim == DECIDE && found != UNDECIDED) store_whole(piece, make_uint2(found, tag));
  }
  __device__ __forceinline__ void none() const { put(0); }
  __device__ __forceinline__ void weighed(const select_sample_part::Kept& kept) const {
    if (aim == WEIGH) return;
    const u32 found = decision.among(kept, block.scratch.select.pick, block.short_law);
    if (lane_id() == 0) put(found);
  }
  template <class Exact>
  __device__ __forceinline__ void few(const select_sample_part::Kept& kept, const Exact& exact_score) const {
    if (aim != PICK) return weighed(kept);
    const u32 code = warp_pick(block.scratch.select.pick, kept.score, kept.code, exact_score);
    if (lane_id() == 0) put(code);
  }
  __device__ __forceinline__ void many(u32 code) const {
    if (lane_id() == 0) put(aim == DECIDE ? UNDECIDED : code);
  }
};

// The logits that a block selects from.
__device__ __forceinline__ DueLogits logits_of(const Block& block, const Selection& of, const float* noise) {
  return {of.logits, of.pass, noise, of.aim == WEIGH ? nullptr : block.stamp_of(of.pass, PICKED)};
}

// All threads of a block, for a law of many codes.
__device__ SELDOM u32 decide_among_many(Block& block, const Decision decision, const float* law) {
  auto& accept = block.scratch.accept;
  auto& excess = accept.of_draft[0];
  if (threadIdx.x == 0) excess.listed = 0, pick_reset(accept.pick);
  __syncthreads();
  if (decision.keeps(law[decision.draft])) return decision.draft | KEPT;
  accept_part::Laws laws;
  laws.load(law, decision.draft_law);
  accept_part::list_excess(excess, laws);
  __syncthreads();
  return accept_part::draw_excess(accept.pick, excess, {law, decision.draft_law, decision.request.seed, decision.request.frame, decision.depth});
}

// What the block's selection is decided by.
__device__ __forceinline__ Decision decision_of(const Block& block) {
  const Selection& of = block.selection;
  return {block.request[of.row], u32(of.depth), block.draft, block.word, block.draft_share, block.prepared.draft_law};
}

// All threads of a block: what few_row cannot do.
__device__ SELDOM void select_slowly(Block& block) {
  const Selection of = block.selection;
  const Decision decision = decision_of(block);
  const EntryOut out = {block, of.aim, decision, of.piece, of.tag};
  __syncthreads();  // whoever used this memory before
  select_sample_part::select_row(block.scratch.select, logits_of(block, of, of.aim == PICK ? block.prepared.noise.of_code : nullptr), decision.request, of.depth, G - 1, of.use, of.law,
                                 of.aim == WEIGH, block.model.errors, of.row, out);
  __syncthreads();
  if (of.aim == DECIDE && same(int(block.pick)) == int(UNDECIDED)) {
    const u32 found = decide_among_many(block, decision, of.law);
    if (threadIdx.x == 0) out.put(found);
    __syncthreads();
  }
  __syncwarp();
}

// All threads of a block: block.selection, which one thread has set; the code stands in `block.pick`.
__device__ __noinline__ void select_entry(Block& block) {
  __syncthreads();  // whoever used this memory before
  const Selection of = block.selection;
  const Decision decision = decision_of(block);
  const EntryOut out = {block, of.aim, decision, of.piece, of.tag};
  const DueLogits logits = logits_of(block, of, nullptr);
  const bool done = same(of.aim) != PICK && select_sample_part::few_row(block.scratch.select, logits, decision.request, of.aim == WEIGH ? of.law : nullptr, out);
  // While the first warp decides another one finds out whether what it comes to may be stored.
  if (of.aim == DECIDE && same(warp_id()) == 1) await_all(block);
  __syncthreads();  // also for the compiler, which otherwise loses sight of the lanes around a call
  if (!same(done)) select_slowly(block);
  __syncwarp();
}

// One thread: commits a code, and, where it `ends` a round, what came of that; of the prefill nothing is recorded.
__device__ __forceinline__ void commit(const Block& block, const Candidates& made, const Entry& entry, int code, bool ends) {
  const Model& model = block.model;
  model.codes[entry.row * G + entry.depth] = code;
  if (!ends) return;
  model.rounds[entry.row] = made.round;
  if (made.round == 0) return;
  int* const round = model.history + (entry.row * G + made.round - 1) * 3;
  round[0] = entry.depth - entry.offset, round[1] = proposed(block.last[entry.row], made.drafts), round[2] = entry.offset;
}

// All threads of a block: what is wanted of one entry, which has been prepared; without drafts a pick is committed and enters
// the next pass.
__device__ __noinline__ void pick_entry(Block& block, const Candidates made, int index, u32& picked) {
  const Entry entry(block, made, index);
  if (entry.depth <= 0) return;
  const bool target = entry.behind == 0, tells = target && made.round > 0 && made.drafts > 0;  // all blocks, what becomes of a draft
  Selection of = {block.exchange.logits(made.first_logits() + entry.column * (made.drafts + 1) + entry.behind), made.pass(), entry.row, entry.depth, entry.use(block)};
  of.aim = entry.decides(block) ? DECIDE : PICK, of.law = of.aim == DECIDE ? block.model.laws + entry.column * V : nullptr;
  of.piece = block.exchange.decisions + made.piece(entry.row, entry.offset), of.tag = made.pass();
  u32 code;
  const bool raced = of.aim == PICK && select_sample_part::race_row(block.scratch.select, logits_of(block, of, block.prepared.noise.of_code), block.request[entry.row], code);
  if (!raced) {
    if (threadIdx.x == 0) block.selection = of;
    select_entry(block);
    code = u32(same(int(block.pick)));
  }
  if (entry.checks && of.aim == PICK && code == block.draft) code |= KEPT;
  if (made.drafts == 0) {
    if (threadIdx.x == 0) commit(block, made, entry, int(code), true);
    if (entry.depth < G - 1) embed(block, made.pass() + 1, entry.row, embedding(block.model, entry.depth, int(code)));
  } else if (threadIdx.x == 0) {
    picked = code;
    if (tells && of.aim == PICK) store_whole(of.piece, make_uint2(code, of.tag));
  }
  __syncwarp();
  if (made.drafts > 0 && entry.depth < G - 1) fetch_embedding(block.model, entry.depth, int(code & ~KEPT));
}

// All threads of a block: what becomes of an entry once it is known from which column its row goes on.
__device__ __noinline__ void settle_entry(Block& block, const Candidates made, int index, const u32& picked) {
  const Entry entry(block, made, index);
  if (entry.depth <= 0) return;
  const bool target = entry.behind == 0;
  // The columns that are to be known; of the prefill there is one to go on from.
  const int needed = made.round == 0 ? 0 : target ? entry.offset : entry.offset + 1;
  __syncthreads();
  if (same(warp_id()) == 0 && !target && made.round > 0) {
    // Of drafts it is found out already by the warp that makes the plan of the next round.
    u32 decided;
    do decided = load_changing(&block.decided[entry.row]);
    while (__any_sync(ALL_LANES, decided / MAX_WIDTH != made.pass()));
    __threadfence_block();
    if (lane_id() == 0) block.first_to_go = decided % MAX_WIDTH, block.rounds_waited = block.rounds_ended;
    __syncwarp();
  } else if (same(warp_id()) == 0) {
    const uint2* const pieces = block.exchange.decisions + made.piece(entry.row, 0);
    const bool waited = same(block.rounds_waited == block.rounds_ended);
    u32 kept, polls = 0;
    for (;;) {
      const uint2 piece = lane_id() < needed ? load_whole(pieces + lane_id()) : make_uint2(KEPT, made.pass());
      const u32 there = __ballot_sync(ALL_LANES, piece.y == made.pass());
      kept = __ballot_sync(ALL_LANES, piece.x & KEPT) & there;
      // The first that is not kept, if there is one, is there; and nobody reads any more what will be written.
      if (((~kept & (kept + 1)) & ~there) == 0 && (waited || !__any_sync(ALL_LANES, !ended_by_all(block)))) break;
      poll_again(polls);
    }
    if (lane_id() == 0) block.first_to_go = __ffs(~kept) - 1, block.rounds_waited = block.rounds_ended;  // -1: none
    __syncwarp();
  }
  __syncthreads();
  const int first = same(block.first_to_go), code = same(int(picked));
  const bool taken = target ? first < 0 : made.round == 0 || first == entry.offset, goes_on = taken && !(code & KEPT);
  if (threadIdx.x == 0 && taken) {
    if (target) commit(block, made, entry, code & ~KEPT, goes_on);
    else store_whole(block.exchange.draft_codes + made.piece(entry.row, entry.behind - 1), make_uint2(u32(code), made.pass()));
  }
  __syncwarp();
  if (goes_on && entry.depth < G - 1) embed(block, made.pass() + 1, entry.row * (made.drafts + 1) + entry.behind, embedding(block.model, entry.depth, code));
  __syncwarp();
}

// All threads of a block without rows, if there are such: the laws of the drafts behind each row's last code, which were picked
// in `round`.
__device__ __noinline__ void weigh_drafts(Block& block, int round) {
  const int width = same(block.full), desk = this_desk();
  const Candidates made = {same(block.batch), round == 0 ? 2 : width, width - 1, round};
  const int tasks = made.batch * made.drafts;
  if (desk >= LAW_DESKS) return;
#pragma unroll 1
  for (int index = desk; index < tasks; index += LAW_DESKS) {
    __syncthreads();  // for the compiler, which otherwise loses sight of the lanes in a loop around a call
    const int row = index / made.drafts, behind = 1 + index % made.drafts, last = same(block.last[row]);
    if (behind > proposed(last, made.drafts)) continue;
    const int column = row * made.width + same(block.state[row]), piece = made.piece(row, behind - 1);
    told(block, block.exchange.draft_codes + piece, made.pass());
    wait_for_all(block);  // who read this memory two rounds ago
    if (threadIdx.x == 0) {
      const uint4* const logits = block.exchange.logits(made.first_logits() + column * (made.drafts + 1) + behind);
      block.selection = {logits, made.pass(), row, last + behind, USE_DRAFT, WEIGH, block.model.draft_laws + made.draft_law(row, behind), block.exchange.draft_shares + piece, made.pass()};
    }
    select_entry(block);
    if (threadIdx.x == 0) {
      const Selection& of = block.selection;
      store_released(of.piece, make_uint2(__float_as_uint(of.law[block.told]), of.tag));
    }
    __syncwarp();
  }
}

// All of a block who multiply or add: where the rows stand, and the columns of the next round. One of the warps that add finds
// it out, while others still pick by the plan before.
__device__ __forceinline__ void plan_round(Block& block, int round) {
  const int batch = same(block.batch), drafts = same(block.full) - 1;
  if (same(warp_id()) == WARPS_A_BLOCK) {
    bool finished = true;
    // Eight lanes a row, a lane a column.
#pragma unroll
    for (int start = 0; start < MAX_BATCH; start += 32 / MAX_WIDTH) {
      if (start >= batch) break;
      const int row = start + lane_id() / MAX_WIDTH, offset = lane_id() % MAX_WIDTH, first_lane = lane_id() & ~(MAX_WIDTH - 1);
      int last = row < batch ? block.last[row] : G, state = 0;
      if (round == 1) {
        last = 1, state = 1;
      } else if (drafts == 0) {
        last++;
      } else {
        const Candidates made = {batch, drafts + 1, drafts, round - 1};
        const bool waits = last < G - 1 && offset <= proposed(last, drafts);
        for (u32 polls = 0;; poll_again(polls)) {
          const uint2 piece = waits ? load_whole(block.exchange.decisions + made.piece(row, offset)) : make_uint2(0, made.pass());
          const bool ended = arrived(block.model.counter + 1) >= u32(round * CTAS);
          const u32 there = __ballot_sync(ALL_LANES, piece.y == made.pass()), kept = __ballot_sync(ALL_LANES, piece.x & KEPT) & there;
          state = __ffs(~(kept >> first_lane)) - 1;
          const bool known = ended && (there >> first_lane >> state & 1);
          if (known && row < batch && offset == 0) {
            __threadfence_block();
            *static_cast<volatile u32*>(&block.decided[row]) = made.pass() * MAX_WIDTH + state;
          }
          __syncwarp();
          if (!__any_sync(ALL_LANES, !known)) break;
        }
        if (last < G - 1) last += state + 1;
        else state = block.state[row < batch ? row : 0];
      }
      __syncwarp();
      if (row < batch && offset == 0) block.next_last[row] = last, block.next_state[row] = state;
      finished &= last >= G - 1;
    }
    finished = __all_sync(ALL_LANES, finished);
    if (lane_id() == 0) block.finished[round % 2] = finished;
    __syncwarp();
  }
  sync_team();
  const int width = drafts + 1;
  for_places([&](int i) {
    const int row = i / width, offset = i % width, last = row < batch ? block.next_last[row] : G;
    place_column(block, i, last < G - 1 && offset <= proposed(last, drafts) ? last + 1 + offset : -1);
  });
  if (int(threadIdx.x) < batch) block.last[threadIdx.x] = block.next_last[threadIdx.x], block.state[threadIdx.x] = block.next_state[threadIdx.x];
  sync_team();
}

// The heads of a column's target and of the drafts behind it.
__device__ __forceinline__ u32 heads_of(int position, int drafts) {
  if (position <= 0) return 0;
  const int most = max(min(position - 1 + drafts, G - 3), position - 1);
  return (2u << most) - (1u << (position - 1));
}

// All lanes: the heads that the columns of a pass need.
__device__ __forceinline__ u32 set_of_heads(const Block& block, int columns, int drafts) {
  u32 heads = 0;
  for (int i = lane_id(); i < columns; i += 32) heads |= heads_of(block.position[i], drafts);
  return warp_or(heads);
}

// Whether this block does not attend, and prepares its first entry instead.
__device__ __forceinline__ bool has_time(const Block& block) { return first_task(block) >= tasks_of(block); }

// All who multiply or add: the heads that are needed, what is picked, and what becomes of it.
__device__ __forceinline__ void apply_and_pick(Block& block, Stream& stream, const Candidates made) {
  const int desk = this_desk();
  run_heads(block, stream, set_of_heads(block, made.columns(), made.drafts), made.columns(), made.drafts + 1, made.first_logits());
  if (made.drafts > 0) end_round(block);
  if (stream.adds()) return;
#pragma unroll 1
  for (int entry = desk; entry < made.all(); entry += CTAS) {  // a block an entry
    __syncthreads();  // for the compiler, as above
    if (entry != desk || !has_time(block)) prepare(block, made, entry);
    pick_entry(block, made, entry, block.picked[entry / CTAS]);
  }
  if (made.drafts == 0) return;
#pragma unroll 1
  for (int entry = desk; entry < made.all(); entry += CTAS) {
    __syncthreads();
    settle_entry(block, made, entry, block.picked[entry / CTAS]);
  }
}

KERNEL __launch_bounds__(THREADS + HELPERS, 1) fused_frame(const u64* addresses, int batch, int drafts, int coupled) {
  DYNAMIC_SHARED(memory);
  Block& block = *reinterpret_cast<Block*>(memory);
  const Model& model = block.model;
  // Picks and what is around them go to the last blocks: of many shapes these have no rows of the matrices, and their
  // instructions stay where they are fetched from. Attention keeps away from them where there are blocks enough.
  const int desk = this_desk();
  if (threadIdx.x == 0) block.coupled = coupled, block.desks = desks_of(batch, drafts);
  begin(block, addresses, batch, drafts + 1, drafts + 1, true);
  stamp(block.stamp_of(0, ENTERED));
  Stream stream{block, memory + BLOCK_BYTES, u32(same(warp_id()))};
  if (stream.warp == WARPS_A_BLOCK + ADDERS) return Producer(block, memory + BLOCK_BYTES).run();
  Uses& uses = stream.uses;
  stream.push(BODY);
  stream.push(heads_of(1, drafts));
  if (desk < batch && threadIdx.x == 0) model.errors[desk] = 0x7F7F7F7F;
  for_places([&](int i) { place_column(block, i, i < 2 * batch ? i % 2 : -1); });
  clear_exchange(block, stream, 2 * batch);

  // Prefill: the Talker's state and its code.
  if (desk < batch && !stream.adds()) {
    enter(block, 1, desk * 2, [&](int i) { return four_at(model.talker_hidden + desk * HT + i); });
    embed(block, 1, desk * 2 + 1, embedding(model, 0, model.codes[desk * G]));
  }

  // Whether it is known by the plan of a round that another one follows, whose weights may be on their way then.
  const auto followed = [&](int round) {
    return round == 0 ? G > 2 : bool(__any_sync(ALL_LANES, lane_id() < batch && block.last[lane_id() % MAX_BATCH] + 1 + drafts < G - 1));
  };
#pragma unroll 1
  for (int round = 0;; round = int(uses.pass)) {  // as many passes as rounds
    const bool ahead = stream.pushes() && (round == 0 || followed(round - 1));
    if (round > 0) {
      plan_round(block, round);
      if (same(block.finished[round % 2])) break;
    }
    uses.pass++;
    // Made where it is wanted: kept over a pass it takes registers that the pass needs.
    const auto made = [&]() {
      const int now = computed_here(int(uses.pass) - 1);
      return Candidates{batch, now == 0 ? 2 : drafts + 1, drafts, now};
    };
    if (stream.pushes()) {
      if (!ahead) stream.push(BODY);
      if (round > 0) stream.push(set_of_heads(block, made().columns(), drafts));
      if (followed(round)) stream.push(BODY);
    }
    if (round > 0 && drafts > 0 && !coupled && !stream.adds()) weigh_drafts(block, round - 1);
    run_pass<HAS_PROJECTION>(block, stream, batch, made().width, [&]() {
      __syncthreads();  // for the compiler, as above
      if (desk < made().all() && has_time(block)) prepare(block, made(), desk);
    });
    apply_and_pick(block, stream, made());
  }

  stream.push(STOP);
  if (stream.adds()) return;
  grid_barrier(block);
  // The Talker's next input, added in the order of the depths.
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < batch * HT; i += CTAS * THREADS) {
    const int row = i / HT, channel = i % HT;
    float sum = 0;
#pragma unroll
    for (int depth = 0; depth < G; depth++) {
      const float value = to_float(embedding(model, depth, load_fresh(model.codes + row * G + depth))[channel]);
      sum = depth ? sum + value : value;
    }
    model.embedded[i] = sum;
  }
  stamp(block.stamp_of(0, SCORED));
}

// One pass over rows that are given: inputs [B, W, H] f32 at positions [B, W] (negative: none), W <= 8; out: states
// [B, W, H] f32, after the final norm.
KERNEL __launch_bounds__(THREADS + HELPERS, 1) fused_pass(const u64* addresses, const float* inputs, const int* positions, float* states, int batch, int width) {
  DYNAMIC_SHARED(memory);
  Block& block = *reinterpret_cast<Block*>(memory);
  const int columns = batch * width;
  if (threadIdx.x == 0) block.desks = 0;
  begin(block, addresses, batch, width, MAX_COPIES, false);
  Stream stream{block, memory + BLOCK_BYTES, u32(same(warp_id()))};
  if (stream.warp == WARPS_A_BLOCK + ADDERS) return Producer(block, memory + BLOCK_BYTES).run();
  for_places([&](int i) { place_column(block, i, i < columns ? positions[i] : -1); });
  stream.push(BODY);
  stream.push(STOP);
  clear_exchange(block, stream, columns);
  stream.uses.pass = 1;
  for (int column = blockIdx.x; column < columns && !stream.adds(); column += CTAS)
    enter_decoder(block, 1, column, [&](int i) { return four_at(inputs + column * H + i); });
  run_pass<false>(block, stream, batch, width, []() {});
  sync_team();
  if (stream.adds()) return;
  grid_barrier(block);
#pragma unroll 1
  for (int column = blockIdx.x * WARPS_A_BLOCK + warp_id(); column < columns; column += CTAS * WARPS_A_BLOCK) {
    if (block.position[column] < 0) continue;
    const float* row = block.model.hidden + column * H;
    MeanSquare square;
    square.load(block.exchange.hidden_squares + column * (H / 16), stream.uses.outer());
    const float inverse = square.inverse_root();
    for (int i = lane_id(); i < H; i += 32) states[column * H + i] = load_fresh(row + i) * inverse * block.model.final_norm[i];
  }
}
