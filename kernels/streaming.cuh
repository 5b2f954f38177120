// What the fused kernel takes from the hardware: copies that run on, tensor cores, barriers of the grid.
//
// Stands behind common.cuh, in front of fused_frame.cu. As there, #if stands only around one-line wrappers of intrinsics.

// For hunting hangs: a wait of this many polls stops the kernel with an error.
#ifdef WATCHDOG
__device__ __forceinline__ void polled(u32& polls) { if (++polls > WATCHDOG) asm volatile("trap;"); }
#else
__device__ __forceinline__ void polled(u32&) {}
#endif

#ifdef HOST_SHIM
#define DYNAMIC_SHARED(name) char* name = shim::dynamic_shared()
#define BULK_COPIES 1
__device__ __forceinline__ void arrival_init(u64* arrival, u32) { *arrival = 0; }
__device__ __forceinline__ void arrivals_ready() {}
template <class T>
__device__ __forceinline__ T load_changing(const T* from) { shim::spin(); return *from; }
__device__ __forceinline__ void rest() {}
__device__ __forceinline__ void sync_block() { shim::block_barrier(); }
__device__ __forceinline__ void named_sync(int barrier, int threads) { shim::barrier_of(threads, barrier); }
__device__ __forceinline__ void named_arrive(int barrier, int threads) { shim::arrive_at(threads, barrier); }
typedef char* SharedPlace;
template <class T>
__device__ __forceinline__ SharedPlace shared_place(T* of) { return reinterpret_cast<char*>(of); }
__device__ __forceinline__ uint4 load_changing_four(SharedPlace from) { shim::spin(); return *reinterpret_cast<const uint4*>(from); }
__device__ __forceinline__ void copy_bulk(SharedPlace to, const char* from, u32 bytes, SharedPlace arrival) { shim::copy_later(to, from, bytes, reinterpret_cast<uint64_t*>(arrival)); }
__device__ __forceinline__ bool arrived_by(u64* arrival, u32 parity) { if ((*arrival & 1) == parity) shim::spin(); return (*arrival & 1) != parity; }
__device__ __forceinline__ bool arrived_at(SharedPlace arrival, u32 parity) { return arrived_by(reinterpret_cast<u64*>(arrival), parity); }
__device__ __forceinline__ void copy_lanes(SharedPlace, const char*, u32, SharedPlace) {}
__device__ __forceinline__ void arrive(u32* counter) { ++*counter; }
__device__ __forceinline__ u32 arrived(const u32* counter) { shim::spin(); return *counter; }
__device__ __forceinline__ float load_fresh(const float* from) { return *from; }
__device__ __forceinline__ int load_fresh(const int* from) { return *from; }
__device__ __forceinline__ float4 load_fresh_four(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ uint2 load_acquired(const uint2* from) { shim::spin(); return *from; }
__device__ __forceinline__ void store_released(uint2* to, uint2 value) { *to = value; }
__device__ __forceinline__ uint4 load_whole(const uint4* from) { return *from; }
__device__ __forceinline__ uint2 load_whole(const uint2* from) { return *from; }
__device__ __forceinline__ void store_whole(uint4* to, uint4 value) { *to = value; }
__device__ __forceinline__ void store_whole(uint2* to, uint2 value) { *to = value; }
__device__ __forceinline__ void poll_again(u32&) { shim::spin(); }
__device__ __forceinline__ void opaque(int&) {}
__device__ __forceinline__ void fetch_line(const void*) {}
__device__ __forceinline__ void store_first_time(u64* to) { *to = min(*to, u64(shim::time())); }
template <class T>
__device__ __forceinline__ u32 two_halves(T, float low, float high) { T a, b; store(&a, low), store(&b, high); return a.bits | u32(b.bits) << 16; }
__device__ __forceinline__ float rsqrtf(float value) { return 1 / std::sqrt(value); }
__device__ __forceinline__ u32 warp_or(u32 value) { return shim_reduce(ALL_LANES, value, [](unsigned a, unsigned b) { return a | b; }); }
template <class T>
__device__ __forceinline__ void tensor_product(T, float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { shim_tensor_product<T>(sums, a0, a1, a2, a3, b0, b1); }
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]
#define BULK_COPIES (__CUDA_ARCH__ >= 900)
// The copy engine: one thread orders any number of bytes, whose arrival flips the parity of a barrier.
__device__ __forceinline__ u32 shared_address(const void* of) { return u32(__cvta_generic_to_shared(of)); }
typedef u32 SharedPlace;
__device__ __forceinline__ SharedPlace shared_place(const void* of) { u32 place = shared_address(of); asm volatile("" : "+r"(place)); return place; }
__device__ __forceinline__ uint4 load_changing_four(SharedPlace from) { uint4 v; asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from)); return v; }
__device__ __forceinline__ void arrival_init(u64* arrival, u32 arrivals) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(arrival)), "r"(arrivals) : "memory"); }
template <class T>
__device__ __forceinline__ T load_changing(const T* from) { return *static_cast<const volatile T*>(from); }
// A while without instructions, which the other warps may have.
__device__ __forceinline__ void rest() { __nanosleep(64); }
__device__ __forceinline__ void sync_block() { asm volatile("bar.sync 0;" ::: "memory"); }
__device__ __forceinline__ void named_sync(int barrier, int threads) { __syncwarp(); asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_arrive(int barrier, int threads) { __syncwarp(); asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
#if BULK_COPIES
__device__ __forceinline__ void arrivals_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void copy_bulk(SharedPlace to, const char* from, u32 bytes, SharedPlace arrival) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%3], %2; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(arrival) : "memory"); }
__device__ __forceinline__ bool arrived_at(SharedPlace arrival, u32 parity) { u32 done; asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(arrival), "r"(parity) : "memory"); return done; }
__device__ __forceinline__ bool arrived_by(u64* arrival, u32 parity) { return arrived_at(shared_address(arrival), parity); }
__device__ __forceinline__ void copy_lanes(SharedPlace, const char*, u32, SharedPlace) {}
#else
__device__ __forceinline__ void arrivals_ready() {}
__device__ __forceinline__ void copy_bulk(SharedPlace, const char*, u32, SharedPlace) {}
__device__ __forceinline__ bool arrived_at(SharedPlace arrival, u32 parity) { u32 done; asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(arrival), "r"(parity) : "memory"); return done; }
__device__ __forceinline__ bool arrived_by(u64* arrival, u32 parity) { return arrived_at(shared_address(arrival), parity); }
// Before compute capability 9.0: a warp copies, around L1 into shared memory, 16 bytes a lane.
__device__ __forceinline__ void copy_16(SharedPlace to, const char* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory"); }
__device__ __forceinline__ void copy_lanes(SharedPlace to, const char* from, u32 bytes, SharedPlace arrival) {
  for (u32 at = lane_id() * 16; at < bytes; at += 512) copy_16(to + at, from + at);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(arrival) : "memory");
}
#endif
__device__ __forceinline__ void arrive(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
__device__ __forceinline__ u32 arrived(const u32* counter) { u32 value; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory"); return value; }
// Past L1, which does not see what other multiprocessors store.
__device__ __forceinline__ float load_fresh(const float* from) { return __ldcg(from); }
__device__ __forceinline__ int load_fresh(const int* from) { return __ldcg(from); }
__device__ __forceinline__ float4 load_fresh_four(const float* from) { return __ldcg(reinterpret_cast<const float4*>(from)); }
// Eight bytes, and what was stored before them, by whomever the storing block had waited for.
__device__ __forceinline__ uint2 load_acquired(const uint2* from) { uint2 v; asm volatile("{ .reg .b64 whole; ld.acquire.gpu.global.b64 whole, [%2]; mov.b64 {%0, %1}, whole; }" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory"); return v; }
__device__ __forceinline__ void store_released(uint2* to, uint2 v) { asm volatile("{ .reg .b64 whole; mov.b64 whole, {%1, %2}; st.release.gpu.global.b64 [%0], whole; }" ::"l"(to), "r"(v.x), "r"(v.y) : "memory"); }
__device__ __forceinline__ void poll_again(u32& polls) { polled(polls); }
__device__ __forceinline__ void opaque(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void fetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ void store_first_time(u64* to) { u64 time; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)); asm volatile("red.relaxed.gpu.global.min.u64 [%0], %1;" ::"l"(to), "l"(time) : "memory"); }
// 16 or 8 bytes that are seen whole or not at all.
__device__ __forceinline__ uint4 load_whole(const uint4* from) { uint4 v; asm volatile("{ .reg .b128 whole; .reg .b64 low, high; ld.relaxed.gpu.global.b128 whole, [%4]; mov.b128 {low, high}, whole; mov.b64 {%0, %1}, low; mov.b64 {%2, %3}, high; }" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from)); return v; }
__device__ __forceinline__ uint2 load_whole(const uint2* from) { uint2 v; asm volatile("{ .reg .b64 whole; ld.relaxed.gpu.global.b64 whole, [%2]; mov.b64 {%0, %1}, whole; }" : "=r"(v.x), "=r"(v.y) : "l"(from)); return v; }
__device__ __forceinline__ void store_whole(uint4* to, uint4 v) { asm volatile("{ .reg .b128 whole; .reg .b64 low, high; mov.b64 low, {%1, %2}; mov.b64 high, {%3, %4}; mov.b128 whole, {low, high}; st.relaxed.gpu.global.b128 [%0], whole; }" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)); }
__device__ __forceinline__ void store_whole(uint2* to, uint2 v) { asm volatile("{ .reg .b64 whole; mov.b64 whole, {%1, %2}; st.relaxed.gpu.global.b64 [%0], whole; }" ::"l"(to), "r"(v.x), "r"(v.y)); }
__device__ __forceinline__ u32 warp_or(u32 value) { return __reduce_or_sync(ALL_LANES, value); }
__device__ __forceinline__ u32 two_halves(F16, float low, float high) { u32 both; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low)); return both; }
__device__ __forceinline__ u32 two_halves(BF16, float low, float high) { u32 both; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low)); return both; }
__device__ __forceinline__ void tensor_product(F16, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); }
__device__ __forceinline__ void tensor_product(BF16, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); }
#endif

// The two values of such a word.
template <class T>
__device__ __forceinline__ float low_half(T, u32 both) { return to_float(T{u16(both)}); }
template <class T>
__device__ __forceinline__ float high_half(T, u32 both) { return to_float(T{u16(both >> 16)}); }
