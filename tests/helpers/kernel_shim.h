// What CUDA provides to kernels/*.cu, emulated on a CPU: g++ compiles a kernel source with this text in front of it.
//
// Every thread of a block is a fiber; blocks run one after the other. A barrier or a warp primitive suspends a fiber
// until all who take part have arrived; a block in which nobody can go on is reported, and so is a warp whose lanes
// meet in different primitives. `order` permutes in which order warps and lanes run, which brings out missing barriers.
// Shared memory is filled with garbage before each block.

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
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
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shim_shared")))

extern "C" char __start_shim_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_shim_shared[] __attribute__((weak, visibility("hidden")));

namespace shim {

struct Index { unsigned x = 0, y = 0, z = 0; };

enum State { READY, AT_BLOCK, AT_WARP, EXITED };

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  State state;
};

struct Warp {
  uint64_t slot[2][32];
  unsigned arrived, generation;
  const char* primitive;
};

constexpr size_t STACK = 128 * 1024;
inline Index thread, block, block_size, grid_size;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline char* stacks;
inline size_t stack_count;
inline jmp_buf scheduler;
inline unsigned current, at_block, exited;
inline int any, any_result;
inline const char* fault;
inline void (*body)(void*);
inline void* body_arguments;

// Back to the scheduler; returns when the fiber is resumed.
__attribute__((noinline)) inline void suspend(State state) {
  fibers[current].state = state;
  if (!_setjmp(fibers[current].context)) _longjmp(scheduler, 1);
}

inline void release_block() {
  if (at_block == 0 || at_block + exited != fibers.size()) return;
  at_block = 0;
  any_result = any, any = 0;
  for (Fiber& fiber : fibers)
    if (fiber.state == AT_BLOCK) fiber.state = READY;
}

inline void block_barrier() {
  at_block++;
  fibers[current].state = AT_BLOCK;
  release_block();
  if (fibers[current].state == AT_BLOCK) suspend(AT_BLOCK);
}

// All 32 lanes meet; returns what each brought. Two generations alternate, so a lane may run one ahead.
inline const uint64_t* warp_meet(unsigned mask, const char* primitive, uint64_t value) {
  const unsigned index = current / 32, lane = current % 32;
  Warp& warp = warps[index];
  if (mask != 0xFFFFFFFFu) fault = "a warp primitive with a partial mask";
  if (warp.arrived && std::strcmp(warp.primitive, primitive)) fault = "lanes of a warp meet in different primitives";
  warp.primitive = primitive;
  const unsigned generation = warp.generation;
  warp.slot[generation & 1][lane] = value;
  if (++warp.arrived < 32) {
    suspend(AT_WARP);
  } else {
    warp.arrived = 0;
    warp.generation++;
    for (unsigned i = index * 32; i < index * 32 + 32; i++)
      if (fibers[i].state == AT_WARP) fibers[i].state = READY;
  }
  return warps[index].slot[generation & 1];
}

inline void fiber_main() {
  body(body_arguments);
  exited++;
  fibers[current].state = EXITED;
  release_block();
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume(unsigned index, bool fresh) {
  current = index;
  thread.x = index;
  if (_setjmp(scheduler)) return;
  if (fresh) setcontext(&fibers[index].start);
  _longjmp(fibers[index].context, 1);
}

inline void poison_shared() {
  if (__start_shim_shared) std::memset(__start_shim_shared, 0xA5, __stop_shim_shared - __start_shim_shared);
}

inline void start_block(unsigned threads) {
  if (stack_count < threads) {
    stacks = static_cast<char*>(mmap(nullptr, STACK * threads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    stack_count = threads;
  }
  fibers.resize(threads);
  warps.assign((threads + 31) / 32, Warp{});
  at_block = exited = any = 0;
  poison_shared();
  for (unsigned i = 0; i < threads; i++) {
    getcontext(&fibers[i].start);
    fibers[i].start.uc_stack.ss_sp = stacks + STACK * i;
    fibers[i].start.uc_stack.ss_size = STACK;
    fibers[i].start.uc_link = nullptr;
    makecontext(&fibers[i].start, reinterpret_cast<void (*)()>(fiber_main), 0);
    fibers[i].state = READY;
  }
}

// A permutation of 0 .. 2^n - 1 for each order: forward, backward, or an odd stride.
inline unsigned permuted(unsigned i, unsigned count, unsigned order) {
  return order == 0 ? i : order == 1 ? count - 1 - i : (i * (2 * order + 1) + order) % count;
}

inline void run_block(unsigned threads, unsigned order) {
  start_block(threads);
  std::vector<bool> started(threads);
  for (bool progress = true; progress && !fault;) {
    progress = false;
    for (unsigned w = 0; w < warps.size(); w++) {
      const unsigned warp = permuted(w, warps.size(), order), lanes = threads < 32 ? threads : 32;
      for (bool again = true; again;) {  // one warp as far as it gets
        again = false;
        for (unsigned l = 0; l < lanes; l++) {
          const unsigned index = warp * 32 + permuted(l, lanes, order);
          if (fibers[index].state != READY) continue;
          const bool fresh = !started[index];
          started[index] = true;
          resume(index, fresh);
          again = progress = true;
        }
      }
    }
  }
  if (!fault && exited != threads) fault = "threads wait for ever: a barrier or a warp primitive that not all reach";
}

template <class... A, size_t... I>
void call_with(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

template <class... A>
const char* launch(void (*kernel)(A...), const unsigned* grid, unsigned threads, void** arguments, unsigned order) {
  struct Bound { void (*kernel)(A...); void** arguments; } bound{kernel, arguments};
  body = [](void* raw) {
    const Bound* b = static_cast<Bound*>(raw);
    call_with(b->kernel, b->arguments, std::index_sequence_for<A...>{});
  };
  body_arguments = &bound;
  fault = nullptr;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {threads, 1, 1};
  for (block.z = 0; block.z < grid[2]; block.z++)
    for (block.y = 0; block.y < grid[1]; block.y++)
      for (block.x = 0; block.x < grid[0]; block.x++) {
        run_block(threads, order);
        if (fault) return fault;
      }
  return nullptr;
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

struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads() { shim::block_barrier(); }
inline int __syncthreads_or(int predicate) {
  shim::any |= predicate != 0;
  shim::block_barrier();
  return shim::any_result;
}
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
