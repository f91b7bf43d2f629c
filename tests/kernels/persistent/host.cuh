// A GPU for the kernel of all layers on a CPU, in one thread: the instructions that the kernel names, in plain C++.
//
// Every thread of the GPU is a fiber. A fiber that waits gives way, and nothing else interrupts one. A bulk copy leaves
// 0xFF until it lands, rounds later, and which copies land first follows from a seed. One of them can be lost. Time stands
// still, but for 5 s when nobody gets on. So waits, what has landed, alignment and whole numbers are those of the kernel.
// The order of stores, which hardware may change, is not.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define threadIdx (fiber->thread)
#define blockIdx (fiber->program->index)
#define SHARED_MEMORY(name) u8* const name = fiber->program->memory

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct Index {
  int x;
};
using std::abs;
using std::max;
using std::min;

struct Meeting {  // of threads
  int arrived = 0;
  u64 held = 0;
};
struct Warp {
  Meeting meeting;
  u32 posted[2][32][6];
};
struct Program {
  Index index;
  u8* memory;
  Meeting first, all;
};
struct Fiber {
  int copying = 0;  // of its copies, those that have not landed
  Index thread;
  Program* program;
  Warp* warp;
  u8* stack;
  jmp_buf at;
  bool started = false, done = false;
  const u64* awaited = nullptr;  // who waits for a meeting is not asked before it was held
  u64 seen = 0;
};
struct Copy {  // of a fiber, or a bulk copy, which has none. Of no bytes: an arrival behind the fiber's copies
  u32 to, n, bar;
  const void* from;
  Fiber* of;
};
struct Bar {  // an mbarrier's eight bytes
  u8 phase, count, pending, unused;
  int bytes;
};

constexpr size_t STACK = 32768;
constexpr u64 CANARY = 0x5AFE5AFE5AFE5AFEull;  // at a stack's end
static Fiber* fiber;
static jmp_buf scheduler;
static u8* arena;  // the programs' shared memories
static u32 program_bytes;
static std::vector<Copy> copies;
static u64 clock_ns, progress;
static u32 dice;
static int lost;  // copies until one that never lands

[[noreturn]] static void refuse(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}
static __noinline__ void yield() {
  if (!_setjmp(fiber->at)) _longjmp(scheduler, 1);
}
static void meet_in(Meeting& meeting, int n) {
  if (++meeting.arrived == n) {
    meeting.arrived = 0;
    ++meeting.held;
    ++progress;
    return;
  }
  fiber->awaited = &meeting.held;
  fiber->seen = meeting.held;
  yield();
}
// What all lanes of this warp bring, in the order of lanes.
template <int N>
static const u32 (*exchange(const u32 (&mine)[N]))[6] {
  Warp& warp = *fiber->warp;
  auto& posted = warp.posted[warp.meeting.held & 1];
  std::memcpy(posted[fiber->thread.x & 31], mine, sizeof mine);
  meet_in(warp.meeting, 32);
  return posted;
}
template <class T, class S>
static T bits_of(S v) {
  T out;
  static_assert(sizeof(T) == sizeof(S), "as many bits");
  std::memcpy(&out, &v, sizeof out);
  return out;
}
// A place in this program's shared memory, of n bytes.
static u8* own(u32 a, u32 n) {
  u8* const at = arena + a;
  if (a % n || at < fiber->program->memory || at + n > fiber->program->memory + program_bytes)
    refuse("an address that is not aligned, or of another program");
  return at;
}

inline u32 shared_at(const void* p) { return (u32)((const u8*)p - arena); }
static Bar& bar_of(u32 a) { return *(Bar*)own(a, 8); }
static void complete(Bar& bar) {
  if (bar.pending || bar.bytes) return;
  bar.phase ^= 1;
  bar.pending = bar.count;
  ++progress;
}
inline void bar_init(u32 a, int n) { bar_of(a) = {0, (u8)n, (u8)n, 0, 0}; }
inline void bars_ready() {}
inline void bar_arrive(u32 a) {
  Bar& bar = bar_of(a);
  if (!bar.pending--) refuse("more arrivals than a barrier expects");
  complete(bar);
}
inline void bar_expect(u32 a, u32 n) {
  bar_of(a).bytes += n;
  bar_arrive(a);
}
inline bool bar_done(u32 a, u32 phase) {
  if (bar_of(a).phase == phase) yield();
  return bar_of(a).phase != phase;
}
template <int N>
inline void meet_first() {
  meet_in(fiber->program->first, N);
}
inline void fetch(u32 to, const void* from, u32 n, u32 bar) {
  if (n % 16 || (uintptr_t)from % 16) refuse("a bulk copy that is not aligned");
  own(to, 16), own(to + n - 16, 16), own(bar, 8);
  std::memset(arena + to, 0xFF, n);
  if (lost--) copies.push_back({to, n, bar, from, nullptr});
}
template <int N>
inline void copy(u32 to, const void* from) {
  if ((uintptr_t)from % N) refuse("a copy that is not aligned");
  std::memset(own(to, N), 0xFF, N);
  ++fiber->copying;
  if (lost--) copies.push_back({to, N, 0, from, fiber});
}
inline void copies_arrive(u32 bar) {
  ++bar_of(bar).pending;
  copies.push_back({0, 0, bar, nullptr, fiber});
}
inline void bulk_behind_copies() {}
inline void put_tagged(u64* p, u32 v, u32 tag) { *p = (u64)tag << 32 | v; }
inline u64 get_word(const u64* p) {
  yield();
  return *p;
}
inline void get_words(const u64* p, u64& a, u64& b) {
  yield();
  a = p[0], b = p[1];
}
inline uint4 get_words(const void* p) { return *(const uint4*)p; }
inline u32 get_acquired(const u32* p) {
  yield();
  return *p;
}
inline void add_released(u32* p, u32 v) { *p += v, ++progress; }
inline void add(u32* p, u32 v) { add_released(p, v); }
inline u64 now() { return clock_ns; }
inline uint4 load4(u32 a) { return *(uint4*)own(a, 16); }
inline uint2 load2(u32 a) { return *(uint2*)own(a, 8); }
inline u32 load1(u32 a) { return *(u32*)own(a, 4); }
inline float half_of(u32 bits) { return bits_of<_Float16>((u16)bits); }
inline u16 to_half(float f) { return bits_of<u16>((_Float16)f); }
inline float load_half(u32 a) { return half_of(*(u16*)own(a, 2)); }
inline float half_at(const u8* p, int i) { return half_of(((const u16*)p)[i]); }

inline float larger(float a, float b) { return std::isnan(a) || std::fabs(a) > std::fabs(b) ? std::fabs(a) : std::fabs(b); }
inline float __uint_as_float(u32 v) { return bits_of<float>(v); }
inline u32 __float_as_uint(float v) { return bits_of<u32>(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
inline int __float2int_rn(float v) { return std::fabs(v) < 2147483648.f ? (int)std::lrint(v) : 0; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline u32 __byte_perm(u32 a, u32 b, u32 select) {
  const u64 both = (u64)b << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= (u32)(both >> 8 * (select >> 4 * i & 7) & 0xFF) << 8 * i;
  return out;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int8_t)(a >> i) * (int8_t)(b >> i);
  return c;
}
template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
template <class T>
inline void __stcg(T* p, T v) {
  *p = v;
}
inline void atomicAdd(int* p, int v) { *p = (int)((u32)*p + (u32)v); }
inline void atomicCAS(u32* p, u32 was, u32 v) {
  if (*p == was) *p = v;
}
inline void __syncthreads() { meet_in(fiber->program->all, THREADS_OF_ALL); }
inline void __syncwarp() { meet_in(fiber->warp->meeting, 32); }
template <class T>
static T from_lane(T v, int lane) {
  return bits_of<T>(exchange<1>({bits_of<u32>(v)})[lane][0]);
}
template <class T>
inline T __shfl_sync(u32, T v, int lane) {
  return from_lane(v, lane & 31);
}
template <class T>
inline T __shfl_xor_sync(u32, T v, int mask) {
  return from_lane(v, (threadIdx.x & 31) ^ mask);
}
template <class T>
inline T __shfl_up_sync(u32, T v, int by) {
  const int lane = threadIdx.x & 31;
  return from_lane(v, lane < by ? lane : lane - by);
}
inline u32 __ballot_sync(u32, bool v) {
  const auto all = exchange<1>({(u32)v});
  u32 out = 0;
  for (int i = 0; i < 32; ++i) out |= all[i][0] << i;
  return out;
}
// D = A B + C of m16n8k32: PTX ISA, "Matrix Fragments for mma.m16n8k32".
inline void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const auto all = exchange<6>({a0, a1, a2, a3, b0, b1});
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  u8 rows[2][32];
  int8_t columns[2][32];
  for (int q = 0; q < 8; ++q)
    for (int i = 0; i < 2; ++i) {
      std::memcpy(rows[i] + 4 * q, &all[4 * g + q % 4][i + 2 * (q / 4)], 4);
      std::memcpy(columns[i] + 4 * q, &all[4 * (2 * t + i) + q % 4][4 + q / 4], 4);
    }
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 32; ++k) c[i] += rows[i >> 1][k] * columns[i & 1][k];
}
