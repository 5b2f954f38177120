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

static_assert(THREADS % 32 == 0 && THREADS <= 1024, "THREADS");
constexpr int ITEMS = (V + THREADS - 1) / THREADS;

struct Shared {
  Pick pick;
  u32 accepted;
};

// One warp: the number of drafts before the first that does not stay.
__device__ __forceinline__ int count_accepted(const int* drafts, const float* draft_laws, const int* picks,
                                              const float* target_laws, const Request& request, int first_depth,
                                              int proposed, bool coupled) {
  bool stays = false;
  if (lane_id() < proposed) {
    const int code = drafts[lane_id()];
    if (coupled) {
      stays = code == picks[lane_id()];
    } else {
      const double target = target_laws[lane_id() * V + code], draft = draft_laws[lane_id() * V + code];
      const u32 word = philox(request.seed, request.frame, first_depth + lane_id(), USE_ACCEPT, 0).x;
      stays = uniform(word) < target / draft;
    }
  }
  return __ffs(~__ballot_sync(ALL_LANES, stays)) - 1;
}

// All threads: a draw from the residual law of one depth; the first warp gets it.
__device__ __forceinline__ u32 pick_residual(Pick& s, const float* target, const float* draft, const Request& request,
                                             int depth) {
  float mass[ITEMS], law[ITEMS], score[ITEMS];
  bool any = false;
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int code = i * THREADS + threadIdx.x;
    law[i] = code < V ? target[code] : 0;
    mass[i] = code < V ? fmaxf(law[i] - draft[code], 0) : 0;
    any |= mass[i] > 0;
  }
  const bool residual = __syncthreads_or(any);
  u32 best = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    if (!residual) mass[i] = law[i];
    const u32 code = i * THREADS + threadIdx.x;
    score[i] = MINUS_INFINITY;
    if (mass[i] > 0) {
      const uint4 words = philox(request.seed, request.frame, depth, USE_RESIDUAL, code >> 2);
      score[i] = logf(mass[i]) + gumbel(word_of(words, code & 3));
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
  if (warp_id() != 0) return 0;
  return pick_settle(s, [&](u32 code) {
    const u32 word = word_of(philox(request.seed, request.frame, depth, USE_RESIDUAL, code / 4), code % 4);
    const double taken = residual ? draft[code] : 0;
    return log(double(target[code]) - taken) + gumbel_exact(word);
  });
}

KERNEL __launch_bounds__(THREADS) accept(const int* __restrict__ drafts, const float* __restrict__ draft_laws,
                                         const int* __restrict__ picks, const float* __restrict__ target_laws,
                                         const Request* __restrict__ requests, int* __restrict__ last,
                                         int* __restrict__ codes, int* __restrict__ states, int* __restrict__ rounds,
                                         int* __restrict__ history, int n, int coupled) {
  __shared__ Shared s;
  const int row = blockIdx.x, first_depth = last[row] + 1;
  if (first_depth >= G) return;
  const int proposed = min(n, G - 1 - first_depth);
  const Request request = requests[row];
  drafts += row * n, draft_laws += u64(row) * n * V, picks += row * (n + 1), target_laws += u64(row) * (n + 1) * V;

  if (warp_id() == 0) {
    const int count = count_accepted(drafts, draft_laws, picks, target_laws, request, first_depth, proposed, coupled);
    if (lane_id() == 0) {
      s.accepted = count;
      pick_reset(s.pick);
    }
  }
  __syncthreads();
  const int accepted = s.accepted;
  u32 next = picks[accepted];
  if (!coupled && accepted < proposed)
    next = pick_residual(s.pick, target_laws + accepted * V, draft_laws + accepted * V, request, first_depth + accepted);

  int* committed = codes + row * G + first_depth;
  if (int(threadIdx.x) < accepted) committed[threadIdx.x] = drafts[threadIdx.x];
  if (threadIdx.x != 0) return;
  committed[accepted] = next;
  last[row] = first_depth + accepted;
  states[row] = accepted;
  if (!rounds) return;
  int* entry = history + (row * G + rounds[row]++) * 3;
  entry[0] = first_depth, entry[1] = proposed, entry[2] = accepted;
}
