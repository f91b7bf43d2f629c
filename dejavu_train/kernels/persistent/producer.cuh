// The warp that fetches: pages of weights, in the order in which they are used, and the list of neurons.
struct Producer {
  const Arguments& a;
  const Limit& limit;
  Shared& s;
  const Layer* const layers;
  const u32 pages, full, empty, launch;
  const int last;
  const int lane = threadIdx.x & 31, cta = blockIdx.x, head = cta / RANKS, rank = cta % RANKS;
  const int team = rank / PARTNERS, partner = rank % PARTNERS;
  int slot = 0, landed = 0, flying = 0;
  u32 lists = 0;                               // of all launches before
  int chosen_layers = 0, skipping_layers = 0;  // of this one so far
  u32 phase = 0, landed_phase = 0;

  __device__ Producer(const Arguments& a, const Limit& limit, Shared& s, u8* ring, u32 launch, int last)
      : a(a),
        limit(limit),
        s(s),
        layers((const Layer*)(ring + PAGES * PAGE + SMALL)),
        pages(shared_at(ring)),
        full(shared_at(s.full)),
        empty(shared_at(s.empty)),
        launch(launch),
        last(last) {}
  __device__ u32 at() const { return pages + slot * PAGE; }
  __device__ u32 bar() const { return full + 8 * slot; }
  __device__ void next() {
    if (++slot == PAGES) {
      slot = 0;
      phase ^= 1;
    }
  }
  // A page is asked for when its slot is free and few are on their way: more than the latency needs only lengthens the
  // queue in which the barriers' flags and sums wait.
  __device__ void claim(u32 bytes) {
    if (lane == 0) {
      while (flying >= (*(volatile int*)&s.calm ? CALM : FLYING)) {
        limit.wait(full + 8 * landed, landed_phase, PAGE_LATE);
        if (++landed == PAGES) {
          landed = 0;
          landed_phase ^= 1;
        }
        --flying;
      }
      ++flying;
      limit.wait(empty + 8 * slot, phase ^ 1, SLOT);
      bar_expect(bar(), bytes);
    }
    __syncwarp();
  }
  __device__ void whole(const u8* from, u32 bytes) {
    claim(bytes);
    if (lane == 0) fetch(at(), from, bytes, bar());
    next();
  }
  // A page of n neighbouring rows from `row` on. Few large copies: each costs as much as a kilobyte.
  template <int TOGETHER>
  __device__ void rows(const u8* codes, const u8* scales, u64 row, int n = ROWS) {  // TOGETHER in a copy
    claim(n * (ROW + ROW_SCALES));
    const int first = lane * TOGETHER, m = OWN % ROWS ? min(TOGETHER, n - first) : TOGETHER;
    if (first < n)
      fetch(at() + (TOGETHER == 4 ? row_at(first) : neuron_at(first)), codes + (row + first) * ROW, m * ROW, bar());
    if (lane == 0) fetch(at() + SCALES_AT, scales + row * ROW_SCALES, n * ROW_SCALES, bar());
    next();
  }
  // Pages of n neurons: those that the list names, or this program's own.
  template <bool LISTED, bool DOWN>
  __device__ void neurons(const u8* codes, const u8* scales, int n) {
    if constexpr (!LISTED) {
      for (int i = 0; i < OWN; i += ROWS)
        rows<DOWN ? 2 : 4>(codes, scales, cta * OWN + i, OWN % ROWS ? min(ROWS, OWN - i) : ROWS);
      return;
    }
    for (int i = 0; i < n; i += ROWS) {
      const int m = min(ROWS, n - i);
      claim(m * (ROW + ROW_SCALES));
      if (lane < m) {
        const u64 row = s.ids[i + lane];
        fetch(at() + (DOWN ? neuron_at(lane) : row_at(lane)), codes + row * ROW, ROW, bar());
        fetch(at() + SCALES_AT + lane * ROW_SCALES, scales + row * ROW_SCALES, ROW_SCALES, bar());
      }
      next();
    }
  }
  __device__ void attention(const Layer& layer) {
    if (selects(layer)) whole(layer.first + (u64)cta * FIRST_ROWS * ROW, FIRST_ROWS * ROW);
    for (int r = 0; r < QKV_ROWS; r += ROWS)
      rows<4>(layer.qkv, layer.qkv_scales,
              (head * (SHARE + 2) + r / PART_ROWS) * HEAD_DIM + rank * PART_ROWS + r % PART_ROWS);
    if (selects(layer)) whole(layer.second + (u64)cta * SECOND_BYTES, SECOND_BYTES);
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
    if (selects(layer) && lane == 0) {  // one writer and one reader of masks a program
      limit.wait(shared_at(&s.masked), chosen_layers & 1, MASK);
      __stcg((uint4*)a.masks + cta, *(const uint4*)s.own_mask);
      add_released(a.sync + 32 * 3, 1);
    }
  }
  // The masks of all programs -> this program's even share of the list, in ascending order.
  __device__ int share() {
    ++chosen_layers;
    if (lane == 0) limit.reach(a.sync + 32 * 3, (lists + chosen_layers) * CTAS, LIST);
    __syncwarp();
    constexpr int LANE = CTAS / 32;
    int before[LANE], sum = 0;
#pragma unroll
    for (int k = 0; k < LANE; ++k) {
      const uint4 v = get_words((const uint4*)a.masks + LANE * lane + k);
      *(uint4*)s.mask[LANE * lane + k] = v;
      before[k] = sum;
      sum += __popc(v.x) + __popc(v.y) + __popc(v.z) + __popc(v.w);
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
    const int low = total * cta / CTAS, n = total * (cta + 1) / CTAS - low;
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
  // The neurons that are not zero, of those that this program has multiplied.
  __device__ int survivors() {
    limit.wait(shared_at(&s.live), skipping_layers++ & 1, LIVE);
    __syncwarp();
    int n = 0;
    for (int k = 0; k < OWN; k += 32) {
      const float v = s.h[k + lane];
      const bool alive = !(v <= 0) && (OWN % 32 == 0 || k + lane < OWN);
      const u32 m = __ballot_sync(~0u, alive);
      const int place = n + __popc(m & ((1u << lane) - 1));
      if (alive) {
        s.ids[place] = cta * OWN + k + lane;
        s.kept[place] = v;
      }
      n += __popc(m);
    }
    if (lane == 0) s.n = n;
    __syncwarp();
    if (lane == 0) bar_arrive(shared_at(&s.listed));
    return n;
  }
  __device__ void run() {
    for (int l = 0; l < a.n_layers; ++l) lists += selects(layers[l]) ? launch : 0;
    for (int l = 0; l < a.n_layers; ++l) {
      const Layer& layer = layers[l];
      attention(layer);
      int n = OWN;
      if (selects(layer)) {
        n = share();
        neurons<true, false>(layer.up, layer.up_scales, n);
      } else neurons<false, false>(layer.up, layer.up_scales, n);
      if (skips(layer)) n = survivors();
#if GATED
      neurons<MODE != READ_ALL, false>(layer.factor, layer.factor_scales, n);
#endif
      neurons<MODE != READ_ALL, true>(layer.down, layer.down_scales, n);
    }
  }
};
