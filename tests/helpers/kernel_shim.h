// What CUDA provides to kernels/*.cu, emulated on a CPU: g++ compiles a kernel source with this text in front of it.
//
// Every thread of a block is a fiber; blocks run one after the other. A barrier or a warp primitive suspends a fiber
// until all who take part have arrived; a block in which nobody can go on is reported, and so is a warp whose lanes
// meet in different primitives. `order` permutes in which order warps and lanes run, which brings out missing barriers;
// from LATE on it names a block of a cooperative launch that is held back.
// Shared memory is filled with garbage before each block.

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

#define HOST_SHIM 1
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 800
#endif
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shim_shared")))

extern "C" char __start_shim_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_shim_shared[] __attribute__((weak, visibility("hidden")));

namespace shim {

struct Index { unsigned x = 0, y = 0, z = 0; };

enum State { READY, AT_BLOCK, AT_PART, AT_WARP, SPINNING, EXITED };

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  State state;
  bool started;
  unsigned barrier;
};

struct Warp {
  uint64_t slot[2][32];
  unsigned arrived, generation;
  const char* primitive;
};

// The factors of a product of matrices, as all lanes see them; of two, as for a warp's slots.
struct Tile {
  float rows[16][16], columns[8][16];
};
struct Tiles {
  Tile of[2];
};

constexpr size_t STACK = 128 * 1024;

// A copy that has been ordered and has not arrived.
struct Pending {
  char* to;
  const char* from;
  size_t bytes;
  uint64_t* arrival;
};

// A block: its threads, and who waits for what.
struct Group {
  std::vector<Pending> pending;
  unsigned looks = 0;
  Index index;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Tiles* tiles[32] = {};  // of the warps that have multiplied; kept as the stacks are
  std::vector<char> shared;  // dynamic
  char* stacks = nullptr;
  size_t stack_count = 0;
  unsigned at_block = 0, at_part[16] = {}, exited = 0;
  int any = 0, any_result = 0;
};

inline Index thread, block, block_size, grid_size;
inline std::vector<Group> groups;
inline Group* group;
inline jmp_buf scheduler;
inline unsigned current;
inline const char* fault;
inline void (*body)(void*);
inline void* body_arguments;

// Back to the scheduler; returns when the fiber is resumed.
__attribute__((noinline)) inline void suspend(State state) {
  group->fibers[current].state = state;
  if (!_setjmp(group->fibers[current].context)) _longjmp(scheduler, 1);
}

// Copies arrive in their order, each after others have looked for it a few times; what was there before is gone at once.
inline void copy_later(char* to, const char* from, size_t bytes, uint64_t* arrival) {
  std::memset(to, 0xA5, bytes);
  group->pending.push_back({to, from, bytes, arrival});
}
inline void let_arrive() {
  if (group->pending.empty() || ++group->looks % 5) return;
  const Pending next = group->pending.front();
  group->pending.erase(group->pending.begin());
  std::memcpy(next.to, next.from, next.bytes);
  ++*next.arrival;
}

// Lets others run: for a loop that waits for another block, or for a copy.
inline void spin() {
  let_arrive();
  suspend(SPINNING);
}

// The clock: how often it has been read.
inline uint64_t time() {
  static uint64_t read = 0;
  return ++read;
}

inline char* dynamic_shared() {
  const size_t start = reinterpret_cast<size_t>(group->shared.data());
  return group->shared.data() + (-start & 127);
}

inline void release_block() {
  if (group->at_block == 0 || group->at_block + group->exited != group->fibers.size()) return;
  group->at_block = 0;
  group->any_result = group->any, group->any = 0;
  for (Fiber& fiber : group->fibers)
    if (fiber.state == AT_BLOCK) fiber.state = READY;
}

inline void block_barrier() {
  group->at_block++;
  group->fibers[current].state = AT_BLOCK;
  release_block();
  if (group->fibers[current].state == AT_BLOCK) suspend(AT_BLOCK);
}

// A barrier of some of the block's threads: who arrives, and who waits for that.
inline void arrive_at(unsigned threads, unsigned barrier) {
  if (++group->at_part[barrier] < threads) return;
  group->at_part[barrier] = 0;
  for (Fiber& fiber : group->fibers)
    if (fiber.state == AT_PART && fiber.barrier == barrier) fiber.state = READY;
}
inline void barrier_of(unsigned threads, unsigned barrier) {
  Fiber& self = group->fibers[current];
  self.state = AT_PART, self.barrier = barrier;
  arrive_at(threads, barrier);
  if (self.state == AT_PART) suspend(AT_PART);
}

// All 32 lanes meet; returns what each brought. Two generations alternate, so a lane may run one ahead.
inline const uint64_t* warp_meet(unsigned mask, const char* primitive, uint64_t value) {
  const unsigned index = current / 32, lane = current % 32;
  Warp& warp = group->warps[index];
  if (mask != 0xFFFFFFFFu) fault = "a warp primitive with a partial mask";
  if (warp.arrived && warp.primitive != primitive && std::strcmp(warp.primitive, primitive)) fault = "lanes of a warp meet in different primitives";
  warp.primitive = primitive;
  const unsigned generation = warp.generation;
  warp.slot[generation & 1][lane] = value;
  if (++warp.arrived < 32) {
    suspend(AT_WARP);
  } else {
    warp.arrived = 0;
    warp.generation++;
    for (unsigned i = index * 32; i < index * 32 + 32; i++)
      if (group->fibers[i].state == AT_WARP) group->fibers[i].state = READY;
  }
  return group->warps[index].slot[generation & 1];
}

inline void fiber_main() {
  body(body_arguments);
  group->exited++;
  group->fibers[current].state = EXITED;
  release_block();
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume(unsigned index, bool fresh) {
  current = index;
  thread.x = index;
  if (_setjmp(scheduler)) return;
  if (fresh) setcontext(&group->fibers[index].start);
  _longjmp(group->fibers[index].context, 1);
}

inline void poison_shared() {
  if (__start_shim_shared) std::memset(__start_shim_shared, 0xA5, __stop_shim_shared - __start_shim_shared);
}

inline void start_block(Group& one, Index index, unsigned threads, unsigned shared_bytes) {
  if (one.stack_count < threads) {
    one.stacks = static_cast<char*>(mmap(nullptr, STACK * threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    one.stack_count = threads;
  }
  one.index = index;
  one.pending.clear();
  one.fibers.resize(threads);
  one.warps.assign((threads + 31) / 32, Warp{});
  one.shared.assign(shared_bytes + 128, char(0xA5));
  one.at_block = one.exited = one.any = 0;
  for (unsigned& count : one.at_part) count = 0;
  poison_shared();
  for (unsigned i = 0; i < threads; i++) {
    getcontext(&one.fibers[i].start);
    one.fibers[i].start.uc_stack.ss_sp = one.stacks + STACK * i;
    one.fibers[i].start.uc_stack.ss_size = STACK;
    one.fibers[i].start.uc_link = nullptr;
    makecontext(&one.fibers[i].start, reinterpret_cast<void (*)()>(fiber_main), 0);
    one.fibers[i].state = READY, one.fibers[i].started = false;
  }
}

// A permutation of 0 .. count - 1 for each order: forward, backward, or an odd stride that has no factor in common with it.
inline unsigned permuted(unsigned i, unsigned count, unsigned order) {
  const unsigned stride = 2 * order + 1;
  return order == 0 ? i : order == 1 ? count - 1 - i : (i * (std::gcd(count, stride) == 1 ? stride : 1) + order) % count;
}

// Runs a block as far as it gets; true where anyone got further.
inline bool advance(Group& one, unsigned order) {
  group = &one;
  block = one.index;
  const unsigned threads = one.fibers.size();
  bool any_progress = false;
  for (Fiber& fiber : one.fibers)
    if (fiber.state == SPINNING) fiber.state = READY;
  for (bool progress = true; progress && !fault;) {
    progress = false;
    for (unsigned w = 0; w < one.warps.size(); w++) {
      const unsigned warp = permuted(w, one.warps.size(), order), lanes = threads < 32 ? threads : 32;
      for (bool again = true; again;) {  // one warp as far as it gets
        again = false;
        for (unsigned l = 0; l < lanes; l++) {
          const unsigned index = warp * 32 + permuted(l, lanes, order);
          Fiber& fiber = one.fibers[index];
          if (fiber.state != READY) continue;
          const bool fresh = !fiber.started;
          fiber.started = true;
          resume(index, fresh);
          if (fiber.state != SPINNING) again = progress = any_progress = true;
        }
      }
    }
  }
  return any_progress;
}

inline void check_exited(const Group& one) {
  if (!fault && !one.pending.empty()) fault = "a copy has not been waited for";
  if (!fault && one.exited != one.fibers.size()) fault = "threads wait for ever: a barrier or a warp primitive that not all reach";
}

template <class... A, size_t... I>
void call_with(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

constexpr unsigned LATE = 1000;

template <class... A>
const char* launch(void (*kernel)(A...), const unsigned* grid, unsigned threads, void** arguments, unsigned order, unsigned shared_bytes, bool cooperative) {
  struct Bound { void (*kernel)(A...); void** arguments; } bound{kernel, arguments};
  body = [](void* raw) {
    const Bound* b = static_cast<Bound*>(raw);
    call_with(b->kernel, b->arguments, std::index_sequence_for<A...>{});
  };
  body_arguments = &bound;
  fault = nullptr;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {threads, 1, 1};
  const unsigned blocks = grid[0] * grid[1] * grid[2];
  groups.resize(cooperative ? blocks : 1);
  for (unsigned i = 0; i < blocks && !fault; i++) {
    Group& one = groups[cooperative ? i : 0];
    start_block(one, {i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]}, threads, shared_bytes);
    if (cooperative) continue;
    advance(one, order);
    check_exited(one);
  }
  if (cooperative) {  // static shared memory would be the same for all blocks: such kernels have none
    // A block that is late has one turn where others have 64: an order of LATE and above names it.
    const unsigned late = order >= LATE ? order - LATE : blocks;
    if (order >= LATE) order = 0;
    // Whoever looks again may find what it waits for; after so many rounds of looking, or in all, there is nothing to come.
    unsigned rounds = 0;
    for (int idle = 0; idle < 1000 && rounds < 200000 && !fault; idle++, rounds++) {
      unsigned done = 0;
      for (unsigned i = 0; i < blocks; i++) {
        const unsigned turn = permuted(i, blocks, order);
        if ((turn != late || rounds % 64 == 0) && advance(groups[turn], order)) idle = 0;
      }
      for (const Group& one : groups) done += one.exited == one.fibers.size();
      if (done == blocks) break;
    }
    for (const Group& one : groups) check_exited(one);
  }
  return fault;
}

template <class T>
uint64_t to_slot(T value) {
  uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof value);
  return raw;
}
template <class T>
T from_slot(uint64_t raw) {
  T value;
  std::memcpy(&value, &raw, sizeof value);
  return value;
}

}  // namespace shim

#define threadIdx shim::thread
#define blockIdx shim::block
#define blockDim shim::block_size
#define gridDim shim::grid_size

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads() { shim::block_barrier(); }
inline int __syncthreads_or(int predicate) {
  shim::group->any |= predicate != 0;
  shim::block_barrier();
  return shim::group->any_result;
}
inline void __threadfence_block() {}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { shim::warp_meet(mask, "syncwarp", 0); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t* slots = shim::warp_meet(mask, "ballot", predicate != 0);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= unsigned(slots[i]) << i;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xFFFFFFFFu; }

template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  return shim::from_slot<T>(shim::warp_meet(mask, "shfl", shim::to_slot(value))[from & 31]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, int(threadIdx.x & 31) ^ step);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned step) {
  const int lane = threadIdx.x & 31;
  return __shfl_sync(mask, value, lane >= int(step) ? lane - int(step) : lane);
}
template <class Combine>
unsigned shim_reduce(unsigned mask, unsigned value, Combine combine) {
  const uint64_t* slots = shim::warp_meet(mask, "reduce", value);
  unsigned result = slots[0];
  for (int i = 1; i < 32; i++) result = combine(result, unsigned(slots[i]));
  return result;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return shim_reduce(mask, value, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  return shim_reduce(mask, value, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return shim_reduce(mask, value, [](unsigned a, unsigned b) { return a + b; });
}

template <class T>
T atomicAdd(T* at, T value) { const T old = *at; *at += value; return old; }
template <class T>
T atomicMin(T* at, T value) { const T old = *at; if (value < old) *at = value; return old; }

template <class T>
T __ldg(const T* from) { return *from; }
inline unsigned __float_as_uint(float value) { return shim::from_slot<unsigned>(shim::to_slot(value)); }
inline float __uint_as_float(unsigned bits) { return shim::from_slot<float>(bits); }
inline long long __double_as_longlong(double value) { return shim::from_slot<long long>(shim::to_slot(value)); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
template <class T>
T max(T a, T b) { return a > b ? a : b; }
template <class T>
T min(T a, T b) { return a < b ? a : b; }
using std::fmaxf;
using std::fminf;

inline float shim_half_to_float(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return float(h); }
inline unsigned short shim_float_to_half(float value) { const _Float16 h = _Float16(value); unsigned short bits; std::memcpy(&bits, &h, 2); return bits; }

// A handle stands for the address of the value.
extern "C" void cudaGraphSetConditional(unsigned long long handle, unsigned value) { *reinterpret_cast<unsigned*>(handle) = value; }

// D += A x B of one warp: A [16, 16] and B [16, 8] of 16-bit values, D [16, 8] of floats, spread over the lanes as the
// tensor cores want them (PTX ISA, "Matrix fragments for mma.m16n8k16"). T says how 16 bits become a float.
template <class T>
void shim_tensor_product(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const unsigned index = shim::current / 32;
  const int first = (threadIdx.x & 31) / 4, pair = (threadIdx.x & 31) % 4 * 2;
  shim::Tiles*& tiles = shim::group->tiles[index];
  if (!tiles) tiles = new shim::Tiles;
  shim::Tile& tile = tiles->of[shim::group->warps[index].generation & 1];
  const auto put = [&](float* to, unsigned word) {
    to[0] = to_float(T{static_cast<unsigned short>(word)});
    to[1] = to_float(T{static_cast<unsigned short>(word >> 16)});
  };
  // a0: rows 0-7, k 0-7; a1: rows 8-15, k 0-7; a2, a3: the same of k 8-15. b0: k 0-7; b1: k 8-15.
  put(&tile.rows[first][pair], a0), put(&tile.rows[first + 8][pair], a1);
  put(&tile.rows[first][pair + 8], a2), put(&tile.rows[first + 8][pair + 8], a3);
  put(&tile.columns[first][pair], b0), put(&tile.columns[first][pair + 8], b1);
  shim::warp_meet(0xFFFFFFFFu, "mma", 0);
  const float *upper = tile.rows[first], *lower = tile.rows[first + 8], *left = tile.columns[pair], *right = tile.columns[pair + 1];
  float sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
  for (int k = 0; k < 16; k++) {
    sum0 += upper[k] * left[k], sum1 += upper[k] * right[k];
    sum2 += lower[k] * left[k], sum3 += lower[k] * right[k];
  }
  sums[0] += sum0, sums[1] += sum1, sums[2] += sum2, sums[3] += sum3;
}
