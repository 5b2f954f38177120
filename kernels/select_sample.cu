// select_sample: temperature, top-k, top-p and the pick for every row of logits, one launch, V <= 4096.
//
// Layout   logits [B, W, V] f32, 16-byte aligned; requests [B]; last [B]: depth of each row's last committed code;
//          out: codes [B, W] i32, laws [B, W, V] f32 (or null), errors [B] i32.
//          Entry w of row b belongs to depth last[b] + 1 + w; above `deepest` there is nothing to do.
// Launch   grid (W, B), block THREADS: a power of two in [32, 512], the one that is at least V / 4, or 512.
// Limits   V <= 4096; the cost is bounded, and about the same, for every top_k and top_p.
// Errors   A NaN, a +inf or a row without a finite value: errors[b] becomes the smallest such depth (set it to
//          0x7F7F7F7F before the frame), the code is 0 and the law one-hot, so that whatever follows stays in bounds.
//
// The law is sampling.law's. Both filters are one routine, keep_first: walk the entries from the largest logit down
// (equal logits: lower code first) and keep one while the measure of those before it is below a limit. For top-k the
// measure of an entry is 1 and the limit k; for top-p it is its probability mass and the limit top_p of the sum, which
// is Hugging Face's rule read from the other end. The entry at the limit is found as a radix select does it, digit by
// digit, and without a sort: the first digit is linear in the logit, which nearly always leaves a handful of entries;
// these compare themselves with each other. Where many are left, digits of the exact order key (logit, code) follow,
// so the cost is bounded for any input. Masses are integers (39 bits of fraction): sums do not depend on the order of
// the additions, and a run repeats bit by bit.
//
// A short top-k goes a shorter way: where its first digit leaves at most LISTED candidates, these are listed, each is
// told its rank and the mass before it, and one warp does the rest without barriers.
//
// Where all that is wanted is the law of a short top-k without top-p, few_row looks for a bar that few entries pass.
// Where the noise is known before the logits are, and no law is asked for, a race (race_row) is shorter still: the best
// score of all, if top-k keeps its entry, else the best of those before it, and so on.

#define ITEMS (V <= 4 * THREADS ? 4 : V <= 8 * THREADS ? 8 : 16)
#define CODE_BITS 12
#define ORDER_BITS (32 + CODE_BITS)
#define LISTED 64
#define MOST_LAPS 8
#define BARS 4
#define MOST_TURNS 6
#define WARPS (THREADS / 32)
#define MASS_SCALE 549755813888.0f  // 2^39
#define MASS_LOW_BITS 20
#define FIRST_DIGIT_REACH 40.0f  // temperatures below the largest logit; what is further down shares the last bin

static_assert(V <= ITEMS * THREADS && V <= 1 << CODE_BITS, "select_sample_general.cu is for larger codebooks");
static_assert((THREADS & (THREADS - 1)) == 0 && THREADS >= 32 && THREADS <= 512, "THREADS");

__device__ constexpr int log2_of(int value) { return value == 1 ? 0 : 1 + log2_of(value / 2); }
constexpr int DIGIT_BITS = log2_of(THREADS);

// A thread's neighbouring entries.
struct Row {
  float logit[ITEMS];
  float weight[ITEMS];  // of the law, up to a factor
  float largest, inverse_temperature, reach, bins_per_unit;

  __device__ __forceinline__ static u32 code(int i) { return threadIdx.x * ITEMS + i; }
  // Ascending: the largest logit first, of equal ones the lower code.
  __device__ __forceinline__ static u64 order(float logit, u32 code) { return u64(~order_key(logit)) << CODE_BITS | code; }
  __device__ __forceinline__ u64 order(int i) const { return order(logit[i], code(i)); }
  __device__ __forceinline__ u32 first_digit(int i) const {  // fminf also turns the NaN of inf * 0 into the last bin
    return u32(fminf((largest - logit[i]) * bins_per_unit, float(THREADS - 1)));
  }
  __device__ __forceinline__ float scaled(float value) const { return (value - largest) * inverse_temperature; }
  __device__ __forceinline__ u64 mass(int i) const { return u64(weight[i] * MASS_SCALE); }
  __device__ __forceinline__ void measure(int, u32& out) const { out = 1; }
  __device__ __forceinline__ void measure(int i, u64& out) const { out = mass(i); }
};

// An entry of an array in registers, by an index that is not known at compile time.
template <class T>
__device__ __forceinline__ T at(const T (&array)[ITEMS], int item) {
  T found = array[0];
#pragma unroll
  for (int i = 1; i < ITEMS; i++) found = i == item ? array[i] : found;
  return found;
}

// The state of one keep_first. A mass is summed in two parts, so that 32-bit shared-memory atomics suffice.
template <class Measure>
struct Cut {
  u32 bins[sizeof(Measure) / 4][THREADS];
  u64 order[LISTED];
  Measure measure[LISTED];
  Measure before, limit, through;  // through: the measure up to the end of the bin
  u32 listed, bin;

  __device__ __forceinline__ void clear() {
    for (auto& part : bins) part[threadIdx.x] = 0;
    if (threadIdx.x == 0) listed = 0;
  }
  // Bin b stands where the lane that scans it reads without bank conflicts.
  __device__ __forceinline__ static int place(u32 bin) { return (bin % WARPS) * 32 + bin / WARPS; }
};

__device__ __forceinline__ void add(Cut<u32>& s, bool active, u32 bin, u32) {
  if (active) atomicAdd(&s.bins[0][Cut<u32>::place(bin)], 1u);
}

__device__ __forceinline__ void add(Cut<u64>& s, bool active, u32 bin, u64 mass) {
  const u32 lanes = __ballot_sync(ALL_LANES, active);
  if (lanes == 0) return;
  u32 low = u32(mass) & ((1u << MASS_LOW_BITS) - 1), high = u32(mass >> MASS_LOW_BITS);
  const int first = __ffs(lanes) - 1;
  const bool together = bin == __shfl_sync(ALL_LANES, bin, first);
  // A tied row puts a whole warp into one bin: add once for all of it.
  if (__all_sync(ALL_LANES, together || !active)) {
    low = warp_sum(active ? low : 0);
    high = warp_sum(active ? high : 0);
    active = lane_id() == first;
  }
  if (!active) return;
  atomicAdd(&s.bins[0][Cut<u64>::place(bin)], low);
  atomicAdd(&s.bins[1][Cut<u64>::place(bin)], high);
}

__device__ __forceinline__ u32 bin_sum(const Cut<u32>& s, int place) { return s.bins[0][place]; }
__device__ __forceinline__ u64 bin_sum(const Cut<u64>& s, int place) {
  return s.bins[0][place] + (u64(s.bins[1][place]) << MASS_LOW_BITS);
}

// One warp: whether each lane's stretch holds the entry at the limit, which lies after `before` of the measure.
template <class Measure>
__device__ __forceinline__ bool holds_limit(Measure before, Measure here, Measure limit) {
  return before < limit && limit <= before + here;
}

// One warp: the bin in which the measure reaches the limit, and the measure before it. THREADS where none does.
template <class Measure, class LimitOf>
__device__ __forceinline__ void find_bin(Cut<Measure>& s, bool first_pass, LimitOf limit_of) {
  Measure sum = 0;
#pragma unroll 8
  for (int i = 0; i < WARPS; i++) sum += bin_sum(s, i * 32 + lane_id());
  const Measure inclusive = warp_inclusive_sum(sum), total = __shfl_sync(ALL_LANES, inclusive, 31);
  const Measure limit = first_pass ? limit_of(total) : s.limit, base = first_pass ? 0 : s.before;
  Measure before = base + inclusive - sum;
  __syncwarp();  // all lanes have read s.before
  const u32 stretch = __ballot_sync(ALL_LANES, holds_limit(before, sum, limit));
  if (lane_id() == 0) {
    s.limit = limit;
    if (stretch == 0) s.bin = THREADS, s.through = base + total;
  }
  if (stretch == 0) return;
  // The same again, for the bins of the stretch that was found.
  const int found = __ffs(stretch) - 1;
  before = __shfl_sync(ALL_LANES, before, found);
  const Measure here = lane_id() < WARPS ? bin_sum(s, lane_id() * 32 + found) : 0;
  before += warp_inclusive_sum(here) - here;
  if (holds_limit(before, here, limit)) {
    s.bin = found * WARPS + lane_id();
    s.before = before;
    s.through = before + here;
  }
}

// Each thread: those of its entries that compete with the listed ones for what is left below the limit.
template <class Measure>
__device__ __forceinline__ u32 compete(const Cut<Measure>& s, const Row& row, u32 rest) {
  const int listed = s.listed;
  u64 order[ITEMS];
  Measure before[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) order[i] = row.order(i), before[i] = s.before;
#pragma unroll 1
  for (int j = 0; j < listed; j++) {
    const u64 other = s.order[j];
    const Measure measure = s.measure[j];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) before[i] += other < order[i] ? measure : 0;
  }
  u32 kept = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; i++) kept |= u32(before[i] < s.limit) << i;
  return kept & rest;
}

// All threads: counts the digits of one pass, and finds the bin of the limit.
template <class Measure, class LimitOf>
__device__ __forceinline__ void divide(Cut<Measure>& s, const Row& row, u32 entries, int pass, u32 (&digit)[ITEMS],
                                       LimitOf limit_of) {
  const int shift = max(ORDER_BITS - DIGIT_BITS * pass, 0);
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    Measure measure;
    row.measure(i, measure);
    digit[i] = pass == 0 ? row.first_digit(i) : u32(row.order(i) >> shift) & (THREADS - 1);
    add(s, entries >> i & 1, digit[i], measure);
  }
  __syncthreads();
  if (warp_id() == 0) find_bin(s, pass == 0, limit_of);
  __syncthreads();
}

// All threads; returns which of the thread's `alive` entries stay. `divided`: the first pass has been made.
template <class Measure, class LimitOf>
__device__ __forceinline__ u32 keep_first(Cut<Measure>& s, const Row& row, u32 alive, bool divided,
                                          u32 (&digit)[ITEMS], LimitOf limit_of) {
  u32 kept = 0, rest = alive;
  for (int pass = 0;; pass++) {
    if (pass > 0 || !divided) divide(s, row, rest, pass, digit, limit_of);
    const u32 candidates = rest;
    rest = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      if (!(candidates >> i & 1) || digit[i] > s.bin) continue;
      if (digit[i] < s.bin) {
        kept |= 1u << i;
        continue;
      }
      rest |= 1u << i;
      const u32 slot = atomicAdd(&s.listed, 1u);
      if (slot < LISTED) {
        s.order[slot] = row.order(i);
        row.measure(i, s.measure[slot]);
      }
    }
    __syncthreads();
    if (s.listed <= LISTED) break;
    __syncthreads();
    s.clear();
    __syncthreads();
  }
  return rest ? kept | compete(s, row, rest) : kept;
}

// An entry of the short way: its place in the order, and its mass with a 1 below it, so that one sum of those before
// an entry is its rank and the mass before it.
struct alignas(16) Candidate {
  u64 order, mass_and_one;
};
#define RANK_BITS 8

struct Short {
  Candidate candidate[LISTED];
  u32 listed;
  // By rank, of those that top-k keeps:
  u64 before[LISTED], total;
  u32 code[LISTED];
  float score[LISTED], weight[LISTED];

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < LISTED; i += THREADS) candidate[i] = Candidate{~0ull, 0};
    if (threadIdx.x == 0) listed = 0;
  }
};

// Of each warp in a lap of a race: its best score, and whose it is; how many entries go before the best of all in the
// order, and how many scores are near it.
struct Race {
  u32 score[32], code[32], counts[32];
  float logit[32];
};

// Of each warp in a turn of a search, how many entries pass each of four bars, two in a word; and those that pass the one.
struct Search {
  u32 counts[2][2][32];
  u32 key[LISTED], code[LISTED];
};

struct Shared {
  Search search;
  Cut<u32> by_count;
  Cut<u64> by_mass;
  Short few;
  Race race;
  Pick pick;
  u32 largest_of_warp[32], smallest_of_warp[32];
  u64 mass_of_warp[32];
};

// A row of logits in memory. Whatever else holds one has the same members; where KNOWS_NOISE, also the noise of each code.
struct Logits {
  static constexpr bool KNOWS_NOISE = false;
  const float* row;

  __device__ __forceinline__ void load(float (&values)[ITEMS]) const {  // the thread's entries
#pragma unroll
    for (int i = 0; i < ITEMS; i += 4) {
      const float4 four = load_four(row, Row::code(i), MINUS_INFINITY);
      values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
    }
  }
  __device__ __forceinline__ float operator[](u32 code) const { return row[code]; }
};

__device__ __forceinline__ void store_row(float* law, const float (&values)[ITEMS]) {
#pragma unroll
  for (int i = 0; i < ITEMS; i += 4) {
    const int code = Row::code(i);
    if (V % 4 == 0) {
      if (code < V) *reinterpret_cast<float4*>(law + code) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    } else {
      for (int j = 0; j < 4; j++)
        if (code + j < V) law[code + j] = values[i + j];
    }
  }
}

// All threads: the largest logit, and how finely the first digit divides those below it. False for a row of no law.
__device__ __forceinline__ bool find_range(Shared& s, Row& row, float temperature) {
  u32 largest = 0, smallest = 0xFFFFFFFFu;
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const u32 key = order_key(row.logit[i]);
    largest = max(largest, key);
    if (key > KEY_MINUS_INFINITY) smallest = min(smallest, key);
  }
  largest = warp_max(largest);
  smallest = warp_min(smallest);
  if (lane_id() == 0) {
    s.largest_of_warp[warp_id()] = largest;
    s.smallest_of_warp[warp_id()] = smallest;
  }
  __syncthreads();
  largest = warp_max(lane_id() < WARPS ? s.largest_of_warp[lane_id()] : 0);
  smallest = warp_min(lane_id() < WARPS ? s.smallest_of_warp[lane_id()] : 0xFFFFFFFFu);
  row.largest = key_to_float(largest);
  row.inverse_temperature = 1 / temperature;
  row.reach = fminf(row.largest - key_to_float(smallest), FIRST_DIGIT_REACH * temperature);
  row.bins_per_unit = __fdividef(float(THREADS), row.reach);
  return largest > KEY_MINUS_INFINITY && largest < KEY_INFINITY;
}

// All threads; `alive` entries are the law: writes it, and finds what the pick is between.
__device__ __forceinline__ void offer_and_store(Shared& s, const Row& row, u32 alive, const Request& request, u32 depth,
                                                u32 use, float* law) {
  u32 word[ITEMS], best = 0;
  float score[ITEMS];
  u64 mass = 0;
  if (alive) {
#pragma unroll
    for (int i = 0; i < ITEMS; i += 4) {  // one Philox block covers four neighbouring codes
      const uint4 words = philox(request.seed, request.frame, depth, use, Row::code(i) / 4);
      word[i] = words.x, word[i + 1] = words.y, word[i + 2] = words.z, word[i + 3] = words.w;
    }
  }
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    score[i] = MINUS_INFINITY;
    mass += alive >> i & 1 ? row.mass(i) : 0;
  }
  // Each lane takes its own next entry, so that a warp goes round as often as its busiest lane must.
#pragma unroll 1
  for (u32 left = alive; left; left &= left - 1) {
    const int item = __ffs(left) - 1;
    const float value = row.scaled(at(row.logit, item)) + gumbel(at(word, item));
    best = max(best, order_key(value));
#pragma unroll
    for (int i = 0; i < ITEMS; i++) score[i] = i == item ? value : score[i];
  }
  __syncwarp();
  mass = warp_sum(mass);
  if (lane_id() == 0) s.mass_of_warp[warp_id()] = mass;
  pick_offer(s.pick, best);
  __syncthreads();
  if (law) {
    const u64 total = warp_sum(lane_id() < WARPS ? s.mass_of_warp[lane_id()] : 0ull);
    const float unit = __fdividef(MASS_SCALE, float(total));
    float values[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) values[i] = alive >> i & 1 ? row.weight[i] * unit : 0;
    store_row(law, values);
  }
  const float bar = pick_bar(s.pick);
#pragma unroll
  for (int i = 0; i < ITEMS; i++)
    if (score[i] >= bar) pick_contend(s.pick, Row::code(i));
  __syncthreads();
}

// What the exact score of a code is made of.
template <class Source>
struct ExactScore {
  Source logits;
  float largest;
  const Request& request;
  u32 depth, use;

  __device__ __forceinline__ u32 word(u32 code) const {
    return word_of(philox(request.seed, request.frame, depth, use, code / 4), code % 4);
  }
  __device__ __forceinline__ float noise(u32 code) const {
    if constexpr (Source::KNOWS_NOISE) return logits.noise ? logits.noise[code] : 0;  // where nobody asks for a pick there is none
    else return gumbel(word(code));
  }
  __device__ __forceinline__ double operator()(u32 code) const {
    const double temperature = request.temperature == 0 ? 1 : request.temperature;
    return (double(logits[code]) - double(largest)) / temperature + gumbel_exact(word(code));
  }
};

// All threads: lists the candidates, which are the entries up to the bin of the limit.
__device__ __forceinline__ void list_candidates(Short& s, const Row& row, u32 alive, const u32 (&digit)[ITEMS], u32 bin) {
  u32 listed = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; i++) listed |= u32((alive >> i & 1) && digit[i] <= bin) << i;
  if (listed) {
    u32 slot = atomicAdd(&s.listed, u32(__popc(listed)));
    // Each lane takes its own next entry, so that a warp goes round as often as its busiest lane must.
#pragma unroll 1
    for (; listed; listed &= listed - 1) {
      const int item = __ffs(listed) - 1;
      const float logit = at(row.logit, item);
      const u64 mass = u64(expf(row.scaled(logit)) * MASS_SCALE);
      s.candidate[slot++] = Candidate{row.order(logit, row.code(0) + item), mass << RANK_BITS | 1};
    }
  }
  __syncthreads();
}

// All threads, eight for a candidate: puts those that top-k keeps in their order, each with the mass before it and its
// score. `kept` is how many it keeps.
template <class Exact>
__device__ __forceinline__ void rank_candidates(Short& s, const Row& row, u32 kept, const Exact& exact_score) {
  constexpr int TEAM = 8;
  const u32 listed = s.listed;
#pragma unroll 1
  for (u32 first = warp_id() * (32 / TEAM); first < listed; first += THREADS / TEAM) {  // the same for a whole warp
    const u64 order = s.candidate[first + lane_id() / TEAM].order;
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < LISTED; i += TEAM) {
      const Candidate other = s.candidate[i + lane_id() % TEAM];
      sum += other.order < order ? other.mass_and_one : 0;
    }
#pragma unroll
    for (int step = TEAM / 2; step; step >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    const u32 code = u32(order) & ((1u << CODE_BITS) - 1), rank = u32(sum) & ((1u << RANK_BITS) - 1);
    const float scaled = row.scaled(key_to_float(~u32(order >> CODE_BITS)));
    const float score = scaled + exact_score.noise(code), weight = expf(scaled);
    if (lane_id() % TEAM == 0 && rank < kept) {
      const u64 before = sum >> RANK_BITS;
      s.before[rank] = before;
      s.code[rank] = code, s.score[rank] = score, s.weight[rank] = weight;
      if (rank == kept - 1) s.total = before + u64(weight * MASS_SCALE);
    }
  }
  __syncthreads();
}

// One warp, two codes a lane: those that top-k and top-p keep, with their probabilities and scores.
struct Kept {
  u32 code[2];
  float share[2], score[2];  // of one that is not kept: below 0, and minus infinity

  __device__ __forceinline__ Kept() {}
  __device__ __forceinline__ Kept(const Short& s, u32 ranked, double top_p) {
    const u64 limit = top_p < 1 ? u64(ceil(top_p * double(s.total))) : ~0ull;
    u32 kept = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 rank = lane_id() + 32 * i;
      const bool stays = rank < ranked && s.before[rank] < limit;
      kept += __popc(__ballot_sync(ALL_LANES, stays));
      code[i] = s.code[rank], share[i] = stays ? s.weight[rank] : -1.0f;
      score[i] = stays ? s.score[rank] : MINUS_INFINITY;
    }
    divide_by(kept < ranked ? s.before[kept] : s.total);
  }
  __device__ __forceinline__ void divide_by(u64 total) {
    const float unit = __fdividef(MASS_SCALE, float(total));
#pragma unroll
    for (int i = 0; i < 2; i++) share[i] *= unit;
  }
  // Over the zeros that are there.
  __device__ __forceinline__ void store(float* law) const {
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (share[i] >= 0) law[code[i]] = share[i];
  }
};

// The noise of every code, for a source that knows it.
struct Noise {
  alignas(16) float of_code[ITEMS * THREADS];
};

// All threads: makes it; none for argmax. A barrier follows.
__device__ __forceinline__ void store_noise(Noise& noise, const Request& request, u32 depth, u32 use) {
#pragma unroll 1
  for (u32 quad = threadIdx.x; quad < (V + 3) / 4; quad += THREADS) {
    const uint4 words = philox(request.seed, request.frame, depth, use, quad);
    float4 four = make_float4(gumbel(words.x), gumbel(words.y), gumbel(words.z), gumbel(words.w));
    if (request.temperature == 0) four = make_float4(0, 0, 0, 0);
    *reinterpret_cast<float4*>(noise.of_code + quad * 4) = four;
  }
}

// All threads: the code of the best score among the first `top_k` of the order. False, and nothing has changed, where two
// scores are too near each other, or the laps were not enough.
__device__ __forceinline__ bool race(Race& s, const Row& row, const float* noise, u32 top_k, u32& code) {
  float score[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) score[i] = row.scaled(row.logit[i]) + noise[Row::code(i)];
#pragma unroll 1
  for (int lap = 0; lap < MOST_LAPS; lap++) {
    float best = score[0], logit = row.logit[0];
    u32 mine = Row::code(0);
#pragma unroll
    for (int i = 1; i < ITEMS; i++)
      if (score[i] > best) best = score[i], logit = row.logit[i], mine = Row::code(i);
    const u32 key = order_key(best), best_key = warp_max(key);
    const int lane = __ffs(__ballot_sync(ALL_LANES, key == best_key)) - 1;
    if (lane_id() == lane) s.score[warp_id()] = best_key, s.logit[warp_id()] = logit, s.code[warp_id()] = mine;
    __syncwarp();
    __syncthreads();
    const u32 of_warp = lane_id() < WARPS ? s.score[lane_id()] : 0, largest = warp_max(of_warp);
    const int warp = __ffs(__ballot_sync(ALL_LANES, of_warp == largest)) - 1;
    const float bar = key_to_float(largest) - PICK_MARGIN;
    logit = s.logit[warp], code = s.code[warp];
    u32 counts = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const bool before = row.logit[i] > logit || (row.logit[i] == logit && Row::code(i) < code);
      counts += u32(before) | u32(score[i] >= bar) << 16;
      score[i] = before ? score[i] : MINUS_INFINITY;
    }
    counts = warp_sum(counts);
    if (lane_id() == 0) s.counts[warp_id()] = counts;
    __syncthreads();
    counts = warp_sum(lane_id() < WARPS ? s.counts[lane_id()] : 0u);
    if (counts >> 16 != 1) return false;
    if ((counts & 0xFFFF) < top_k) return true;
  }
  return false;
}

__device__ __forceinline__ float temperature_of(const Request& request) { return request.temperature == 0 ? 1.0f : float(request.temperature); }
__device__ __forceinline__ int top_k_of(const Request& request) { return request.temperature == 0 ? 1 : request.top_k; }  // argmax is top-1
__device__ __forceinline__ double top_p_of(const Request& request) { return request.temperature == 0 ? 1 : request.top_p; }

// All threads of a block, for a source that knows the noise: the pick of one row of logits, where a race finds it.
template <class Source>
__device__ __forceinline__ bool race_row(Shared& s, const Source& logits, const Request& request, u32& code) {
  if (top_p_of(request) < 1) return false;
  Row row;
  logits.load(row.logit);
  if (!find_range(s, row, temperature_of(request))) return false;
  const int top_k = top_k_of(request);
  return race(s.race, row, logits.noise, top_k > 0 ? top_k : V, code);
}

// All threads: finds a bar that at least `top_k` entries pass, and at most LISTED, and lists those; how many there are, or 0
// if none was found.
__device__ __forceinline__ u32 list_above_bar(Search& s, const Row& row, u32 top_k) {
  float top = row.largest, bottom = row.largest - row.reach, bar = top;
  u32 listed = 0, slot = 0;
#pragma unroll 1
  for (int turn = 0; turn < MOST_TURNS && listed == 0; turn++) {
    const float step = (top - bottom) * (1.0f / (BARS + 1));
    u32 passing[2] = {};
#pragma unroll
    for (int b = 0; b < BARS; b++) {
      const float level = top - float(b + 1) * step;
#pragma unroll
      for (int i = 0; i < ITEMS; i++) passing[b / 2] += row.logit[i] >= level ? 1u << b % 2 * 16 : 0;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      passing[half] = warp_sum(passing[half]);
      if (lane_id() == 0) s.counts[turn & 1][half][warp_id()] = passing[half];
    }
    __syncthreads();
    u32 of_warp[2], all[2];
#pragma unroll
    for (int half = 0; half < 2; half++) of_warp[half] = lane_id() < WARPS ? s.counts[turn & 1][half][lane_id()] : 0, all[half] = warp_sum(of_warp[half]);
    // The first bar that enough pass.
    float above = top, below = bottom;
    bool found = false;
#pragma unroll
    for (int b = 0; b < BARS; b++) {
      const float level = top - float(b + 1) * step;
      const u32 count = all[b / 2] >> b % 2 * 16 & 0xFFFF;
      if (found) continue;
      if (count < top_k) {
        above = level;
      } else {
        found = true, below = bar = level;
        if (count <= LISTED) listed = count, slot = of_warp[b / 2] >> b % 2 * 16 & 0xFFFF;
      }
    }
    top = above, bottom = below, listed = same(listed);
  }
  if (listed == 0) return 0;
  slot = warp_sum(lane_id() < warp_id() ? slot : 0u);  // of the warps before
  const u32 below = (1u << lane_id()) - 1;
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const bool passes = row.logit[i] >= bar;
    const u32 lanes = __ballot_sync(ALL_LANES, passes), at = slot + __popc(lanes & below);
    if (passes) s.key[at] = order_key(row.logit[i]), s.code[at] = Row::code(i);
    slot += __popc(lanes);
  }
  __syncthreads();
  return listed;
}

// One warp: the law of the first `top_k` of those that are listed.
__device__ __forceinline__ Kept keep_listed(const Search& s, const Row& row, u32 listed, u32 top_k) {
  Kept kept;
  u32 key[2];  // 0: out
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 slot = lane_id() + 32 * i;
    key[i] = slot < listed ? s.key[slot] : 0, kept.code[i] = s.code[slot], kept.score[i] = MINUS_INFINITY;
  }
#pragma unroll 1
  for (; listed > top_k; listed--) {  // the smallest goes, of equal ones the one with the highest code
    const u32 smallest = warp_min(min(key[0] - 1, key[1] - 1)) + 1;  // of those that are in
    const bool first = key[0] == smallest, second = key[1] == smallest;
    const u32 highest = warp_max(max(first ? kept.code[0] + 1 : 0, second ? kept.code[1] + 1 : 0)) - 1;
    if (first && kept.code[0] == highest) key[0] = 0;
    if (second && kept.code[1] == highest) key[1] = 0;
  }
  u64 mass = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float weight = expf(row.scaled(key_to_float(key[i])));
    kept.share[i] = key[i] ? weight : -1.0f;
    mass += key[i] ? u64(weight * MASS_SCALE) : 0;
  }
  kept.divide_by(warp_sum(mass));
  return kept;
}

// All threads of a block: the law of one row of logits, where top-k leaves few and top-p all of them, to out.weighed(kept), the
// first warp, and to `law` (or null). False, and nothing has changed, where it is another one or no bar was found.
template <class Source, class Out>
__device__ __forceinline__ bool few_row(Shared& s, const Source& logits, const Request& request, float* law, const Out& out) {
  const u32 top_k = same(top_k_of(request));
  if (same(top_p_of(request) < 1) || top_k == 0 || top_k > LISTED) return false;
  Row row;
  logits.load(row.logit);
  const float zeros[ITEMS] = {};
  if (law) store_row(law, zeros);
  if (!same(find_range(s, row, temperature_of(request)))) return false;
  const u32 listed = list_above_bar(s.search, row, top_k);
  if (listed == 0) return false;
  if (same(warp_id()) != 0) return true;
  if (threadIdx.x == 0) pick_reset(s.pick);
  __syncwarp();
  const Kept kept = keep_listed(s.search, row, listed, top_k);
  out.weighed(kept);
  if (law) kept.store(law);
  return true;
}

// All threads: the law of a row of which top-k, counted already where it does, leaves many, and its pick, which the first warp
// gets.
template <class Source>
__device__ SELDOM u32 select_many(Shared& s, Row row, u32 alive, const Source logits, const Request request, u32 depth, u32 use, float* law) {
  u32 digit[ITEMS];
  const int top_k = top_k_of(request);
  const double top_p = top_p_of(request);
  if (top_k > 0 && top_k < V) {
    const auto limit_of = [&](u32) { return u32(top_k); };
#pragma unroll
    for (int i = 0; i < ITEMS; i++) digit[i] = row.first_digit(i);
    alive = keep_first(s.by_count, row, alive, true, digit, limit_of);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; i++) row.weight[i] = alive >> i & 1 ? expf(row.scaled(row.logit[i])) : 0;
  if (top_p < 1) {
    const auto limit_of = [&](u64 total) { return u64(ceil(top_p * double(total))); };
    alive = keep_first(s.by_mass, row, alive, false, digit, limit_of);
  }
  offer_and_store(s, row, alive, request, depth, use, law);
  return warp_id() == 0 ? pick_settle(s.pick, ExactScore<Source>{logits, row.largest, request, depth, use}) : 0;
}

// All threads of a block: the law of one row of logits, its pick, or both; `out` takes what there is.
// out.none(), one thread: it is no law. out.few(kept, exact_score), the first warp: it is one of few codes. out.many(code), the
// first warp: it is one of many, and this is the pick. `law` (or null) gets the law, that of few only where `law_of_few`. A
// barrier follows before anyone reads what was stored, or uses `s` again.
template <class Source, class Out>
__device__ __forceinline__ void select_row(Shared& s, const Source& logits, const Request& request, int depth, int deepest, int use, float* law,
                                           bool law_of_few, int* errors, int row_of_batch, const Out& out) {
  Row row;
  if constexpr (!Source::KNOWS_NOISE) logits.load(row.logit);  // on their way while memory is cleared
  s.by_count.clear();
  s.by_mass.clear();
  s.few.clear();
  if (threadIdx.x == 0) pick_reset(s.pick);
  if constexpr (Source::KNOWS_NOISE) logits.load(row.logit);  // those are waited for
  const bool is_law = find_range(s, row, temperature_of(request));
  if (depth > deepest) return;  // not earlier: the loads above would wait for this one
  if (!is_law) {
    const float one_hot[ITEMS] = {threadIdx.x == 0 ? 1.0f : 0.0f};
    if (law) store_row(law, one_hot);
    if (threadIdx.x == 0) {
      out.none();
      atomicMin(&errors[row_of_batch], depth);
    }
    return;
  }

  const ExactScore<Source> exact_score = {logits, row.largest, request, u32(depth), u32(use)};
  u32 alive = 0, digit[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) alive |= u32(row.logit[i] > MINUS_INFINITY) << i;
  const int top_k = top_k_of(request);
  if (top_k > 0 && top_k < V) {
    const auto limit_of = [&](u32) { return u32(top_k); };
    divide(s.by_count, row, alive, 0, digit, limit_of);
    if (s.by_count.through <= LISTED) {
      const u32 ranked = min(u32(top_k), s.by_count.through);
      const float zeros[ITEMS] = {};
      if (law && law_of_few) store_row(law, zeros);
      list_candidates(s.few, row, alive, digit, s.by_count.bin);
      rank_candidates(s.few, row, ranked, exact_score);
      if (warp_id() != 0) return;
      const Kept kept(s.few, ranked, top_p_of(request));
      out.few(kept, exact_score);
      if (law && law_of_few) kept.store(law);
      return;
    }
  }
  const u32 code = select_many(s, row, alive, logits, request, u32(depth), u32(use), law);
  if (warp_id() == 0) out.many(code);
}

// The first warp: the pick, for one entry of `codes`.
struct CodeOut {
  Pick& pick;
  int* codes;
  int entry;

  __device__ __forceinline__ void none() const { codes[entry] = 0; }
  template <class Exact>
  __device__ __forceinline__ void few(const Kept& kept, const Exact& exact_score) const { many(warp_pick(pick, kept.score, kept.code, exact_score)); }
  __device__ __forceinline__ void many(u32 picked) const {
    if (lane_id() == 0) codes[entry] = picked;
  }
};

KERNEL __launch_bounds__(THREADS, 1) select_sample(const float* __restrict__ logits, const Request* __restrict__ requests,
                                                const int* __restrict__ last, int* __restrict__ codes,
                                                float* __restrict__ laws, int* __restrict__ errors, int use,
                                                int deepest) {
  __shared__ Shared s;
  const int row = blockIdx.y, entry = row * gridDim.x + blockIdx.x;
  const Request request = requests[row];
  select_row(s, Logits{logits + u64(entry) * V}, request, last[row] + 1 + blockIdx.x, deepest, use,
             laws ? laws + u64(entry) * V : nullptr, true, errors, row, CodeOut{s.pick, codes, entry});
}

#undef ITEMS
#undef LISTED
