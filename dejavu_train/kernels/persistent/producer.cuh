// The two warps that fetch pages: those that are known before a step, ahead of all barriers, and those that a list of
// neurons names. Each has a ring of its own, so that a list that is not there yet holds up none of the others.
template <int FIRST, int SLOTS>
struct Fetcher {
  const Arguments& a;
  const Limit& limit;
  Shared& s;
  const Layer* const layers;
  const u32 pages, full, empty, launch;
  const int lane = threadIdx.x & 31, cta = blockIdx.x;
  int slot = 0;
  u32 phase = 0;

  __device__ Fetcher(const Arguments& a, const Limit& limit, Shared& s, u8* ring, u32 launch)
      : a(a),
        limit(limit),
        s(s),
        layers((const Layer*)(ring + ALL_PAGES * PAGE + SMALL)),
        pages(shared_at(ring) + FIRST * PAGE),
        full(shared_at(s.full + FIRST)),
        empty(shared_at(s.empty + FIRST)),
        launch(launch) {}
  __device__ u32 at() const { return pages + slot * PAGE; }
  __device__ u32 bar() const { return full + 8 * slot; }
  __device__ void await_slot() const { limit.wait(empty + 8 * slot, phase ^ 1, SLOT); }
  // Nobody needs pages of a step that has failed. Barriers of those that are on their way must not expect more.
  __device__ bool dead() const { return *(volatile int*)&s.dead; }
  __device__ void next() {
    if (++slot == SLOTS) {
      slot = 0;
      phase ^= 1;
    }
  }
};

struct Producer : Fetcher<0, PAGES> {
  const int last, head = cta / RANKS, rank = cta % RANKS, team = rank / PARTNERS, partner = rank % PARTNERS;
  int landed = 0, flying = 0;
  u32 landed_phase = 0;
  __device__ Producer(const Arguments& a, const Limit& limit, Shared& s, u8* ring, u32 launch, int last)
      : Fetcher(a, limit, s, ring, launch), last(last) {}
  // A page is asked for when its slot is free and few are on their way: more than the latency needs only lengthens the
  // queue in which the barriers' flags and sums wait.
  __device__ void claim(u32 bytes) {
    if (lane == 0) {
      u64 state;  // calm, and dead: one read for both
      while (flying >= ((u32)(state = *(volatile u64*)&s.calm) ? CALM : FLYING)) {
        limit.wait(full + 8 * landed, landed_phase, PAGE_LATE);
        if (++landed == PAGES) {
          landed = 0;
          landed_phase ^= 1;
        }
        --flying;
      }
      ++flying;
      await_slot();
      if (!(state >> 32)) bar_expect(bar(), bytes);
    }
    __syncwarp();
  }
  __device__ void whole(const u8* from, u32 bytes) {
    claim(bytes);
    if (lane == 0) fetch(at(), from, bytes, bar());
    next();
  }
  // A page of n neighbouring rows from `row` on. Few large copies: each costs as much as a kilobyte.
  __device__ void rows(const u8* codes, const u8* scales, u64 row, int n = ROWS) {
    claim(n * (ROW + ROW_SCALES));
    constexpr int TOGETHER = 4;  // in a copy
    const int first = lane * TOGETHER, m = OWN % ROWS ? min(TOGETHER, n - first) : TOGETHER;
    if (first < n) fetch(at() + row_at(first), codes + (row + first) * ROW, m * ROW, bar());
    if (lane == 0) fetch(at() + SCALES_AT, scales + row * ROW_SCALES, n * ROW_SCALES, bar());
    next();
  }
  __device__ void own_rows(const u8* codes, const u8* scales) {  // of this program's neurons
    for (int i = 0; i < OWN; i += ROWS) rows(codes, scales, cta * OWN + i, OWN % ROWS ? min(ROWS, OWN - i) : ROWS);
  }
  __device__ void attention(const Layer& layer) {
    if (selects(layer)) whole(layer.first + (u64)cta * FIRST_ROWS * ROW, FIRST_ROWS * ROW);
    for (int r = 0; r < QKV_ROWS; r += ROWS)
      rows(layer.qkv, layer.qkv_scales,
           (head * (SHARE + 2) + r / PART_ROWS) * HEAD_DIM + rank * PART_ROWS + r % PART_ROWS);
    for (int c = partner; c * POSITIONS < last; c += PARTNERS) {
      const u32 bytes = min(POSITIONS, last - c * POSITIONS) * HEAD_DIM * 2;
      const u64 from = ((u64)head * a.capacity + c * POSITIONS) * HEAD_DIM * 2;
      claim(2 * bytes);
      if (lane == 0) {
        fetch(at(), layer.k + from, bytes, bar());
        fetch(at() + KV_BYTES, layer.v + from, bytes, bar());
      }
      next();
    }
    if (selects(layer)) whole(layer.second + (u64)cta * SECOND_BYTES, SECOND_BYTES);
    for (int i = 0; i < MIXED * OUT_PAGES; ++i) {
      const int mixed = head * SHARE + team * MIXED + i / OUT_PAGES;
      const u64 row = (u64)mixed * D + partner * COLUMNS + i % OUT_PAGES * 256;
      claim(OUT_BYTES + 512);
      if (lane == 0) {
        fetch(at(), layer.out + row * (HEAD_DIM / 2), OUT_BYTES, bar());
        fetch(at() + OUT_BYTES, layer.out_scales + row * 2, 512, bar());
      }
      next();
    }
  }
  __device__ void run() {
    for (int l = 0; l < a.n_layers && !dead(); ++l) {
      const Layer& layer = layers[l];
      attention(layer);
      if (!selects(layer)) own_rows(layer.up, layer.up_scales);
#if GATED
      if (MODE == READ_ALL) own_rows(layer.factor, layer.factor_scales);
#endif
    }
  }
};

// Lists neurons, and fetches their rows and pieces.
struct Lister : Fetcher<PAGES, LIST_PAGES> {
  u32 lists = 0;                     // of all launches before
  int chosen_layers = 0, lives = 0;  // of this one so far
  const int quarter = cta % SQUAD;
  using Fetcher::Fetcher;
  // Waits for a slot. False in a step that has failed.
  __device__ bool claim() const {
    if (lane == 0) await_slot();
    __syncwarp();
    return !dead();
  }
  // Pages of rows, of n neurons that the list names from `first` on.
  __device__ void rows(const u8* codes, const u8* scales, int first, int n) {
    for (int i = 0; i < n; i += ROWS) {
      const int m = min(ROWS, n - i);
      if (!claim()) return;
      if (lane == 0) {
        bulk_behind_copies();  // of `pieces`
        bar_expect(bar(), m * (ROW + ROW_SCALES));
      }
      __syncwarp();
      if (lane < m) {
        const u64 row = s.ids[first + i + lane];
        fetch(at() + row_at(lane), codes + row * ROW, ROW, bar());
        fetch(at() + SCALES_AT + lane * ROW_SCALES, scales + row * ROW_SCALES, ROW_SCALES, bar());
      }
      next();
    }
  }
  // Pages of this program's quarter of the columns, of n neurons that the list names, or of all of the squad.
  __device__ void pieces(const u8* codes, const u8* scales, int n) {
    constexpr int LANES = PIECE / 16, TOGETHER = 32 / LANES;  // of a neuron, and neurons at once
    const auto neuron = [&](int i) { return MODE == READ_ALL ? (cta - quarter) * OWN + i : s.ids[i]; };
    const u8* const from = codes + quarter * PIECE + lane % LANES * 16;
    for (int i = 0; i < n; i += PIECES) {
      const int m = min(PIECES, n - i);
      if (!claim()) return;
#pragma unroll 8
      for (int r = lane / LANES; r < m; r += TOGETHER)
        copy<16>(at() + piece_at(r) + lane % LANES * 16, from + (u64)neuron(i + r) * ROW);
      if (lane < m)
        copy<PIECE_SCALES>(at() + PIECE_SCALES_AT + lane * PIECE_SCALES,
                           scales + (u64)neuron(i + lane) * ROW_SCALES + quarter * PIECE_SCALES);
      copies_arrive(bar());
      __syncwarp();
      if (lane == 0) bar_arrive(bar());
      next();
    }
  }
  // This program's mask, for all, in tagged words. They are counted too: one thread of each program asks for one word.
  __device__ void publish(int l) {
    if (lane == 0) limit.wait(shared_at(&s.masked), chosen_layers & 1, MASK);
    __syncwarp();
    if (lane < 4) put_tagged(a.masks + 4 * cta + lane, ((const u32*)s.own_mask)[lane], tag_of(a, launch, l));
    __syncwarp();
    if (lane == 0) add(a.sync + 32 * 3, 1);
  }
  // The masks of all programs -> this squad's even share of the list, in ascending order.
  __device__ int share(int l) {
    ++chosen_layers;
    if (lane == 0) limit.reach(a.sync + 32 * 3, (lists + chosen_layers) * CTAS, LIST);
    __syncwarp();
    constexpr int LANE = CTAS / 32;
    int before[LANE], sum = 0;
#pragma unroll
    for (int k = 0; k < LANE; ++k) {
      const u64* const p = a.masks + 4 * (LANE * lane + k);
      u64 v[4];
      int tries = 0;
      const auto there = [&](u64 word) { return (u32)(word >> 32) == tag_of(a, launch, l); };
      do {  // counted before they are seen, now and then
        get_words(p, v[0], v[1]);
        get_words(p + 2, v[2], v[3]);
      } while (!(there(v[0]) && there(v[1]) && there(v[2]) && there(v[3])) &&
               !((++tries & 255) == 0 && limit.late(LIST)));
      before[k] = sum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s.mask[LANE * lane + k][i] = (u32)v[i];
        sum += __popc((u32)v[i]);
      }
    }
    int ahead = sum;
    for (int o = 1; o < 32; o <<= 1) {
      const int v = __shfl_up_sync(~0u, ahead, o);
      if (lane >= o) ahead += v;
    }
    const int total = __shfl_sync(~0u, ahead, 31);
    for (int k = 0; k < LANE; ++k) s.prefix[LANE * lane + k] = ahead - sum + before[k];
    if (lane == 0) s.prefix[CTAS] = total;
    __syncwarp();
    const int squad = cta / SQUAD, low = total * squad / SQUADS, n = total * (squad + 1) / SQUADS - low;
    int first = 0;  // programs whose neurons all come before
    for (int k = 0; k < LANE; ++k) first += __popc(__ballot_sync(~0u, s.prefix[lane + 32 * k + 1] <= low));
    for (int q = first; q < CTAS && s.prefix[q] < low + n; ++q) {
      int place = s.prefix[q] - low;
      for (int k = 0; k < (OWN + 31) / 32; ++k) {
        const u32 m = s.mask[q][k];
        const int mine = place + __popc(m & ((1u << lane) - 1));
        if ((m >> lane & 1) && mine >= 0 && mine < n) s.ids[mine] = q * OWN + k * 32 + lane;
        place += __popc(m);
      }
    }
    if (lane == 0) s.n = n;
    __syncwarp();
    if (lane == 0) bar_arrive(shared_at(&s.listed));
    return n;
  }
  // How many neurons `Consumer.compact` has left.
  __device__ int survivors() {
    limit.wait(shared_at(&s.live), lives++ & 1, LIVE);
    return *(volatile int*)&s.n;
  }
  __device__ void run() {
    for (int l = 0; l < a.n_layers; ++l) lists += selects(layers[l]) ? launch : 0;
    for (int l = 0; l < a.n_layers; ++l) {
      const Layer& layer = layers[l];
      int n = SQUAD_OWN, first = 0, mine = 0;
      if (selects(layer)) {
        publish(l);
        n = share(l);
        first = part_of(n, quarter);
        mine = part_of(n, quarter + 1) - first;
        rows(layer.up, layer.up_scales, first, mine);
      }
#if GATED
      if (skips(layer)) mine = survivors();
      if (MODE != READ_ALL) rows(layer.factor, layer.factor_scales, first, mine);
#endif
      if (skips(layer)) n = survivors();
      pieces(layer.down, layer.down_scales, n);
    }
  }
};
