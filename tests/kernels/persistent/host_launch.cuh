// Runs the kernel: behind its source, in one source with host.cuh in front of it.
static void (*entry)();
static u32 roll() {
  dice = dice * 1664525u + 1013904223u;
  return dice >> 16;
}
static void land() {
  size_t kept = 0;
  for (const Copy& copy : copies) {
    if (roll() & 1 || (!copy.n && copy.of->copying)) {
      copies[kept++] = copy;
      continue;
    }
    std::memcpy(arena + copy.to, copy.from, copy.n);
    if (copy.of && copy.n) {
      --copy.of->copying;
      continue;
    }
    Bar& bar = *(Bar*)(arena + copy.bar);
    bar.bytes -= copy.n;
    bar.pending -= !copy.n;
    complete(bar);
  }
  copies.resize(kept);
}
static void begin() {
  entry();
  fiber->done = true;
  ++progress;
  _longjmp(scheduler, 1);
}
static ucontext_t context;
static void resume(Fiber& next) {
  if (next.done || (next.awaited && *next.awaited == next.seen)) return;
  next.awaited = nullptr;
  fiber = &next;
  if (_setjmp(scheduler)) return;
  if (next.started) _longjmp(next.at, 1);
  next.started = true;
  getcontext(&context);
  context.uc_stack.ss_sp = next.stack;
  context.uc_stack.ss_size = STACK;
  context.uc_link = nullptr;
  makecontext(&context, begin, 0);
  setcontext(&context);
}
static u8* room(size_t n) {
  void* const at = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) refuse("no memory");
  return (u8*)at;
}

// 0, or 1 where programs wait for each other for ever.
static int run_all(int programs, u32 shared) {
  program_bytes = (shared + 127) / 128 * 128;
  const size_t n = (size_t)programs * THREADS_OF_ALL, all_bytes = (size_t)programs * program_bytes;
  arena = room(all_bytes + n * STACK);
  std::memset(arena, 0xFF, all_bytes);
  std::vector<Program> of(programs);
  std::vector<Warp> warps(n / 32);
  std::vector<Fiber> fibers(n);
  copies.clear();
  clock_ns = progress = 0;
  for (int p = 0; p < programs; ++p) of[p] = {{p}, arena + (size_t)p * program_bytes, {}, {}};
  for (size_t i = 0; i < n; ++i) {
    fibers[i].thread.x = i % THREADS_OF_ALL;
    fibers[i].program = &of[i / THREADS_OF_ALL];
    fibers[i].warp = &warps[i / 32];
    fibers[i].stack = arena + all_bytes + i * STACK;
    *(u64*)fibers[i].stack = CANARY;
  }
  int idle = 0;
  for (bool alive = true; alive;) {
    const u64 before = progress;
    alive = false;
    land();
    const size_t first = roll() % warps.size();
    for (size_t k = 0; k < warps.size(); ++k) {
      const size_t w = (first + k) % warps.size();
      u64 held;
      do {
        held = warps[w].meeting.held;
        for (size_t i = 32 * w; i < 32 * w + 32; ++i) resume(fibers[i]);
      } while (warps[w].meeting.held != held);
      for (size_t i = 32 * w; i < 32 * w + 32; ++i) alive |= !fibers[i].done;
    }
    if (progress != before) idle = 0;
    else if (++idle == 50) clock_ns += 5000000000ull;
    else if (idle > 5000) break;
  }
  for (const Fiber& each : fibers)
    if (*(u64*)each.stack != CANARY) refuse("a stack is too small");
  munmap(arena, all_bytes + n * STACK);
  return idle > 5000;
}
static Arguments given;
// seed: of the order of copies and warps. without: the number of a copy that is lost, or -1.
extern "C" int launch(int programs, u32 shared, u32 seed, int without, const Layer* layers, const float* x, float* out,
                      const int* position, const int* row_state, int* delta, u64* heads, u64* hidden, u64* masks,
                      u32* sync, int n_layers, int capacity, float eps, const float2* turns) {
  given = {layers, x, out, position, row_state, delta, heads, hidden, masks, sync, n_layers, capacity, eps, turns};
  entry = [] {
    const Arguments& a = given;
    decoder_layers(a.layers, a.x, a.out, a.position, a.row_state, a.delta, a.heads, a.hidden, a.masks, a.sync,
                   a.n_layers, a.capacity, a.eps, a.turns);
  };
  dice = seed;
  lost = without;
  return run_all(programs, shared);
}
