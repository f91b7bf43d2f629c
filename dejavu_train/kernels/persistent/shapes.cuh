// Constants of one configuration, what programs hold and share, and waits of which none may hang.
#define READ_ALL 0    // MODE: every neuron
#define SKIP_ZEROS 1  // every row of up, and rows of down whose neuron is not zero
#define SELECT 2      // the neurons of the predictor's list. Where PARTLY, a layer without one skips zeros

constexpr int CTAS = 128, RANKS = CTAS / KV_HEADS;              // programs of all, of a head of K and V
constexpr int SHARE = HEADS / KV_HEADS;                         // heads of q that share K and V
constexpr int MIXED = SHARE / TEAMS, PARTNERS = RANKS / TEAMS;  // heads and programs of a team
constexpr int WARPS = 8, THREADS = 32 * WARPS;                  // that multiply; two warps more fetch
constexpr int ROW = D / 2, ROW_SCALES = D / 64;                 // bytes of a row of codes and of its scales
constexpr int ROWS = 16384 / ROW;                               // of a page
constexpr int GROUPS = D / 128 / WARPS;                         // of a warp, of a row
constexpr int PART_ROWS = HEAD_DIM / RANKS;                     // of a program, of each of q, k and v
constexpr int QKV_ROWS = (SHARE + 2) * PART_ROWS;               // of all of them
constexpr int COLUMNS = D / PARTNERS;                           // of the output projection, of a program
constexpr int OUT_PAGES = COLUMNS / 256, OUT_BYTES = 256 * (HEAD_DIM / 2);
constexpr int OWN = D_FFN / CTAS, OWN_TILES = (OWN + 15) / 16;  // neurons of a program, in tiles of 16
constexpr int SCALES_AT = 16384 + 16 * ROWS;
// Four programs share down of their neurons: each has a quarter of its columns.
constexpr int SQUAD = 4, SQUADS = CTAS / SQUAD, SQUAD_OWN = SQUAD * OWN;
constexpr int QUARTER = D / SQUAD, CUT = QUARTER / WARPS;                     // columns of a program, of a warp
constexpr int WORDS = CUT / 64;                                               // of 8 codes, of a neuron, of a lane
constexpr int PIECE = QUARTER / 2, PIECE_SCALES = QUARTER / 64, PIECES = 32;  // bytes of a neuron; neurons of a page
constexpr int PIECE_SCALES_AT = PIECES * (PIECE + 16);
// Where the share of a squad's program of n neurons begins.
__host__ __device__ constexpr int part_of(int n, int program) { return n * program / SQUAD; }
// Where row r lies in a page, so that lanes that read together meet no bank twice: of rows, and of down's pieces.
__host__ __device__ constexpr int row_at(int r) { return r * ROW + (r >> 2) * 64; }
__host__ __device__ constexpr int piece_at(int r) { return r * PIECE + (r >> 1) * 32; }
constexpr int FIRST_ROWS = (RANK + CTAS - 1) / CTAS, SECOND_BYTES = OWN * RANK / 2;
constexpr int POSITIONS = 32, KV_BYTES = POSITIONS * HEAD_DIM * 2;  // of a page of K (or V)
constexpr int ALL_PAGES = PAGES + LIST_PAGES;                       // of both rings
constexpr int MOST_FLYING = D == 2048 ? 4 : 8, CALM = D == 2048 ? 3 : 2;  // pages on their way, and beside a barrier
constexpr int FLYING = MOST_FLYING < PAGES ? MOST_FLYING : PAGES;         // which are no more than there are
constexpr int MINE = D / CTAS;                                      // columns of x that a program looks after
constexpr int COUNTERS = 8;                                         // of the barrier, a line each
constexpr int NORMS = MIXED * PARTNERS * HEAD_DIM;                  // of a team's words, behind its parts
constexpr int TEAM_WORDS = NORMS + MIXED * PARTNERS * 2, PARTS_AT = (SHARE + 2) * HEAD_DIM;
constexpr int HIDDEN_AT = PARTS_AT + TEAMS * TEAM_WORDS;            // hidden values, of a squad after the other
constexpr float MAGIC = 12582912.f + 128.f;  // 1.5 * 2^23: the whole part in the low bits; 128 rounds the high digit
// Of delta in the power of two below the stream's root mean square. Models without biases keep some in columns of the
// stream: one MLP adds thousands where that is still small.
constexpr float UNITS = BIASES ? 131072.f : 32768.f;
constexpr float LARGEST = 1073741824.f;  // units that a program may add to a column, and all together: 2^30
constexpr u32 LAUNCHES = 3u << 30;       // are counted: all counters then begin anew, and delta's three buffers
constexpr u64 LIMIT_NS = 4000000000ull;  // of a launch, in which every wait gives up

static_assert((D == 2048 || D == 4096) && D_FFN % CTAS == 0 && OWN <= 128, "unsupported widths");
static_assert(PAGE >= SCALES_AT + ROWS * ROW_SCALES, "a page holds rows, and their scales behind them");
static_assert(PAGE >= PIECE_SCALES_AT + PIECES * PIECE_SCALES, "a page holds pieces, and their scales behind them");
static_assert(HIDDEN_AT + RANKS * OWN <= EXCHANGE, "a head's words have no room");
static_assert(COLUMNS <= QUARTER && !(COLUMNS & COLUMNS - 1), "sums have no room");
static_assert(PART_ROWS % ROWS == 0 && QKV_ROWS <= 128 && OUT_PAGES % 2 == 0, "unsupported heads");
static_assert(LAUNCHES % 3 == 0 && LAUNCHES % (1u << 27) == 0, "counters do not begin anew together");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "unsupported head");
static_assert(MODE != SELECT || (RANK % 128 == 0 && RANK <= 256), "unsupported rank");

// A layer's tensors, in the order of decoder_layers.StepLayer.tensors.
struct Layer {
  const u8 *qkv, *qkv_scales, *qkv_bias, *out, *out_scales, *out_bias;
  const u8 *up, *up_scales, *up_bias;  // of a gated MLP the gate: the map whose products are activated
  const u8 *down, *down_scales, *down_bias, *gain1, *shift1, *gain2, *shift2;
  u8 *k, *v;  // (KV_HEADS, capacity, HEAD_DIM) fp16
  const u8 *first, *first_scales, *second, *second_scales, *second_bias, *threshold;
  const u8* largest;  // (D / 128) fp32: of down's scales of 128 columns
#if GATED
  const u8 *factor, *factor_scales, *factor_bias;  // up behind a gate
#endif
};
__device__ __forceinline__ bool selects(const Layer& layer) { return MODE == SELECT && (!PARTLY || layer.first); }
__device__ __forceinline__ bool skips(const Layer& layer) {
  return MODE == SKIP_ZEROS || (MODE == SELECT && !selects(layer));
}

struct Arguments {
  const Layer* layers;
  const float* x;  // (D) in front of the first layer
  float* out;      // (D) behind the last
  const int *position, *row_state;
  int* delta;           // (3, D) sums
  u64 *heads, *hidden;  // tagged words of heads (KV_HEADS, EXCHANGE) and of RANK
  u64* masks;           // (CTAS, 4) tagged words
  u32* sync;            // words at 32 i: 0 launches, 3 masks, 4 error, 8.. barrier
  int n_layers, capacity;
  float eps;
  const float2* turns;  // (capacity, HEAD_DIM / 2): cosine and sine of neighbouring rows of q and k
};

// The number of layer l of a launch, which tagged words carry.
__device__ __forceinline__ u32 tag_of(const Arguments& a, u32 launch, int l) { return launch * a.n_layers + l + 1; }
// Where word i lies in an array of which lanes read 16 neighbours each, 32 apart: without bank conflicts.
__host__ __device__ constexpr int spread(int i) { return i + i / 32 * 4; }
// Where column c lies in delta: of 128, lanes read 16 neighbours each, of which four at once are whole lines.
__host__ __device__ constexpr int column_at(int c) {
  return (c & ~127) | (c & 3) | (c >> 5 & 3) << 2 | (c >> 4 & 1) << 4 | (c >> 2 & 3) << 5;
}

struct __align__(128) Shared {
  union {  // each is read in front of a meeting, behind which the next is written
    float products[9][WARPS][16];  // tile, warp, row
    float warp_parts[MIXED][WARPS][HEAD_DIM];
    int sums[QUARTER];  // what this program adds into delta, as that lies
  };
  union {
    struct {  // of attention
      __align__(16) float exchanged[spread((SHARE + 2) * HEAD_DIM + 32)], parts[spread(TEAM_WORDS + 32)];
    };
    struct {  // of an MLP
      __align__(16) float h[spread(SQUAD_OWN + 32)], kept[spread(SQUAD_OWN + 32)];
    };
  };
  __align__(16) float z[spread(256)];
  float warp_norms[MIXED][WARPS][2];
  float stats[2][WARPS][2];
  __align__(16) u32 mask[CTAS][4];
  int prefix[CTAS + 1];
  u16 ids[SQUAD_OWN];
  __align__(16) u16 own_mask[WARPS];
  u64 full[16], empty[16], listed, masked, live;
  u64 begun;
  int counts[WARPS], n;
  __align__(8) int calm;  // read together with what follows
  int dead;
};

static_assert(sizeof(Shared) <= SMALL, "Shared is larger than its place");

// A barrier of the warps that multiply.
__device__ __forceinline__ void meet() { meet_first<THREADS>(); }

struct Limit {
  Shared& s;
  u32* error;
  const u64 begun;
  __device__ __noinline__ bool late(int code) const {
    if (*(volatile int*)&s.dead) return true;
    if (now() - begun < LIMIT_NS) return false;
    *(volatile int*)&s.dead = 1;
    atomicCAS(error, 0, code);
    return true;
  }
  __device__ __noinline__ void spin(u32 a, u32 phase, int code) const {
    for (int n = 1; !bar_done(a, phase); ++n)
      if ((n & 255) == 0 && late(code)) return;
  }
  __device__ __forceinline__ void wait(u32 a, u32 phase, int code) const {
    if (!bar_done(a, phase)) spin(a, phase, code);
  }
  __device__ __forceinline__ void reach(const u32* p, u32 want, int code) const {
    for (int n = 1; (int)(get_acquired(p) - want) < 0; ++n)
      if ((n & 1023) == 0 && late(code)) return;
  }
};
enum Fault { SLOT = 1, PAGE_LATE, LIST, BARRIER, PREDICTOR, MASK, LIVE, EXCHANGED, RANGE };  // decoder_layers.FAULTS
