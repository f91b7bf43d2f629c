// All layers of a decoding step of one row as one cooperative kernel, over 4-bit weights where they lie.
// The host defines what `StepSizes.defines` lists. docs/notes/one-kernel.md explains it.
//
// CTAS programs, one a multiprocessor, RANKS for a head of K and V. Those with the same of its SHARE heads of q are a
// team. Of OPT four programs are the team of a head. A program owns a part of the rows of q, k and v, of its team's
// positions and of the columns of their output projection, and D_FFN / CTAS neurons. Of the neurons of its squad, which
// are four programs, it owns a quarter of down's columns. One warp streams weights into a ring of pages in shared memory,
// in the order of their use and ahead of all barriers, one what a list of neurons names into another. Eight multiply them.
//
//   half 1  x += delta, norm, q/k/v rows | all of a head exchange | turn, attention over a part of the positions
//           | the team exchanges | columns of the output projection, added into delta | BARRIER of all programs
//   half 2  x += delta, norm, up (and gate) rows of own neurons | the squad exchanges | columns of down, added into delta
//           | BARRIER
//
// Numbers: inputs of products are whole numbers of 16 bits by groups of 128, as two signed digits of 8 bits in two
// columns of B. Codes are multiplied as they lie (u8 x s8, exact): the low nibbles of a word, and its high ones, sixteen
// times too large. Group j of a warp lies in columns 2 j and 2 j + 1 of B, with zeros elsewhere. So one accumulator
// serves four groups, and lane t of a quad ends with the sums of group t. delta is in whole numbers of 32 bits, so its
// sums have no order. Their unit follows from the residual stream, which is fp32 in the registers of every program, alike
// in all: 1 / UNITS of the power of two below its root mean square, which is taken as an eighth at least.

// The warps that multiply.
struct Consumer {
  const Arguments& a;
  const Limit& limit;
  Shared& s;
  const Layer* const layers;
  const u32 launch;
  const int last;
  const bool every;
  const int tid = threadIdx.x, w = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int cta = blockIdx.x, head = cta / RANKS, rank = cta % RANKS;
  const int team = rank / PARTNERS, partner = rank % PARTNERS, quarter = cta % SQUAD;
  const int row = (g >> 1) + 4 * (g & 1);  // of a tile, and the eighth behind it
  const bool holds = (g >> 1) < GROUPS;
  const int column = (WARPS * (g >> 1) + w) * 128 + 32 * t + 16 * (g & 1);  // this lane's 16 columns of x
  struct Cursor {
    u32 page, bar, phase;
  } ring, listed;  // the next page of each ring
  const u32 first_page, first_bar;
  int turn, stage = 0, lists = 0;
  u32 reached;
  float x[16];
  float per_unit = 1.f;     // units of delta in one
  uint4 gain[2], shift[2];  // of the next norm
  u32 b[GROUPS][8];         // x's digits, with zeros around
  float unit;               // of group t, as is its offset
  int offset;

  __device__ Consumer(const Arguments& a, const Limit& limit, Shared& s, u8* pages, u32 launch, int last, bool every)
      : a(a),
        limit(limit),
        s(s),
        layers((const Layer*)(pages + ALL_PAGES * PAGE + SMALL)),
        launch(launch),
        last(last),
        every(every),
        first_page(shared_at(pages)),
        first_bar(shared_at(s.full)) {
    ring = {first_page, first_bar, 0};
    listed = {first_page + PAGES * PAGE, first_bar + 8 * PAGES, 0};
    reached = launch * 2 * a.n_layers * (CTAS / COUNTERS);
    turn = (int)(launch * 2ull * a.n_layers % 3);
  }
  // The next page of a ring, and what gives it back.
  template <bool LISTED = false>
  __device__ u32 page(u32& bar) {
    constexpr int FIRST = LISTED ? PAGES : 0, SLOTS = LISTED ? LIST_PAGES : PAGES;
    Cursor& next = LISTED ? listed : ring;
    limit.wait(next.bar, next.phase, PAGE_LATE);
    const u32 found = next.page;
    bar = next.bar + 128;  // `empty` lies behind `full`
    next.bar += 8;
    next.page += PAGE;
    if (next.bar == first_bar + 8 * (FIRST + SLOTS)) {
      next.bar -= 8 * SLOTS;
      next.page -= PAGE * SLOTS;
      next.phase ^= 1;
    }
    return found;
  }
  __device__ void done(u32 bar) {
    __syncwarp();
    if (lane == 0) bar_arrive(bar);
  }
  __device__ void send(int at, float v, int l) {
    put_tagged(a.heads + head * EXCHANGE + at, __float_as_uint(v), tag_of(a, launch, l));
  }
  // n words from `at` on, of N at most, in pairs. Only those that are missing are asked for again.
  template <int N>
  __device__ void receive(int at, float* to, int l, int n = N) {
    constexpr int PAIRS = (N + 2 * THREADS - 1) / (2 * THREADS);  // of a thread
    const u32 want = tag_of(a, launch, l);
    const u64* p = a.heads + head * EXCHANGE + at + 2 * tid;
    u64 v[PAIRS][2];
    bool ok;
    const auto there = [&](int k) {
      const int i = 2 * (tid + k * THREADS);
      return (i >= n || (u32)(v[k][0] >> 32) == want) && (i + 1 >= n || (u32)(v[k][1] >> 32) == want);
    };
#pragma unroll
    for (int k = 0; k < PAIRS; ++k) v[k][0] = v[k][1] = (u64)~want << 32;
    int tries = 0;
    do {
      ok = true;
#pragma unroll
      for (int k = 0; k < PAIRS; ++k)
        if (!there(k)) get_words(p + 2 * k * THREADS, v[k][0], v[k][1]);
#pragma unroll
      for (int k = 0; k < PAIRS; ++k) ok = ok && there(k);
    } while (!ok && !((++tries & 255) == 0 && limit.late(EXCHANGED)));
#pragma unroll
    for (int k = 0; k < PAIRS; ++k) {
      const int i = 2 * (tid + k * THREADS);
      const float2 both = make_float2(__uint_as_float((u32)v[k][0]), __uint_as_float((u32)v[k][1]));
      if (i < N) *(float2*)(to + spread(i)) = both;
    }
    meet();
  }
  // A sum of this program's, and the bias of the columns that it looks after. `barrier` adds them into delta.
  __device__ int in_units(float v) {
    const float u = v * per_unit;
    if (!(fabsf(u) < LARGEST)) atomicCAS(limit.error, 0, RANGE);
    return __float2int_rn(u);
  }
  __device__ void put_sum(int column, float v) { s.sums[column_at(column)] = in_units(v); }  // of those that it adds
  __device__ float ask_bias(const u8* bias) const {
    return BIASES && tid < MINE ? half_at(bias, cta * MINE + tid) : 0.f;
  }
  __device__ void add_bias(float bias) {
    if (BIASES && tid < MINE) atomicAdd(a.delta + turn * D + column_at(cta * MINE + tid), in_units(bias));
  }
  // This program's n sums from `first` on are added, and all programs' are there. The next norm's weights are on their
  // way meanwhile.
  __device__ void barrier(int first, int n) {
    reached += CTAS / COUNTERS;
    if (tid == 0) *(volatile int*)&s.calm = 1;
    meet();
    for (int i = tid; i < n; i += THREADS) {  // not all programs at the same words at once
      const int at = i + 32 * (cta / SQUAD) & n - 1;
      atomicAdd(a.delta + turn * D + first + at, s.sums[at]);
    }
    meet();
    if (w == 0) {
      if (lane == 0) add_released(a.sync + 32 * (8 + cta % COUNTERS), 1);
      if (lane < COUNTERS) limit.reach(a.sync + 32 * (8 + lane), reached, BARRIER);
    }
    meet();
  }
  __device__ void ask_norm(const u8* weight, const u8* bias) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      gain[i] = shift[i] = uint4{0, 0, 0, 0};
      if (holds) {
        gain[i] = __ldg((const uint4*)(weight + 2 * column) + i);
        if (!RMS_NORM) shift[i] = __ldg((const uint4*)(bias + 2 * column) + i);
      }
    }
  }
  // x, or x += delta. The next half adds into the next of three buffers, and the one behind that is cleared.
  __device__ void take(bool first) {
    if (first) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 v = holds ? __ldcg((const float4*)(a.x + column) + i) : float4{0, 0, 0, 0};
        x[4 * i] = v.x;
        x[4 * i + 1] = v.y;
        x[4 * i + 2] = v.z;
        x[4 * i + 3] = v.w;
      }
    } else {
      const float value = 1.f / per_unit;  // a power of two
      const u32* const from = (const u32*)a.delta + turn * D + column_at(column);
      if (holds) {
        uint4 d[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] = get_words(from + 32 * i);
        int most = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int v[4] = {(int)d[i].x, (int)d[i].y, (int)d[i].z, (int)d[i].w};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            most = max(most, abs(v[e]));
            x[4 * i + e] = fmaf(v[e], value, x[4 * i + e]);
          }
        }
        if (most >> 30) atomicCAS(limit.error, 0, RANGE);
      }
      turn = turn == 2 ? 0 : turn + 1;
    }
    if (tid < MINE) __stcg(a.delta + (turn == 2 ? 0 : turn + 1) * D + cta * MINE + tid, 0);
  }
  __device__ void norm() {
    float u = 0, q = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      u += x[i];
      q = fmaf(x[i], x[i], q);
    }
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      u += __shfl_xor_sync(~0u, u, o);
      q += __shfl_xor_sync(~0u, q, o);
    }
    if (tid == 0) *(volatile int*)&s.calm = 0;
    float (*stats)[2] = s.stats[stage++ & 1];
    if (lane == 0) {
      stats[w][0] = u;
      stats[w][1] = q;
    }
    meet();
    u = q = 0;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) {
      u += stats[k][0];
      q += stats[k][1];
    }
    per_unit = UNITS / __uint_as_float(max(__float_as_uint(sqrtf(q / D)) & 0x7F800000u, 0x3E000000u));
    const float mean = RMS_NORM ? 0.f : u / D, rstd = rsqrtf(fmaxf(q / D - mean * mean, 0.f) + a.eps);
    const float low = -mean * rstd;
    float scale[16], v[16];
    halves(gain, scale);
    halves(shift, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = fmaf(fmaf(x[i], rstd, low), scale[i], v[i]);
    u32 own[8];
    const Quant z = digits<8>(v, own, lane);
    unit = __shfl_sync(~0u, z.unit, 8 * t);
    offset = __shfl_sync(~0u, z.offset, 8 * t);
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
      for (int i = 0; i < 8; ++i) b[j][i] = (g >> 1) == j ? own[i] : 0;
  }

  // Tiles of 16 rows. Two at a time: the products of one run while the other's pages are awaited.
  struct Tile {
    int low[2][4], high[2][4];
    float scale0, scale8;
  };
  template <bool LISTED>
  __device__ void tile(Tile& c, int n) {  // n rows of it are there, more are garbage
    u32 bar, bar8 = 0;
    const u32 p = page<LISTED>(bar), q = ROWS == 16 ? p + row_at(8) : n > 8 ? page<LISTED>(bar8) : p;
#pragma unroll
    for (int k = 0; k < 8; ++k) c.low[k >> 2][k & 3] = c.high[k >> 2][k & 3] = 0;
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      const u32 at = row_at(row) + (WARPS * j + w) * 64 + t * 16;
      piece(p + at, q + at, b[j], c.low[j & 1], c.high[j & 1]);
    }
    c.scale0 = c.scale8 = 0;
    if (t < GROUPS) {
      const u32 at = SCALES_AT + row * ROW_SCALES + 2 * (WARPS * t + w);
      c.scale0 = load_half(p + at);
      c.scale8 = load_half((ROWS == 16 ? p + 8 * ROW_SCALES : q) + at);
    }
    done(bar);
    if (ROWS == 8 && n > 8) done(bar8);
  }
  __device__ float2 sums(const Tile& c) const {
    int low[4], high[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      low[k] = c.low[0][k] + c.low[1][k];
      high[k] = c.high[0][k] + c.high[1][k];
    }
    return {(join(low[0], low[1], high[0], high[1]) - offset) * (c.scale0 * unit),
            (join(low[2], low[3], high[2], high[3]) - offset) * (c.scale8 * unit)};
  }
  // Sums of two tiles over a quad: lane t ends with `row` + 8 (t & 1) of tile t >> 1.
  __device__ void finish(const Tile& c, const Tile& d, int i) {
    const float2 u = sums(c), v = sums(d);
    const bool t0 = t & 1, t1 = t & 2;
    const float p = (t0 ? u.y : u.x) + __shfl_xor_sync(~0u, t0 ? u.x : u.y, 1),
                q = (t0 ? v.y : v.x) + __shfl_xor_sync(~0u, t0 ? v.x : v.y, 1);
    s.products[i + (t >> 1)][w][row + 8 * t0] = (t1 ? q : p) + __shfl_xor_sync(~0u, t1 ? p : q, 2);
  }
  template <bool LISTED>
  __device__ void rows(int n) {
    for (int i = 0; i < n; i += 32) {
      Tile c, d;
      tile<LISTED>(c, n - i);
      if (i + 16 < n) tile<LISTED>(d, n - i - 16);
      else d = c;  // an odd last one's twin is never read
      finish(c, d, i / 16);
    }
    meet();
  }
  __device__ float row_sum(int at) const {
    float v = 0;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) v += s.products[at >> 4][k][at & 15];
    return v;
  }

  __device__ void predict_first() {  // FIRST_ROWS rows: hidden values of the predictor, which `send_hidden` adds up
    int low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
    u32 bar;
    const u32 p = page(bar) + (FIRST_ROWS > 1 ? g & 1 : 0) * ROW;
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      const u32 at = p + (WARPS * j + w) * 64 + t * 16;
      piece(at, at, b[j], low, high);
    }
    done(bar);
    const float f = quad_sum((join(low[0], low[1], high[0], high[1]) - offset) * unit);
    if (t == 0 && g < FIRST_ROWS) s.products[8][w][g] = f;
  }
  __device__ void send_hidden(int l, const Layer& layer) {
    const int i = tid - (THREADS - 32);  // by the last warp, since the first ones send q, k and v
    if (i < 0 || i >= FIRST_ROWS) return;
    const int mine = cta * FIRST_ROWS + i;
    const float v = row_sum(8 * 16 + i) * __ldg((const float*)layer.first_scales + mine);
    put_tagged(a.hidden + mine, __float_as_uint(PREDICTOR_RELU && v <= 0 ? 0.f : v), tag_of(a, launch, l));
  }
  // OWN neurons: their mask. early: this thread's hidden value, if it was there before.
  __device__ void predict_second(int l, const Layer& layer, u64 early) {
    const bool mine = w < OWN_TILES;
    const bool has0 = OWN % 16 == 0 || w * 16 + g < OWN, has8 = OWN % 16 == 0 || w * 16 + g + 8 < OWN;  // if mine
    const int row = cta * OWN + (has0 ? w * 16 + g : 0), eighth = cta * OWN + (has8 ? w * 16 + g + 8 : 0);
    float scale0 = 0, scale8 = 0, bias0 = 0, bias8 = 0, threshold = 0;
    if (mine) {
      scale0 = __ldg((const float*)layer.second_scales + row);
      scale8 = __ldg((const float*)layer.second_scales + eighth);
      bias0 = __ldg((const float*)layer.second_bias + row);
      bias8 = __ldg((const float*)layer.second_bias + eighth);
      threshold = __ldg((const float*)layer.threshold);
    }
    if (tid < RANK) {
      u64 v = early;
      int tries = 0;
      while ((u32)(v >> 32) != tag_of(a, launch, l) && !((++tries & 255) == 0 && limit.late(PREDICTOR)))
        v = get_word(a.hidden + tid);
      s.z[spread(tid)] = __uint_as_float((u32)v);
    }
    meet();
    u32 bar;
    const u32 p = page(bar);
    if (mine) {
      float v[16];
      u32 own[8];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        v[i] = (g >> 1) < RANK / 128 ? s.z[spread((g >> 1) * 128 + 32 * t + 16 * (g & 1)) + i] : 0.f;
      const Quant z = digits<8>(v, own, lane);
      const float unit2 = __shfl_sync(~0u, z.unit, 8 * t);
      const int offset2 = __shfl_sync(~0u, z.offset, 8 * t);
      int low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < RANK / 128; ++j) {
        u32 m[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) m[i] = (g >> 1) == j ? own[i] : 0;
        const u32 at = p + (w * 16 + g) * (RANK / 2) + j * 64 + t * 16;
        piece(at, at + 8 * (RANK / 2), m, low, high);
      }
      const float score0 = quad_sum((join(low[0], low[1], high[0], high[1]) - offset2) * unit2) * scale0 + bias0;
      const float score8 = quad_sum((join(low[2], low[3], high[2], high[3]) - offset2) * unit2) * scale8 + bias8;
      const u32 m0 = __ballot_sync(~0u, has0 && (every || score0 > threshold)),
                m8 = __ballot_sync(~0u, has8 && (every || score8 > threshold));
      if (lane == 0) {
        u32 m = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) m |= (m0 >> 4 * k & 1) << k | (m8 >> 4 * k & 1) << (k + 8);
        s.own_mask[w] = m;
      }
    }
    done(bar);
    if (lane == 0) {
      if (!mine) s.own_mask[w] = 0;
      bar_arrive(shared_at(&s.masked));
    }
  }

  // A team's heads over this program's share of the positions, and the new one in the first warp of who has fewest.
  // Returns the predictor's hidden value of this thread, if it has come meanwhile.
  __device__ u64 attend(int l) {
    constexpr int E = HEAD_DIM / 8, PIECES = HEAD_DIM / 64;  // numbers of a lane, in pieces of 8
    const int where = lane >> 3, sub = lane & 7;
    float q[E], o[MIXED][E] = {}, m[MIXED], d[MIXED] = {};
    const auto ask = [&](int part, float (&to)[E]) {
#pragma unroll
      for (int k = 0; k < PIECES; ++k)
#pragma unroll
        for (int e = 0; e < 8; ++e) to[8 * k + e] = s.exchanged[spread(part * HEAD_DIM + 64 * k + 8 * sub) + e];
    };
    for (float& most : m) most = -1e30f;
    if (MIXED == 1) ask(team, q);
    const bool has_new = partner == (last + POSITIONS - 1) / POSITIONS % PARTNERS && w == 0;
    for (int c = partner;; c += PARTNERS) {
      const bool cached = c * POSITIONS < last;
      if (!cached && !has_new) break;
      float kk[E], vv[E];
      bool ok;
      if (cached) {
        u32 bar;
        const u32 p = page(bar) + (w * 4 + where) * HEAD_DIM * 2 + sub * 16;
        ok = c * POSITIONS + w * 4 + where < last;
        uint4 kp[PIECES], vp[PIECES];
#pragma unroll
        for (int k = 0; k < PIECES; ++k) {
          kp[k] = load4(p + 128 * k);
          vp[k] = ok ? load4(p + KV_BYTES + 128 * k) : uint4{0, 0, 0, 0};  // what lies behind the last may be NaN
        }
        halves(kp, kk);
        halves(vp, vv);
        done(bar);
      } else {
        ask(SHARE, kk);
        ask(SHARE + 1, vv);
        ok = where == 0;
      }
#pragma unroll
      for (int j = 0; j < MIXED; ++j) {
        if (MIXED > 1) ask(team * MIXED + j, q);
        float z = 0;
#pragma unroll
        for (int e = 0; e < E; ++e) z = fmaf(q[e], kk[e], z);
        z += __shfl_xor_sync(~0u, z, 1);
        z += __shfl_xor_sync(~0u, z, 2);
        z += __shfl_xor_sync(~0u, z, 4);
        if (!ok) z = -1e30f;
        const float M = fmaxf(m[j], z), f = exp2f(m[j] - M), p = ok ? exp2f(z - M) : 0.f;
        m[j] = M;
        d[j] = d[j] * f + p;
#pragma unroll
        for (int e = 0; e < E; ++e) o[j][e] = fmaf(p, vv[e], o[j][e] * f);
      }
      if (!cached) break;
    }
    const u64 early = MODE == SELECT && tid < RANK ? get_word(a.hidden + tid) : 0;
    // Four positions of a warp become one, of which each lane keeps a quarter. Then warps, then the programs of a team.
#pragma unroll
    for (int j = 0; j < MIXED; ++j) {
      float M = fmaxf(m[j], __shfl_xor_sync(~0u, m[j], 8));
      M = fmaxf(M, __shfl_xor_sync(~0u, M, 16));
      const float f = exp2f(m[j] - M);
      d[j] *= f;
      d[j] += __shfl_xor_sync(~0u, d[j], 8);
      d[j] += __shfl_xor_sync(~0u, d[j], 16);
      const bool b3 = lane & 8, b4 = lane & 16;
      float half[E / 2], quarter[E / 4];
#pragma unroll
      for (int e = 0; e < E / 2; ++e)
        half[e] =
            ((b3 ? o[j][E / 2 + e] : o[j][e]) * f) + __shfl_xor_sync(~0u, (b3 ? o[j][e] : o[j][E / 2 + e]) * f, 8);
#pragma unroll
      for (int e = 0; e < E / 4; ++e)
        quarter[e] = (b4 ? half[E / 4 + e] : half[e]) + __shfl_xor_sync(~0u, b4 ? half[e] : half[E / 4 + e], 16);
      const int at = E == 16 ? 64 * b3 + 8 * sub + 4 * b4 : 8 * sub + 4 * b3 + 2 * b4;
#pragma unroll
      for (int e = 0; e < E / 4; ++e) s.warp_parts[j][w][at + e] = quarter[e];
      if (lane == 0) {
        s.warp_norms[j][w][0] = M;
        s.warp_norms[j][w][1] = d[j];
      }
    }
    meet();
#pragma unroll
    for (int i = tid; i < MIXED * HEAD_DIM; i += THREADS) {
      const int j = i / HEAD_DIM, e = i % HEAD_DIM, part = j * PARTNERS + partner;
      const float (*norms)[2] = s.warp_norms[j];
      float most = -1e30f, sum = 0, total = 0;
#pragma unroll
      for (int k = 0; k < WARPS; ++k) most = fmaxf(most, norms[k][0]);
#pragma unroll
      for (int k = 0; k < WARPS; ++k) {
        const float f = exp2f(norms[k][0] - most);
        sum = fmaf(f, s.warp_parts[j][k][e], sum);
        total = fmaf(f, norms[k][1], total);
      }
      send(PARTS_AT + team * TEAM_WORDS + part * HEAD_DIM + e, sum, l);
      if (e < 2) send(PARTS_AT + team * TEAM_WORDS + NORMS + 2 * part + e, e ? total : most, l);
    }
    return early;
  }

  __device__ void project_out() {
    constexpr int TURNS = OUT_PAGES / 2;
    float sum0[TURNS] = {}, sum8[TURNS] = {};
#pragma unroll 1
    for (int j = 0; j < MIXED; ++j) project_head<TURNS>(j * PARTNERS, sum0, sum8);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int to = (2 * i + (t >> 1)) * 256 + (2 * w + (t & 1)) * 16 + g;
      put_sum(to, sum0[i]);
      put_sum(to + 8, sum8[i]);
    }
  }
  // The head whose partners' parts lie from `part` on.
  template <int TURNS>
  __device__ void project_head(int part, float (&sum0)[TURNS], float (&sum8)[TURNS]) {
    constexpr int N = HEAD_DIM / 16;
    float v[2 * N], f[PARTNERS], M = -1e30f, d = 0;
#pragma unroll
    for (int k = 0; k < PARTNERS; ++k) {
      f[k] = s.parts[spread(NORMS + 2 * (part + k))];
      M = fmaxf(M, f[k]);
    }
#pragma unroll
    for (int k = 0; k < PARTNERS; ++k) {
      f[k] = exp2f(f[k] - M);
      d = fmaf(f[k], s.parts[spread(NORMS + 2 * (part + k)) + 1], d);
    }
#pragma unroll
    for (int k = 0; k < PARTNERS; ++k) f[k] = __fdividef(f[k], d);
#pragma unroll
    for (int i = 0; i < 2 * N; i += 4) {
      v[i] = v[i + 1] = v[i + 2] = v[i + 3] = 0;
#pragma unroll
      for (int k = 0; k < PARTNERS; ++k) {
        const float4 u = *(const float4*)(s.parts + spread((part + k) * HEAD_DIM + 4 * N * t + 2 * N * (g & 1) + i));
        v[i] = fmaf(f[k], u.x, v[i]);
        v[i + 1] = fmaf(f[k], u.y, v[i + 1]);
        v[i + 2] = fmaf(f[k], u.z, v[i + 2]);
        v[i + 3] = fmaf(f[k], u.w, v[i + 3]);
      }
    }
    u32 own[N], m[4][N];
    const Quant z = digits<N>(v, own, lane);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < N; ++i) m[j][i] = (g >> 1) == j ? own[i] : 0;
    // A warp has two tiles of 16 columns in each page. Four tiles share an accumulator, tile j in columns 2 j, 2 j + 1.
    int low[TURNS][4] = {}, high[TURNS][4] = {};
    float scale0[TURNS], scale8[TURNS];
#pragma unroll
    for (int i = 0; i < OUT_PAGES; ++i) {
      u32 bar;
      const u32 p = page(bar);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const u32 at = p + ((2 * w + k) * 16 + g) * (HEAD_DIM / 2) + t * (HEAD_DIM / 8);
        piece(at, at + 8 * (HEAD_DIM / 2), m[2 * (i & 1) + k], low[i / 2], high[i / 2]);
      }
      if (t >> 1 == (i & 1)) {
        const u32 at = p + OUT_BYTES + ((2 * w + (t & 1)) * 16 + g) * 2;
        scale0[i / 2] = load_half(at);
        scale8[i / 2] = load_half(at + 16);
      }
      done(bar);
    }
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int units0 = join(low[i][0], low[i][1], high[i][0], high[i][1]) - z.offset,
                units8 = join(low[i][2], low[i][3], high[i][2], high[i][3]) - z.offset;
      sum0[i] = fmaf(units0, scale0[i] * z.unit, sum0[i]);
      sum8[i] = fmaf(units8, scale8[i] * z.unit, sum8[i]);
    }
  }

  // This program's columns of n neurons' rows, times s.kept. What is rounded is a neuron times a row's scale, in a unit
  // of 128 columns, so that a large scale makes its own columns coarser alone. Lane (g, t) has WORDS words of 8 neurons.
  // largest: of down's scales in these columns.
  __device__ void down(int n, float largest) {
    float most = 0;
    for (int k = lane; k < n; k += 32) most = larger(most, s.kept[spread(k)]);
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) most = larger(most, __shfl_xor_sync(~0u, most, o));
    const float unit2 = most * largest * (1.f / 32512.f), inverse = unit2 > 0 ? 1.f / unit2 : 0.f;
    const bool odd = g & 1;
    const u32 select = odd ? 0x0040 : 0x0051, flip = odd ? 0x80808080u : 0;
    int acc[WORDS][4] = {}, raised[4] = {};
    for (int k0 = 0; k0 < n; k0 += PIECES) {
      u32 bar, word[8][WORDS], f[8];
      const u32 p = page<true>(bar);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int k = 2 * t + (i & 1) + 8 * (i >> 1);
        const float h = k0 + k < n ? s.kept[spread(k0 + k)] : 0.f,
                    scale = load_half(p + PIECE_SCALES_AT + k * PIECE_SCALES + w * CUT / 128 * 2);
        f[i] = __float_as_uint(fmaf((GATED ? h != 0 : h > 0) ? h * scale : 0.f, inverse, MAGIC));
        const u32 at = p + piece_at(k) + (w * CUT / 2 + g * 4 * WORDS);
        if constexpr (WORDS == 2) {
          const uint2 u = load2(at);
          word[i][0] = u.x;
          word[i][1] = u.y;
        } else word[i][0] = load1(at);
      }
      done(bar);
      u32 digit[2];
#pragma unroll
      for (int k = 0; k < 2; ++k)
        digit[k] = __byte_perm(__byte_perm(f[4 * k], f[4 * k + 1], select),
                               __byte_perm(f[4 * k + 2], f[4 * k + 3], select), 0x5410) ^
                   flip;
      mma(raised, 0x08080808, 0x08080808, 0x08080808, 0x08080808, digit[0], digit[1]);
      constexpr u32 L = 0x0F0F0F0Fu, H = 0xF0F0F0F0u;
#pragma unroll
      for (int k = 0; k < WORDS; ++k) {
        u32 c[2][4];  // 4 x 4 bytes turned: byte j of four neurons
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const u32 a0 = __byte_perm(word[4 * q][k], word[4 * q + 1][k], 0x5140),
                    a1 = __byte_perm(word[4 * q + 2][k], word[4 * q + 3][k], 0x5140);
          const u32 a2 = __byte_perm(word[4 * q][k], word[4 * q + 1][k], 0x7362),
                    a3 = __byte_perm(word[4 * q + 2][k], word[4 * q + 3][k], 0x7362);
          c[q][0] = __byte_perm(a0, a1, 0x5410);
          c[q][1] = __byte_perm(a0, a1, 0x7632);
          c[q][2] = __byte_perm(a2, a3, 0x5410);
          c[q][3] = __byte_perm(a2, a3, 0x7632);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
          mma(acc[k], c[0][j] & L, c[0][j] & H, c[1][j] & L, c[1][j] & H, (g >> 1) == j ? digit[0] : 0,
              (g >> 1) == j ? digit[1] : 0);
      }
    }
#pragma unroll
    for (int k = 0; k < WORDS; ++k) {  // byte t of a word: columns 0, 4, 1, 5, and two on
      const int* const sum = acc[k];
      const int to = w * CUT + (g * WORDS + k) * 8 + (t >> 1) + 4 * (t & 1);
      put_sum(to, (((sum[0] - raised[0]) << 8) + sum[1] - raised[1]) * unit2);
      put_sum(to + 2, ((((sum[2] >> 4) - raised[2]) << 8) + (sum[3] >> 4) - raised[3]) * unit2);
    }
  }

  __device__ void attention(int l, const Layer& layer) {
    const int which = tid / PART_ROWS, at = rank * PART_ROWS + tid % PART_ROWS;  // q's, then k, then v
    const bool mine = tid < QKV_ROWS;
    const float bias = BIASES && mine ? half_at(layer.qkv_bias, (head * (SHARE + 2) + which) * HEAD_DIM + at) : 0.f,
                out_bias = ask_bias(layer.out_bias);
    const float2 turn =
        ROTARY && mine && which <= SHARE ? __ldg(a.turns + (last * HEAD_DIM + at) / 2) : make_float2(1.f, 0.f);
    if (selects(layer)) predict_first();
    rows<false>(QKV_ROWS);
    if (selects(layer)) send_hidden(l, layer);
    float v = mine ? row_sum(tid) + bias : 0.f;
    if (ROTARY) {
      const float other = __shfl_xor_sync(~0u, v, 1);
      v = fmaf(v, turn.x, at & 1 ? other * turn.y : -other * turn.y);
    }
    if (mine) {
      const u16 rounded = to_half(v);
      const float per_score = rsqrtf((float)HEAD_DIM) * 1.4426950408889634f;
      send(which * HEAD_DIM + at, which < SHARE ? v * per_score : half_of(rounded), l);
      u8* const cache = which == SHARE ? layer.k : layer.v;
      if (which >= SHARE) ((u16*)cache)[((u64)head * a.capacity + last) * HEAD_DIM + at] = rounded;
    }
    receive<(SHARE + 2) * HEAD_DIM>(0, s.exchanged, l);
    const u64 early = attend(l);
    if (selects(layer)) predict_second(l, layer, early);  // while the others' parts come
    receive<TEAM_WORDS>(PARTS_AT + team * TEAM_WORDS, s.parts, l);
    project_out();
    add_bias(out_bias);
  }
  __device__ float activated(float v) const {
    const float kept = v <= THRESHOLD ? 0.f : v;  // keeps a NaN
    return SQUARED ? kept * kept : kept;
  }
  // Those of n numbers in s.h that are not zero, into s.kept, with their neurons from `first` on. Returns how many.
  __device__ int compact(int n, int first) {
    const int i = 2 * tid;
    const float v[2] = {i < n ? s.h[spread(i)] : 0.f, i + 1 < n ? s.h[spread(i + 1)] : 0.f};
    const u32 m[2] = {__ballot_sync(~0u, v[0] != 0), __ballot_sync(~0u, v[1] != 0)}, before = (1u << lane) - 1;
    if (lane == 0) s.counts[w] = __popc(m[0]) + __popc(m[1]);
    meet();
    int at = __popc(m[0] & before) + __popc(m[1] & before), all = 0;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) {
      at += k < w ? s.counts[k] : 0;
      all += s.counts[k];
    }
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (v[k] != 0) {
        s.kept[spread(at)] = v[k];
        s.ids[at++] = first + i + k;
      }
    if (tid == 0) s.n = all;
    meet();
    if (tid == 0) bar_arrive(shared_at(&s.live));
    return all;
  }
  __device__ void mlp(int l, const Layer& layer) {
    const float down_bias = ask_bias(layer.down_bias),
                largest = __ldg((const float*)layer.largest + (quarter * QUARTER + w * CUT) / 128);
    const int words = HIDDEN_AT + (rank - quarter) * OWN;  // of the squad
    int all = SQUAD_OWN, first = quarter * OWN, n = OWN;   // of its neurons, this program's
    if (selects(layer)) {
      limit.wait(shared_at(&s.listed), lists++ & 1, LIST);
      all = s.n;
      first = part_of(all, quarter);
      n = part_of(all, quarter + 1) - first;
    }
    const float bias = tid < n ? half_at(layer.up_bias, selects(layer) ? s.ids[first + tid] : cta * OWN + tid) : 0.f;
    if (selects(layer)) rows<true>(n);
    else rows<false>(n);
    float v = tid < n ? activated(row_sum(tid) + bias) : 0.f;
#if GATED
    int open = n;
    if (skips(layer)) {
      if (tid < n) s.h[spread(tid)] = v;
      meet();
      open = compact(n, cta * OWN);
    } else meet();
    const int id = tid >= open ? 0 : MODE == READ_ALL ? cta * OWN + tid : s.ids[(selects(layer) ? first : 0) + tid];
    const float factor_bias = BIASES && tid < open ? half_at(layer.factor_bias, id) : 0.f;
    rows<MODE != READ_ALL>(open);
    const float product = tid < open ? row_sum(tid) + factor_bias : 0.f, factor = BOTH ? activated(product) : product;
    if (skips(layer)) {
      if (tid < open) s.h[spread(id - cta * OWN)] = s.kept[spread(tid)] * factor;
      meet();
      if (tid < n) v = s.h[spread(tid)];
    } else v *= factor;
#endif
    if (tid < n) send(words + first + tid, v, l);
    receive<SQUAD_OWN>(words, skips(layer) ? s.h : s.kept, l, all);
    if (skips(layer)) all = compact(all, (cta - quarter) * OWN);
    down(all, largest);
    add_bias(down_bias);
  }
  __device__ void run() {
    ask_norm(layers[0].gain1, layers[0].shift1);
    take(true);
#pragma unroll 1
    for (int half = 0; half < 2 * a.n_layers; ++half) {  // one code for what both kinds of halves share
      const int l = half >> 1;
      const bool second = half & 1;
      const Layer &layer = layers[l], &next = layers[min(l + 1, a.n_layers - 1)];
      norm();
      if (second) mlp(l, layer);
      else attention(l, layer);
      ask_norm(second ? next.gain1 : layer.gain2, second ? next.shift1 : layer.shift2);
      barrier(second ? quarter * QUARTER : partner * COLUMNS, second ? QUARTER : COLUMNS);
      take(false);
    }
    if (tid == 0) *(volatile int*)&s.calm = 0;
    if (cta == 0) {
      const bool failed = get_acquired(limit.error) != 0;  // a step that failed is NaN, which ends its row by name
      if (holds)
        for (int i = 0; i < 16; ++i) a.out[column + i] = failed ? __uint_as_float(0x7FC00000u) : x[i];
      if (tid == 0) *(volatile u32*)a.sync = launch + 1 < LAUNCHES ? launch + 1 : 0;
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
    decoder_layers(const Layer* layers, const float* x, float* out, const int* position, const int* row_state,
                   int* delta, u64* heads, u64* hidden, u64* masks, u32* sync, int n_layers, int capacity, float eps,
                   const float2* turns) {
  const Arguments a = {layers, x,     out,  position, row_state, delta, heads,
                       hidden, masks, sync, n_layers, capacity,  eps,   turns};
  SHARED_MEMORY(ring);
  Shared& s = *(Shared*)(ring + ALL_PAGES * PAGE);
  Layer* const table = (Layer*)(ring + ALL_PAGES * PAGE + SMALL);
  if (threadIdx.x == 0) {
    for (int i = 0; i < ALL_PAGES; ++i) {
      bar_init(shared_at(&s.full[i]), 1);
      bar_init(shared_at(&s.empty[i]), WARPS);
    }
    bar_init(shared_at(&s.listed), 1);
    bar_init(shared_at(&s.masked), WARPS);
    bar_init(shared_at(&s.live), 1);
    s.dead = s.calm = s.n = 0;
    *(uint4*)s.own_mask = uint4{0, 0, 0, 0};  // who gives up waiting for it hands it on
    s.begun = now();
    bars_ready();
  }
  for (int i = threadIdx.x; i < a.n_layers * (int)(sizeof(Layer) / 8); i += THREADS + 64)
    ((u64*)table)[i] = __ldg((const u64*)a.layers + i);
  const u32 launch = *(volatile u32*)a.sync;  // what the launch before has left
  const int last = min(*a.position, a.capacity - 1);
  __syncthreads();
  const Limit limit = {s, a.sync + 32 * 4, s.begun};
  if (threadIdx.x >= THREADS + 32) Lister(a, limit, s, ring, launch).run();
  else if (threadIdx.x >= THREADS) Producer(a, limit, s, ring, launch, last).run();
  else Consumer(a, limit, s, ring, launch, last, *a.row_state == 2).run();
}
