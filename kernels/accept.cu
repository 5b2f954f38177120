// accept: how many drafts of each row stay, the code that follows them, and the row's new state, in one launch.
//
// Layout   drafts [B, n] i32 and draft_laws [B, n, V] f32, as select_sample wrote them; picks [B, n + 1] i32 and
//          target_laws [B, n + 1, V] f32: select_sample's (use TARGET) of the verify pass; requests [B];
//          in and out: last [B] (depth of the last committed code), codes [B, G] i32 (committed ones),
//          out: states [B] (which row of the verify pass made the last committed code),
//          rounds [B] and history [B, G, 3] i32 (or both null): a round's first depth, proposed, accepted.
//          A row has min(n, G - 2 - last[b]) drafts; one whose frame is complete is left as it is.
// Launch   grid (B), block THREADS (as select_sample's, at most 1024). n may be 0: the picks are committed.
// Limits   n <= 31.
//
// coupled == 0: the walk of sampling.accept_by_rejection. Draft i stays where u < target / draft, so a code of target
// probability 0 never does. The first that goes is replaced by a draw from the positive part of target - draft, or,
// where rounding left none, from the target law; where all stay, the bonus is the pick of the last row.
// coupled == 1: drafts stay while they are the target's own picks, which are committed up to the first that differs.

//
// What replaces a rejected draft is prepared before it is known which draft that is: the codes of positive residual of
// the first AHEAD drafts are listed while one warp waits for the probabilities that decide, and that warp then picks
// from a list without barriers. A list that is empty or too long leaves the residual to all threads.

static_assert(THREADS % 32 == 0 && THREADS <= 1024, "THREADS");
constexpr int ITEMS = (V + THREADS - 1) / THREADS;
constexpr int STEPS = (V + 4 * THREADS - 1) / (4 * THREADS);
constexpr int AHEAD = 2, LISTED = 64;

struct Excess {
  u32 listed, code[LISTED];
  float mass[LISTED];
};

struct Shared {
  Pick pick;
  Excess of_draft[AHEAD + 1];  // the last one: of a draft behind those prepared
  u32 accepted;
};

// A thread's part of the two laws of one draft.
struct Laws {
  float4 target[STEPS], draft[STEPS];

  __device__ __forceinline__ void load(const float* targets, const float* drafts) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int start = 4 * (step * THREADS + threadIdx.x);
      target[step] = load_four(targets, start, 0), draft[step] = load_four(drafts, start, 0);
    }
  }
};

__device__ __forceinline__ void list_excess(Excess& s, const Laws& laws) {
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const float4 target = laws.target[step], draft = laws.draft[step];
    const float mass[4] = {target.x - draft.x, target.y - draft.y, target.z - draft.z, target.w - draft.w};
    u32 positive = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) positive |= u32(mass[i] > 0) << i;
    if (!positive) continue;
    u32 slot = atomicAdd(&s.listed, u32(__popc(positive)));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!(positive >> i & 1)) continue;
      if (slot < LISTED) s.code[slot] = 4 * (step * THREADS + threadIdx.x) + i, s.mass[slot] = mass[i];
      slot++;
    }
  }
}

// The score of a code in exact arithmetic.
struct ExactScore {
  const float *target, *draft;  // draft null: of the target law
  u64 seed;
  u32 frame, depth;

  __device__ __forceinline__ u32 word(u32 code) const {
    return word_of(philox(seed, frame, depth, USE_RESIDUAL, code / 4), code % 4);
  }
  __device__ __forceinline__ double operator()(u32 code) const {
    return log(double(target[code]) - (draft ? double(draft[code]) : 0.0)) + gumbel_exact(word(code));
  }
};

// One warp: a draw from a list.
__device__ __forceinline__ u32 pick_listed(Pick& pick, const Excess& s, const ExactScore& exact_score) {
  u32 code[2] = {};
  float score[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 slot = lane_id() + 32 * i;
    if (slot < s.listed) code[i] = s.code[slot], score[i] = logf(s.mass[slot]) + gumbel(exact_score.word(code[i]));
  }
  return warp_pick(pick, score, code, exact_score);
}

// All threads: a draw from the residual law of any size; the first warp gets it.
__device__ __forceinline__ u32 pick_residual(Pick& s, ExactScore exact_score, bool residual) {
  if (!residual) exact_score.draft = nullptr;
  float score[ITEMS];
  u32 best = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const u32 code = i * THREADS + threadIdx.x;
    const float mass = code < V ? exact_score.target[code] - (residual ? exact_score.draft[code] : 0) : 0;
    score[i] = MINUS_INFINITY;
    if (mass > 0) {
      score[i] = logf(mass) + gumbel(exact_score.word(code));
      best = max(best, order_key(score[i]));
    }
  }
  pick_offer(s, best);
  __syncthreads();
  const float bar = pick_bar(s);
#pragma unroll
  for (int i = 0; i < ITEMS; i++)
    if (score[i] >= bar) pick_contend(s, i * THREADS + threadIdx.x);
  __syncthreads();
  return warp_id() == 0 ? pick_settle(s, exact_score) : 0;
}

// All threads: a draw from what the target law has beyond the draft law, which has been listed; the first warp gets it.
__device__ __forceinline__ u32 draw_excess(Pick& pick, const Excess& excess, const ExactScore& exact_score) {
  if (excess.listed == 0 || excess.listed > LISTED) return pick_residual(pick, exact_score, excess.listed != 0);
  return warp_id() == 0 ? pick_listed(pick, excess, exact_score) : 0;
}

// All threads of a block: one row of the batch. One warp writes; a barrier follows before anyone reads that, or uses `s`
// again.
__device__ __forceinline__ void accept_row(Shared& s, int row, const int* drafts, const float* draft_laws,
                                           const int* picks, const float* target_laws, const Request* requests,
                                           int* last, int* codes, int* states, int* rounds, int* history, int n,
                                           int coupled) {
  const int lane = lane_id();
  drafts += row * n, draft_laws += u64(row) * n * V, picks += row * (n + 1), target_laws += u64(row) * (n + 1) * V;

  // Whatever has a known address is loaded first, all at once.
  Laws laws[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < n && !coupled) laws[i].load(target_laws + i * V, draft_laws + i * V);
  const int first_depth = last[row] + 1;
  const Request request = requests[row];
  const int draft = lane < n ? drafts[lane] : 0, pick = lane <= n ? picks[lane] : 0;
  const int round = rounds ? rounds[row] : 0;
  if (threadIdx.x <= AHEAD) s.of_draft[threadIdx.x].listed = 0;
  if (threadIdx.x == 0) pick_reset(s.pick);
  if (first_depth >= G) return;
  const int proposed = min(n, G - 1 - first_depth);
  const bool mine = lane < proposed && warp_id() == 0 && !coupled;
  const double target_of_draft = mine ? target_laws[lane * V + draft] : 0, draft_of_draft = mine ? draft_laws[lane * V + draft] : 1;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    if (i < n && !coupled) list_excess(s.of_draft[i], laws[i]);
  if (warp_id() == 0) {  // the number of drafts before the first that does not stay
    const u32 word = philox(request.seed, request.frame, first_depth + lane, USE_ACCEPT, 0).x;
    const bool stays = coupled ? draft == pick : uniform(word) < target_of_draft / draft_of_draft;
    const int count = __ffs(~__ballot_sync(ALL_LANES, lane < proposed && stays)) - 1;
    if (lane == 0) s.accepted = count;
  }
  __syncthreads();

  const int accepted = s.accepted;
  u32 next = __shfl_sync(ALL_LANES, pick, accepted);
  if (!coupled && accepted < proposed) {
    Excess& excess = s.of_draft[min(accepted, AHEAD)];
    const ExactScore exact_score = {target_laws + accepted * V, draft_laws + accepted * V, request.seed, request.frame, u32(first_depth + accepted)};
    if (accepted >= AHEAD) {
      laws[0].load(exact_score.target, exact_score.draft);
      list_excess(excess, laws[0]);
      __syncthreads();
    }
    next = draw_excess(s.pick, excess, exact_score);
  }
  if (warp_id() != 0) return;

  int* committed = codes + row * G + first_depth;
  if (lane <= accepted) committed[lane] = lane < accepted ? draft : int(next);
  if (lane != 0) return;
  last[row] = first_depth + accepted;
  states[row] = accepted;
  if (!rounds) return;
  rounds[row] = round + 1;
  int* entry = history + (row * G + round) * 3;
  entry[0] = first_depth, entry[1] = proposed, entry[2] = accepted;
}

KERNEL __launch_bounds__(THREADS) accept(const int* __restrict__ drafts, const float* __restrict__ draft_laws,
                                         const int* __restrict__ picks, const float* __restrict__ target_laws,
                                         const Request* __restrict__ requests, int* __restrict__ last,
                                         int* __restrict__ codes, int* __restrict__ states, int* __restrict__ rounds,
                                         int* __restrict__ history, int n, int coupled) {
  __shared__ Shared s;
  accept_row(s, blockIdx.x, drafts, draft_laws, picks, target_laws, requests, last, codes, states, rounds, history, n,
             coupled);
}
