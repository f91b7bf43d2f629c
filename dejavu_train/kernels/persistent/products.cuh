// Products of whole numbers: inputs as digits, and codes as they lie.
template <int N>
__device__ __forceinline__ void halves(const uint4 (&packed)[N], float (&v)[8 * N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const u32 u[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[8 * i + 2 * e] = half_of(u[e] & 0xFFFF);
      v[8 * i + 2 * e + 1] = half_of(u[e] >> 16);
    }
  }
}

// Of a group of numbers: a unit's value, and 8 times the sum of the units.
struct Quant {
  float unit;
  int offset;
};

// Digits of a group of 16 N numbers. Lane (g, t) brings 2 N neighbouring columns from 4 N t + 2 N (g & 1) on, and leaves
// with the high (g even) or low digits that its columns of B want: register i, byte e = nibble i & 1 of byte e of word
// i / 2 of the lane's words, in the order of formats.int4.
template <int N>
__device__ __forceinline__ Quant digits(const float (&v)[2 * N], u32 (&b)[N], int lane) {
  constexpr int COLUMN[4] = {0, 4, 1, 5};
  const bool odd = lane >> 2 & 1;
  float most = 0;
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) most = larger(most, v[i]);
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) most = larger(most, __shfl_xor_sync(~0u, most, o));
  const float inverse = most > 0 ? __fdividef(32512.f, most) : 0.f;
  int high_sum = 0, low_sum = 0;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    u32 f[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) f[e] = __float_as_uint(fmaf(v[8 * (i >> 1) + 2 * (i & 1) + COLUMN[e]], inverse, MAGIC));
    const u32 high = __byte_perm(__byte_perm(f[0], f[1], 0x0051), __byte_perm(f[2], f[3], 0x0051), 0x5410);
    const u32 low = __byte_perm(__byte_perm(f[0], f[1], 0x0040), __byte_perm(f[2], f[3], 0x0040), 0x5410) ^ 0x80808080u;
    high_sum = __dp4a((int)high, 0x01010101, high_sum);
    low_sum = __dp4a((int)low, 0x01010101, low_sum);
    const u32 other = __shfl_xor_sync(~0u, odd ? high : low, 4);
    b[i] = odd ? other : high;
    b[N / 2 + i] = odd ? low : other;
  }
  int sum = (high_sum << 8) + low_sum;
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
  return {most * (1.f / 32512.f), sum * 8};
}

// 16 rows x 128 columns of codes, or x 64: lane (g, t) has 16 (8) bytes of one row and as many of the eighth behind it.
__device__ __forceinline__ void piece(u32 row, u32 eighth, const u32 (&b)[8], int (&low)[4], int (&high)[4]) {
  constexpr u32 L = 0x0F0F0F0Fu, H = 0xF0F0F0F0u;
  const uint4 p = load4(row), q = load4(eighth);
  mma(low, p.x & L, q.x & L, p.y & L, q.y & L, b[0], b[2]);
  mma(high, p.x & H, q.x & H, p.y & H, q.y & H, b[1], b[3]);
  mma(low, p.z & L, q.z & L, p.w & L, q.w & L, b[4], b[6]);
  mma(high, p.z & H, q.z & H, p.w & H, q.w & H, b[5], b[7]);
}
__device__ __forceinline__ void piece(u32 row, u32 eighth, const u32 (&b)[4], int (&low)[4], int (&high)[4]) {
  constexpr u32 L = 0x0F0F0F0Fu, H = 0xF0F0F0F0u;
  const uint2 p = load2(row), q = load2(eighth);
  mma(low, p.x & L, q.x & L, p.y & L, q.y & L, b[0], b[2]);
  mma(high, p.x & H, q.x & H, p.y & H, q.y & H, b[1], b[3]);
}
__device__ __forceinline__ int join(int a, int b, int c, int d) { return ((a + (c >> 4)) << 8) + b + (d >> 4); }
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
