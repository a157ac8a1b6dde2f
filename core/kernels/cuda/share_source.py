"""CUDA C++ of what adapters add inside the 8-bit product: up(down(x)) of each row's own, before anything is stored.

Part of the program of `gemm_source.py`, whose types and macros it uses. down(x) of a row comes from memory into
registers; `up` comes, 16 ranks and a tile's columns at a time, through a ring of slots in shared memory. Warps that the
producer does not need fill it while the tile is multiplied. A tile without adapters costs one empty chunk.
"""

from __future__ import annotations

SHARERS = 96  # threads that fill slots


# Only addresses and copies: tests compile it for the CPU.
CHUNKS = r"""
// Ranks of one adapter of one image. `offset`: where they begin in a row of down(x). No ranks: the tile's last chunk.
struct alignas(16) Chunk { int image, offset, ranks, unused; };
struct Adapter { const u8* up; const int* spans; int ranks; };
__device__ __forceinline__ Adapter adapter_of(const Problem& p, int image, int use) {
  Adapter a = {};
  u64 address = p.adapters[image * p.uses + use];
  if (!address) return a;
  const u64* entry = (const u64*)address + 4 * p.layer;
  a.ranks = (int)entry[3];
  if (a.ranks) { a.up = (const u8*)entry[1]; a.spans = (const int*)entry[2]; }
  return a;
}
// The columns of one row of the tile's weights, in the order in which TMA fetches these: of the output, and of `up`.
struct Column { int out, up; };
__device__ __forceinline__ Column column_of(const Problem& p, const Where& t, int row) {
#if GEGLU
  int n = t.n / 2 + 32 * (row >> 6) + 8 * ((row >> 1) & 3) + ((row >> 3) & 7);
  return {n, n + (row & 1) * p.columns};
#else
  int n = t.n + 32 * (row >> 5) + 8 * ((row >> 1) & 3) + 2 * ((row >> 3) & 3) + (row & 1);
  return {n, n};
#endif
}
// Ranks that any of the tile's columns has: `up` is kept by 64 columns, each with ranks of its own.
__device__ __forceinline__ void ranks_of(const Problem& p, const Where& t, const Adapter& a, int& first, int& last) {
  first = a.ranks; last = 0;
#if GEGLU
  for (int half = 0; half < 2; ++half) {
    int from = t.n / 2 + half * p.columns, to = from + BN / 2, end = (1 + half) * p.columns;
#else
  {
    int from = t.n, to = from + BN, end = p.columns;
#endif
    to = to < end ? to : end;
    for (int tile = from / 64; tile * 64 < to; ++tile) {
      int low = a.spans[3 * tile], high = a.spans[3 * tile + 1];
      if (low < high) { first = low < first ? low : first; last = high > last ? high : last; }
    }
  }
  first &= ~15;  // not by the tile: a column's ranks are summed in the same sixteens whatever lies beside it
}
struct Sixteen { uint4 lo, hi; };  // ranks of a column
__device__ __forceinline__ Sixteen sixteen_of(const Problem& p, const Where& t, const Adapter& a, int at, int row) {
  Column c = column_of(p, t, row);
  uint4 lo = make_uint4(0, 0, 0, 0), hi = lo;
  if (row < BN && c.out < p.columns) {
    const int* span = a.spans + c.up / 64 * 3;
    int first = span[0], last = span[1];
    const u8* from = a.up + ((long long)span[2] + (c.up % 64) * (last - first) + at - first) * 2;
    if (at >= first && at < last) lo = *(const uint4*)from;
    if (at + 8 >= first && at + 8 < last) hi = *(const uint4*)(from + 16);
  }
  return {lo, hi};
}
// Each thread of a product of 16×8×16 gets, of 16 ranks of its column, the four that it has of down(x); beside them
// those of the column eight on.
__device__ __forceinline__ void put(const Problem& p, const Where& t, const Sixteen& s, u8* slot, int row) {
  const uint4 &lo = s.lo, &hi = s.hi;
  u32 even[4] = {lo.x, lo.z, hi.x, hi.z}, odd[4] = {lo.y, lo.w, hi.y, hi.w};
#if GEGLU
  Column c = column_of(p, t, row);
  if (!(row & 1) && c.out < p.columns) {  // hidden is multiplied by the next layer's scale from the start
    float inverse = p.out_inv_scale[p.inverse_step * c.out];
    for (int i = 0; i < 4; ++i) { even[i] = scaled_pair(even[i], inverse); odd[i] = scaled_pair(odd[i], inverse); }
  }
#endif
  uint2* to = (uint2*)(slot + (row >> 4) * 512 + (row & 7) * 64 + (row >> 3 & 1) * 8);
  for (int q = 0; q < 4; ++q) to[2 * q] = make_uint2(even[q], odd[q]);
}
// Chunks of a tile, in the order in which they are added.
template <class Push> __device__ __forceinline__ void each_chunk(const Problem& p, const Where& t, Push push) {
  int image = t.image, end = image + 1;
  if (p.tokens) {  // rows of images follow one another
    int past = t.w + BM < p.width ? t.w + BM : p.width;
    image = t.w / p.tokens; end = (past - 1) / p.tokens + 1;
  }
  for (; image < end; ++image)
    for (int use = 0; use < p.uses; ++use) {
      Adapter a = adapter_of(p, image, use);
      if (!a.ranks) continue;
      int at, last;
      for (ranks_of(p, t, a, at, last); at < last; at += 16)
        push(a, at, Chunk{image, use * p.ranks + at, a.ranks - at, 0});
    }
}
// Four of the chunk's values of down(x) of one row; zeros of rows of other images.
__device__ __forceinline__ uint2 low_of(const Problem& p, const Chunk& c, int pixel, bool valid) {
  int q = 4 * (threadIdx.x & 3), from = c.image * p.tokens;
  bool own = valid && q < c.ranks && (!p.tokens || (pixel >= from && pixel - from < p.tokens));
  uint2 v = make_uint2(0, 0);
  if (own) v = *(const uint2*)((const u8*)p.low + ((long long)pixel * p.low_stride + c.offset + q) * 2);
  return v;
}
"""

# These, too, with barriers and products of the CPU's.
RING = r"""
// In `memory`, of both rings: slots, their chunks, their full barriers, their empty barriers. `slot` counts in both.
struct Ring {
  u8* memory; u32 slot, parity;
  __device__ __forceinline__ u8* up() const { return memory + slot * SLOT_BYTES; }
  __device__ __forceinline__ Chunk& chunk() const { return ((Chunk*)(memory + RINGS * SHARES * SLOT_BYTES))[slot]; }
  __device__ __forceinline__ u32 full() const {
    return shared_address(memory) + RINGS * SHARES * (SLOT_BYTES + 16) + 8 * slot;
  }
  __device__ __forceinline__ u32 empty() const { return full() + 8 * RINGS * SHARES; }
  __device__ __forceinline__ void next() { if (++slot % SHARES == 0) { slot -= SHARES; parity ^= 1; } }
};
__device__ __forceinline__ void push(const Problem& p, const Where& t, Ring& ring, const Adapter& a, int at,
                                     const Chunk& chunk) {
  int thread = threadIdx.x - 32;
  barrier_wait(ring.empty(), ring.parity ^ 1);
  if (chunk.ranks) {
    const int rounds = (BN + SHARERS - 1) / SHARERS;  // all are read before any is written
    Sixteen read[rounds];
    #pragma unroll
    for (int i = 0; i < rounds; ++i) read[i] = sixteen_of(p, t, a, at, thread + i * SHARERS);
    #pragma unroll
    for (int i = 0; i < rounds; ++i)
      if (thread + i * SHARERS < BN) put(p, t, read[i], ring.up(), thread + i * SHARERS);
  }
  if (thread == 0) ring.chunk() = chunk;
  barrier_arrive_local(ring.full());
  ring.next();
}
__device__ __forceinline__ void fill(const Problem& p, u8* memory, int start, int step, int tiles, u32 rank) {
  Ring ring = {memory, 0, 0};
#if TURNS
  u32 other = SHARES, other_parity = 0;
#endif
  for (int tile = start; tile < tiles; tile += step) {
    Where t = locate(p, tile, rank);
    each_chunk(p, t, [&](const Adapter& a, int at, const Chunk& chunk) { push(p, t, ring, a, at, chunk); });
    push(p, t, ring, Adapter{}, 0, Chunk{0, 0, 0, 0});
#if TURNS
    u32 slot = ring.slot, parity = ring.parity;
    ring.slot = other; ring.parity = other_parity; other = slot; other_parity = parity;
#endif
  }
}
struct Share { u32 low[WM][4]; int ranks; };
__device__ __forceinline__ void take(Share& s, const Problem& p, const Rows& r, const Ring& ring) {
  barrier_wait(ring.full(), ring.parity);
  Chunk chunk = ring.chunk();
  s.ranks = __shfl_sync(0xFFFFFFFFu, chunk.ranks, 0);
  if (!s.ranks) return;
  #pragma unroll
  for (int i = 0; i < 2 * WM; ++i) {
    uint2 v = low_of(p, chunk, r.pixel[i], r.valid[i]);
    s.low[i >> 1][i & 1] = v.x; s.low[i >> 1][2 + (i & 1)] = v.y;
  }
}
__device__ __forceinline__ void give_back(Ring& ring) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive_local(ring.empty());
  ring.next();
}
// Not by `wgmma`: its sums must not be written by other instructions, and so it would serialize the product's own.
__device__ __forceinline__ void add_shares(acc_t (&acc)[WM][BN / 2], Share& s, const Problem& p, const Rows& r,
                                           Ring& ring) {
  while (s.ranks) {
    const uint4* up = (const uint4*)ring.up() + (threadIdx.x & 31);
    #pragma unroll
    for (int pair = 0; pair < BN / 16; ++pair) {
      uint4 b = up[32 * pair];
      #pragma unroll
      for (int m = 0; m < WM; ++m) {
        add_product(acc[m] + 8 * pair, s.low[m], b.x, b.y);
        add_product(acc[m] + 8 * pair + 4, s.low[m], b.z, b.w);
      }
    }
    give_back(ring);
    take(s, p, r, ring);
  }
  give_back(ring);
}
"""

SHARE = (
    r"""
#if SHARES
__device__ __forceinline__ u32 scaled_pair(u32 pair, float by) {
  float lo = 0.0f, hi = 0.0f;
  add_pair(lo, hi, pair);
  return pack(lo * by, hi * by);
}
#if HALF
#define KIND "f16"
#else
#define KIND "bf16"
#endif
__device__ __forceinline__ void add_product(acc_t* sums, const u32 (&a)[4], u32 b0, u32 b1) {
  float c[4] = {FLOAT(sums[0]), FLOAT(sums[1]), FLOAT(sums[2]), FLOAT(sums[3])};
  asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
    "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  for (int i = 0; i < 4; ++i) sums[i] = BITS(c[i]);
}
"""
    + CHUNKS
    + RING
    + "#endif\n"
)
