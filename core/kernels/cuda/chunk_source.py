"""CUDA C++ source of prefill attention over pages of 8-bit keys and values for Hopper, compiled by NVRTC.

A block is one tile of `chunk_kernel.tiles` and one key head. One warpgroup fetches pages by bulk copies and converts
each value once to fp16, which holds all levels of both 8-bit types, into operands of `wgmma`; two warpgroups with 64
rows each multiply them, while the next block of keys is converted. The running maximum is of scores plus the logarithm
of the value's scale, so that a weight times its value's scale is at most 1. `chunk_hopper.py` prepares the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.kernels.cuda.decode_source import INSTRUCTIONS
from core.kernels.cuda.device_source import DEVICE

ROWS = 128  # of a tile: tokens times query heads
_KEYS = 64  # of a block: with more, queries do not stay in registers
_STAGES = 4  # blocks under way, as they are stored; and so many converted ones


@dataclass(frozen=True, slots=True)
class ChunkVariant:
    """Compile-time parameters of the kernel.

    `head`: dimensions of a head (64 or 128). `group`: query heads of a key head, and `spread` the rows of a token, a
    power of two. `int8`: keys and values in int8, else E4M3. `half`: queries in fp16, else bf16. `output`: bf16,
    fp16, int8 or e4m3.
    """

    head: int
    group: int
    spread: int
    int8: bool = True
    half: bool = False
    output: str = "bf16"

    @property
    def name(self) -> str:
        """The kernel's name, as profilers show it."""
        kinds = f"{'int8' if self.int8 else 'e4m3'}_{'fp16' if self.half else 'bf16'}_{self.output}"
        return f"chunk_head{self.head}_group{self.group}of{self.spread}_{kinds}"

    @property
    def threads(self) -> int:
        return 384

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: converted and stored blocks, scales, barriers, and room to align it."""
        return _STAGES * (4 * _KEYS * self.head + 2 * _KEYS * self.head + 8 * _KEYS + 12 * _KEYS + 24) + 1024


def _product(name: str, columns: int) -> str:
    """The C++ wrapper of one `wgmma` of 64 rows × `columns` × 16, whose left operand is in registers."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    kind = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16"
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void {name}(float (&d)[{count}], const u32* a, u64 b, int keep) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
    "{kind} {{{registers}}}, {{{left}}}, %{count + 4}, p, 1, 1, 0;\\n}}\\n"
    : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}}
"""


def source(variant: ChunkVariant) -> str:
    """The whole program of one variant."""
    defines = {
        "NAME": variant.name,
        "D": variant.head,
        "G": variant.group,
        "SPREAD": variant.spread,
        "INT8": int(variant.int8),
        "HALF": int(variant.half),
        "OUTPUT": ("bf16", "fp16", "int8", "e4m3").index(variant.output),
        "KEYS": _KEYS,
        "STAGES": _STAGES,
        "WARPS": 4,
    }
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    products = _product("score", _KEYS) + _product("weigh", variant.head)
    return head + DEVICE + INSTRUCTIONS + _TOOLS + products + KERNEL


_TOOLS = r"""
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 88;"); }
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 208;"); }
__device__ __forceinline__ void publish_operands() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Two halves plus two halves.
__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
  u32 r; asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
#define FENCE_ALL(x) \
  { _Pragma("unroll") for (int i_ = 0; i_ < sizeof(x) / 4; ++i_) asm volatile("" : "+f"(x[i_]) :: "memory"); }
"""

KERNEL = r"""
#define PAGE_BYTES (16 * D)
#define PAGES (KEYS / 16)
#define STAGED_BYTES (2 * KEYS * D + 8 * KEYS)  // keys, values, scales of keys, scales of values, as they are stored
#define TILE_BYTES (4 * KEYS * D)               // keys [KEYS, D] in slices of 64 columns, then values [D, KEYS]
#define ALL 0xFFFFFFFFu

// The order and types of these fields are repeated in chunk_hopper.py.
struct Problem {
  const u8* keys; const u8* values; const float* key_scales; const float* value_scales;
  const int* table; const int* positions; const int* tiles;
  const u8* q; const float* inverse; u8* out;
  float scale, cap;                               // scale: of scores, times log2(e)
  int window, table_stride, kv_heads, blocks;     // blocks: all of the grid
};
struct Memory { u32 tiles, staged, scales, staged_full, full, empty; };

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int most(int a, int b) { return a > b ? a : b; }

// Rows of one sequence, and which of its blocks of keys they see: those before `clear` wholly.
struct Tile { int first, rows, sequence, head, count, begin, clear, end; };

__device__ __forceinline__ Tile tile_of(const Problem& p) {
  Tile a;
  int number = p.blocks - 1 - blockIdx.x;  // long ones begin first
  const int* at = p.tiles + number / p.kv_heads * 3;
  a.first = at[0];
  a.rows = at[1];
  a.sequence = at[2];
  a.head = number % p.kv_heads;
  if (a.rows <= 0) return a;
  int lowest = p.positions[a.first];
  a.count = p.positions[a.first + a.rows - 1] + 1;  // positions count up
  a.begin = p.window ? most(lowest + 1 - p.window, 0) / KEYS : 0;
  a.clear = p.window ? 0 : (lowest + 1) / KEYS;
  a.end = (a.count + KEYS - 1) / KEYS;
  return a;
}
// The number of this lane's page of a block: PAGES of them, by four lanes each. Behind the last page it is read again.
__device__ __forceinline__ int page_of(const Problem& p, const Tile& a, int block, int lane) {
  return p.table[(u64)a.sequence * p.table_stride + least(block * PAGES + lane % PAGES, (a.count - 1) / 16)];
}
__device__ __forceinline__ void fetch(const Problem& p, const Memory& m, const Tile& a, int block, int page, int lane) {
  u32 slot = (block - a.begin) % STAGES, at = m.staged + slot * STAGED_BYTES, bar = m.staged_full + 8 * slot;
  const int kind = lane / PAGES, page_at = lane % PAGES;
  u64 number = (u64)page * p.kv_heads + a.head;
  if (lane == 0) barrier_expect(bar, STAGED_BYTES);
  __syncwarp();
  const u8* scales = (const u8*)(kind == 2 ? p.key_scales : p.value_scales) + number * 64;
  const u8* levels = (kind == 0 ? p.keys : p.values) + number * PAGE_BYTES;
  u32 to = kind < 2 ? kind * KEYS * D + page_at * PAGE_BYTES : 2 * KEYS * D + (kind - 2) * 4 * KEYS + page_at * 64;
  if (kind < 4) bulk_load(at + to, kind < 2 ? levels : scales, kind < 2 ? PAGE_BYTES : 64, bar);
  __syncwarp();
}
// Four levels as two pairs of halves.
__device__ __forceinline__ void to_halves(u32 levels, u32& lo, u32& hi) {
#if INT8
  levels ^= 0x80808080u;  // 0 to 255: the last bits of a half from 1024 on
  lo = add_halves(__byte_perm(levels, 0x64646464u, 0x4140), 0xE480E480u);  // -1152
  hi = add_halves(__byte_perm(levels, 0x64646464u, 0x4342), 0xE480E480u);
#else
  lo = e4m3_halves(levels & 0xFFFFu);
  hi = e4m3_halves(levels >> 16);
#endif
}
// 16 levels to columns 16·column on of a row of an operand.
__device__ __forceinline__ void convert(u32 from, u32 to, int row, int column) {
  uint4 v = read4(from);
  u32 x[8];
  to_halves(v.x, x[0], x[1]);
  to_halves(v.y, x[2], x[3]);
  to_halves(v.z, x[4], x[5]);
  to_halves(v.w, x[6], x[7]);
  to += row * 128;
  write4(to + ((2 * column) ^ (row & 7)) * 16, x[0], x[1], x[2], x[3]);
  write4(to + ((2 * column + 1) ^ (row & 7)) * 16, x[4], x[5], x[6], x[7]);
}
__device__ __forceinline__ void produce(const Problem& p, const Memory& m, const Tile& a, int thread) {
  const int lane = thread % 32, warp = __shfl_sync(ALL, thread / 32, 0);
  int page = 0;  // of the next block to be fetched
  if (warp == 0 && a.begin < a.end) {
    page = page_of(p, a, a.begin, lane);
    #pragma unroll 1
    for (int block = a.begin; block < least(a.begin + STAGES, a.end); ++block) {
      fetch(p, m, a, block, page, lane);
      page = page_of(p, a, block + 1, lane);
    }
  }
  #pragma unroll 1
  for (int block = a.begin; block < a.end; ++block) {
    u32 slot = (block - a.begin) % STAGES, turn = (block - a.begin) / STAGES & 1;
    u32 from = m.staged + slot * STAGED_BYTES, to = m.tiles + slot * TILE_BYTES;
    barrier_wait(m.staged_full + 8 * slot, turn);
    barrier_wait(m.empty + 8 * slot, turn ^ 1);
    #pragma unroll 4
    for (int n = 0; n < KEYS * D / 2048; ++n) {  // two tokens, four times 16 channels of each, by eight lanes
      int i = n * 128 + thread, token = i / 8 / (D / 64) * 2 + i / 4 % 2, slice = i / 8 % (D / 64);
      convert(from + token * D + (slice * 4 + i % 4) * 16, to + slice * KEYS * 128, token, i % 4);
    }
    #pragma unroll 4
    for (int n = 0; n < KEYS * D / 2048; ++n) {  // eight channels of a page by eight lanes
      int i = n * 128 + thread;
      convert(from + KEYS * D + i * 16, to + 2 * KEYS * D, i % D, i / D);
    }
    if (thread < KEYS) {
      bool stored = block * KEYS + thread < a.count;
      u32 of_keys = from + 2 * KEYS * D + 4 * thread, at = m.scales + (slot * 3 * KEYS + thread) * 4;
      float value_scale = stored ? fmaxf(read1(of_keys + 4 * KEYS), 1e-30f) : 1.0f;  // normal, for the logarithm
      write1(at, stored ? read1(of_keys) : 0.0f);
      write1(at + 4 * KEYS, log2_(value_scale));
      write1(at + 8 * KEYS, value_scale);
    }
    publish_operands();
    barrier_arrive_local(m.full + 8 * slot);
    warps_sync();
    if (warp == 0 && block + STAGES < a.end) {
      fetch(p, m, a, block + STAGES, page, lane);
      page = page_of(p, a, block + STAGES + 1, lane);
    }
  }
}
__device__ __forceinline__ u32 scaled_query(u32 both, float scale) {
#if HALF
  float2 x = halves(both);
#else
  float2 x = {bf16_low(both), bf16_high(both)};
#endif
  return half_pair(fminf(fmaxf(x.x * scale, -65504.0f), 65504.0f), fminf(fmaxf(x.y * scale, -65504.0f), 65504.0f));
}
__device__ __forceinline__ u32 level(float x) {
  return (u32)__float_as_int(fminf(fmaxf(x, -127.0f), 127.0f) + 12582912.0f) & 255u;
}
__device__ __forceinline__ void store2(u8* out, u64 at, float x, float y) {
#if OUTPUT == 0
  *(u32*)(out + 2 * at) = bf16_pair(x, y);
#elif OUTPUT == 1
  *(u32*)(out + 2 * at) = half_pair(x, y);
#elif OUTPUT == 2
  *(unsigned short*)(out + at) = level(x) | level(y) << 8;
#else
  *(unsigned short*)(out + at) = e4m3_pair(x, y);
#endif
}
// Two rows of a lane: their running maximum and sum of weights.
struct State { float top[2], total[2]; int position[2]; };

__device__ __forceinline__ void all_scores(float (&s)[KEYS / 2], const u32 (&queries)[D / 16][4], u32 tile) {
  const u64 keys = operand(tile);
  FENCE_ALL(s);
  product_fence();
  #pragma unroll
  for (int k = 0; k < D / 16; ++k) score(s, queries[k], keys + k / 4 * (KEYS * 8) + k % 4 * 2, k);
  product_commit();
}
__device__ __forceinline__ void all_weighed(float (&o)[D / 2], const u32 (&weights)[KEYS / 4], u32 tile) {
  const u64 values = operand(tile + 2 * KEYS * D);
  FENCE_ALL(o);
  product_fence();
  #pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) weigh(o, weights + 4 * k, values + k * 2, 1);
  product_commit();
}
// Scores of a block to weights times values' scales; `fade` is what earlier sums are to be multiplied by.
__device__ __forceinline__ void softmax(
  float (&s)[KEYS / 2], State& a, float (&fade)[2], u32 scales, const Problem& p, int first, bool clear, int t
) {
  float above[2] = {a.top[0], a.top[1]};
  scales += 8 * t;
  #pragma unroll
  for (int j = 0; j < KEYS / 8; ++j) {
    float2 scale = read2(scales + 32 * j);
    s[4 * j] *= scale.x;
    s[4 * j + 1] *= scale.y;
    s[4 * j + 2] *= scale.x;
    s[4 * j + 3] *= scale.y;
  }
  if (p.cap != 0) {
    const float twice = __fdividef(2.0f, p.cap);
    #pragma unroll
    for (int i = 0; i < KEYS / 2; ++i)
      s[i] = p.cap * 1.4426950408889634f * (1 - __fdividef(2.0f, exp2_(s[i] * twice) + 1));
  }
  if (!clear) {
    #pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
      int seen = first + i / 4 * 8 + 2 * t + i % 2, own = a.position[i / 2 % 2];
      if (seen > own || (p.window && seen <= own - p.window)) s[i] = __int_as_float(0xFF800000);
    }
  }
  #pragma unroll
  for (int j = 0; j < KEYS / 8; ++j) {
    float2 scale = read2(scales + 4 * KEYS + 32 * j);
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      above[i] = fmaxf(above[i], fmaxf(s[4 * j + 2 * i] + scale.x, s[4 * j + 2 * i + 1] + scale.y));
  }
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    above[i] = fmaxf(above[i], __shfl_xor_sync(ALL, above[i], 1));
    above[i] = fmaxf(above[i], __shfl_xor_sync(ALL, above[i], 2));
    fade[i] = exp2_(a.top[i] - above[i]);
    a.top[i] = above[i];
    a.total[i] *= fade[i];
  }
  #pragma unroll
  for (int j = 0; j < KEYS / 8; ++j) {
    float2 scale = read2(scales + 8 * KEYS + 32 * j);
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = exp2_(s[4 * j + 2 * i] - a.top[i]), y = exp2_(s[4 * j + 2 * i + 1] - a.top[i]);
      a.total[i] += x + y;
      s[4 * j + 2 * i] = x * scale.x;
      s[4 * j + 2 * i + 1] = y * scale.y;
    }
  }
}
__device__ __forceinline__ void pack(u32 (&weights)[KEYS / 4], const float (&s)[KEYS / 2]) {
  #pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) weights[i] = half_pair(s[2 * i], s[2 * i + 1]);
}
__device__ __forceinline__ void consume(const Problem& p, const Memory& m, const Tile& a, int group, int thread) {
  const int t = thread % 4, row = 64 * group + thread / 32 * 16 + thread % 32 / 4;
  u64 at[2];
  State state;
  bool real[2];
  u32 queries[D / 16][4];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    int token = (row + 8 * i) / SPREAD, query = (row + 8 * i) % SPREAD;
    real[i] = token < a.rows && query < G;
    state.top[i] = -1e30f;  // finite: of rows that see nothing
    state.total[i] = 0;
    state.position[i] = token < a.rows ? p.positions[a.first + token] : -1;
    at[i] = (u64)((a.first + (real[i] ? token : 0)) * p.kv_heads * G + a.head * G + (real[i] ? query : 0)) * D;
    #pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const u32* from = (const u32*)(p.q + 2 * at[i] + 32 * k) + t;
      queries[k][i] = scaled_query(from[0], p.scale);
      queries[k][i + 2] = scaled_query(from[4], p.scale);
    }
  }
  float o[D / 2], s[KEYS / 2], fade[2];
  u32 weights[KEYS / 4];
  #pragma unroll
  for (int i = 0; i < D / 2; ++i) o[i] = 0;
  u32 slot = 0, turn = 0;
  if (a.begin < a.end) {
    barrier_wait(m.full, 0);
    all_scores(s, queries, m.tiles);
    product_wait<0>();
    FENCE_ALL(s);
    softmax(s, state, fade, m.scales, p, a.begin * KEYS, a.begin < a.clear, t);
    pack(weights, s);
  }
  #pragma unroll 1
  for (int block = a.begin + 1; block < a.end; ++block) {  // its scores beside the products of the block before
    u32 before = slot;
    if (++slot == STAGES) { slot = 0; turn ^= 1; }
    barrier_wait(m.full + 8 * slot, turn);
    all_scores(s, queries, m.tiles + slot * TILE_BYTES);
    all_weighed(o, weights, m.tiles + before * TILE_BYTES);
    product_wait<1>();
    FENCE_ALL(s);
    softmax(s, state, fade, m.scales + slot * 12 * KEYS, p, block * KEYS, block < a.clear, t);
    product_wait<0>();
    FENCE_ALL(o);
    if (thread == 0) barrier_arrive_local(m.empty + 8 * before);
    #pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] *= fade[i / 2 % 2];
    pack(weights, s);
  }
  if (a.begin < a.end) {
    all_weighed(o, weights, m.tiles + slot * TILE_BYTES);
    product_wait<0>();
    FENCE_ALL(o);
  }
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = state.total[i] + __shfl_xor_sync(ALL, state.total[i], 1);
    total += __shfl_xor_sync(ALL, total, 2);
    float unit = __fdividef(1.0f, fmaxf(total, 1e-30f));
    if (real[i]) {
      const float* inverse = p.inverse + at[i] % (p.kv_heads * G * D) + 2 * t;
      #pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        float2 b = p.inverse ? *(const float2*)(inverse + 8 * j) : float2{1.0f, 1.0f};
        store2(p.out, at[i] + 8 * j + 2 * t, o[4 * j + 2 * i] * unit * b.x, o[4 * j + 2 * i + 1] * unit * b.y);
      }
    }
  }
}
extern "C" __global__ void __launch_bounds__(384, 1) NAME(const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) u8 memory[];
  Memory m;
  m.tiles = (shared_address(memory) + 1023) & ~1023u;
  m.staged = m.tiles + STAGES * TILE_BYTES;
  m.scales = m.staged + STAGES * STAGED_BYTES;
  m.staged_full = m.scales + STAGES * 12 * KEYS;
  m.full = m.staged_full + 8 * STAGES;
  m.empty = m.full + 8 * STAGES;
  const Tile a = tile_of(p);
  if (a.rows <= 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(m.staged_full + 8 * i, 1);
      barrier_init(m.full + 8 * i, 128);
      barrier_init(m.empty + 8 * i, 2);
    }
    barrier_publish();
  }
  __syncthreads();
  const int group = __shfl_sync(ALL, threadIdx.x / 128, 0);
  if (group == 0) { fewer_registers(); produce(p, m, a, threadIdx.x); }
  else { more_registers(); consume(p, m, a, group - 1, threadIdx.x % 128); }
}
"""
