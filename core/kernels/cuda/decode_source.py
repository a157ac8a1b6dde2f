"""CUDA C++ source of decode attention over pages of 8-bit keys and values for Hopper, compiled by NVRTC.

Decode is bound by reading the cache once, so reads never pause. Blocks are persistent: producer warps walk the
block's parts of sequences and keep a ring of pages in flight by bulk copies, across parts; consumer warps take two
pages (32 tokens) of a part in turn, each with a softmax of its own, and merge theirs at the part's end in a fixed
order. Tensor cores multiply keys and values as they are stored: a query and a weight are each the sum of two numbers
in 8 bits, the second of what the first leaves. The running maximum is of scores plus the logarithm of the value's
scale, so that the largest weight of a value's level is 1. `decode_hopper.py` prepares the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.kernels.cuda.device_source import DEVICE

SHARED_BYTES = 227 * 1024  # per multiprocessor on Hopper
_RESERVED = 1024  # of it per block
_HEADERS = 3  # parts whose queries are in shared memory
_MOST_STAGES, _PRODUCERS = 24, 2


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """Compile-time parameters of the kernel.

    `head`: dimensions of a head (64, 128 or 256). `group`: query heads of a key head, at most 8. `int8`: keys and
    values in int8, else E4M3. `half`: queries in fp16, else bf16. `output`: bf16, fp16, int8 or e4m3. `part`: least
    tokens of a part. `warps` that consume. `resident`: blocks per multiprocessor.
    """

    head: int
    group: int
    int8: bool = True
    half: bool = False
    output: str = "bf16"
    part: int = 256
    warps: int = 4
    resident: int = 2

    @property
    def name(self) -> str:
        """The kernel's name, as profilers show it."""
        kinds = f"{'int8' if self.int8 else 'e4m3'}_{'fp16' if self.half else 'bf16'}_{self.output}"
        return f"decode_head{self.head}_group{self.group}_{kinds}_part{self.part}_{self.warps}x{self.resident}"

    @property
    def threads(self) -> int:
        return 32 * (self.warps + _PRODUCERS)

    @property
    def stage_bytes(self) -> int:
        """Two pages of keys and values, and their scales."""
        return 64 * self.head + 256

    @property
    def _other_bytes(self) -> int:
        """Shared memory beside the ring: queries, what warps merge, barriers."""
        merged = self.warps * (4 if self.group <= 4 else 8) * (4 * (self.head + 8) + 8)
        return _HEADERS * (2 * self.group * self.head + 32) + merged + 16 * (_MOST_STAGES + _HEADERS)

    @property
    def stages(self) -> int:
        """The depth of the ring."""
        return min(_MOST_STAGES, (SHARED_BYTES // self.resident - _RESERVED - self._other_bytes) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return self.stages * self.stage_bytes + self._other_bytes


def source(variant: DecodeVariant, parts: int, unit: int) -> str:
    """The whole program of one variant, of sequences in at most `parts` parts, each a multiple of `unit` tokens."""
    defines = {
        "NAME": variant.name,
        "D": variant.head,
        "G": variant.group,
        "INT8": int(variant.int8),
        "HALF": int(variant.half),
        "OUTPUT": ("bf16", "fp16", "int8", "e4m3").index(variant.output),
        "PART": variant.part,
        "PARTS": parts,
        "UNIT": unit,
        "WARPS": variant.warps,
        "RESIDENT": variant.resident,
        "PRODUCERS": _PRODUCERS,
        "STAGES": variant.stages,
        "HEADERS": _HEADERS,
    }
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return head + DEVICE + INSTRUCTIONS + KERNEL


INSTRUCTIONS = r"""
#if INT8
typedef int acc_t;
#else
typedef float acc_t;
#endif
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3],"
    " %4;" :: "r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(0x12F0000000000000ull) : "memory");  // evicted first
}
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void barrier_publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void warps_sync() {
  asm volatile("bar.sync 1, %0;" :: "n"(32 * WARPS) : "memory");
}
__device__ __forceinline__ uint4 read4(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at)
    : "memory");
  return v;
}
__device__ __forceinline__ float read1(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ float2 read2(u32 at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void write1(u32 at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(at), "f"(x) : "memory");
}
__device__ __forceinline__ void write4(u32 at, int a, int b, int c, int d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Four matrices of eight rows of 16 bytes, whose addresses eight lanes each have; a lane gets four bytes of each.
__device__ __forceinline__ void read_matrices(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
// c += a · b: 16 rows, 8 columns, over 32 bytes.
__device__ __forceinline__ void multiply(acc_t (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if INT8
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
    " {%0, %1, %2, %3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
__device__ __forceinline__ float exp2_(float x) {
  float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r;
}
__device__ __forceinline__ float log2_(float x) {
  float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r;
}
__device__ __forceinline__ float divided(float x, float y) {  // as Triton divides
  float r; asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y)); return r;
}
__device__ __forceinline__ float bf16_low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }
__device__ __forceinline__ float2 halves(u32 x) {
  float2 r;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}"
    : "=f"(r.x), "=f"(r.y) : "r"(x));
  return r;
}
__device__ __forceinline__ u32 bf16_pair(float lo, float hi) {
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
__device__ __forceinline__ u32 half_pair(float lo, float hi) {
  u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
__device__ __forceinline__ u32 e4m3_pair(float lo, float hi) {  // saturating, in the low 16 bits
  u32 r;
  asm("{\n.reg .b16 both;\ncvt.rn.satfinite.e4m3x2.f32 both, %1, %2;\ncvt.u32.u16 %0, both;\n}"
    : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ u32 e4m3_halves(u32 pair) {
  u32 r;
  asm("{\n.reg .b16 both;\ncvt.u16.u32 both, %1;\ncvt.rn.f16x2.e4m3x2 %0, both;\n}" : "=r"(r) : "r"(pair));
  return r;
}
"""

KERNEL = r"""
#define HEADS (G <= 4 ? 4 : 8)  // of a tile; of up to 4 both numbers of a weight are columns of one product
#define PAGE_BYTES (16 * D)
#define STAGE_BYTES (4 * PAGE_BYTES + 256)  // two pages: keys, values, scales of keys, scales of values
#define QUERY_BYTES (2 * G * D)
#define HEADER_BYTES (QUERY_BYTES + 32)
#define LINE (D + 8)  // numbers from one head's sums to the next one's: no two lanes meet in a bank
#define TOP (INT8 ? 127.0f : 448.0f)
#define STEPS (INT8 ? 254.0f : 1.0f)  // of the second number in one of the first
#define ROUND 12582912.0f  // a sum with 1.5 · 2^23 has no fraction bits, and its last bits are the number
#define ALL 0xFFFFFFFFu

// The order and types of these fields are repeated in decode_hopper.py.
struct Problem {
  const u8* keys; const u8* values; const float* key_scales; const float* value_scales;
  const int* table; const int* positions; const int* sequences; const int* index;  // index: none for all rows
  const u8* q; const float* inverse; u8* out;
  float* partials; float* largest; float* sums;  // [rows, heads, reach, D or none], where reach is more than 1
  float scale, cap;                              // scale: of scores, times log2(e)
  int window, table_stride, kv_heads, rows, reach;
};
struct Memory { u32 ring, headers, merged, states, full, empty, ready, taken; };

__device__ __forceinline__ Memory layout(u32 base) {
  Memory m;
  m.ring = base;
  m.headers = m.ring + STAGES * STAGE_BYTES;
  m.merged = m.headers + HEADERS * HEADER_BYTES;
  m.states = m.merged + WARPS * HEADS * LINE * 4;
  m.full = m.states + WARPS * HEADS * 8;
  m.empty = m.full + 8 * STAGES;
  m.ready = m.empty + 8 * STAGES;
  m.taken = m.ready + 8 * HEADERS;
  return m;
}
__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int most(int a, int b) { return a > b ? a : b; }

// A part of a row's tokens for one key head; a block's parts are `gridDim.x` apart, whole sequences' first parts first.
struct Part { int row, place, head, split, sequence, begin, end, pages; };

__device__ __forceinline__ Part part_of(int item, const Problem& p) {
  Part a;
  int each = p.rows * p.kv_heads, count = 0;
  a.split = item / each;
  a.place = item % each / p.kv_heads;
  a.head = item % p.kv_heads;
  a.row = -1;
  a.sequence = 0;
  if (a.split < p.reach) a.row = p.index ? p.index[a.place] : a.place;
  if (a.row >= 0) { count = p.positions[a.row] + 1; a.sequence = p.sequences[a.row]; }
  int part = most(PART, (count + PARTS * UNIT - 1) / (PARTS * UNIT) * UNIT), start = a.split * part;
  if (start >= count && a.split > 0) a.row = -1;
  a.end = least(start + part, count);
  a.begin = most(start, p.window ? count - p.window : 0);
  a.pages = most(0, (a.end + 15) / 16 - a.begin / 16);
  return a;
}
// The producers fetch keys and values: one alone does not issue copies fast enough.
__device__ __forceinline__ void produce(const Problem& p, const Memory& m, int producer, int lane) {
  u32 stage = 0, parity = 1, header = 0, turn = 1;
  bool waited = false;
  const int items = p.rows * p.kv_heads * p.reach;
  #pragma unroll 1
  for (int base = blockIdx.x; base < items; base += 32 * gridDim.x) {
    Part mine = part_of(base + lane * gridDim.x, p);
    #pragma unroll 1
    for (u32 left = __ballot_sync(ALL, mine.row >= 0); left; left &= left - 1) {
      int from = __ffs(left) - 1;
      int row = __shfl_sync(ALL, mine.row, from), place = __shfl_sync(ALL, mine.place, from);
      int head = __shfl_sync(ALL, mine.head, from), split = __shfl_sync(ALL, mine.split, from);
      int begin = __shfl_sync(ALL, mine.begin, from), end = __shfl_sync(ALL, mine.end, from);
      int pages = __shfl_sync(ALL, mine.pages, from), sequence = __shfl_sync(ALL, mine.sequence, from);
      const int* table = p.table + (u64)sequence * p.table_stride + begin / 16;
      auto read = [&](int pair, int until) {
        int page = 0;
        #pragma unroll 1
        for (bool first = true; pair < until; ++pair, first = false) {
          if (first || pair % 16 == 0) page = table[least(pair / 16 * 32 + lane, pages - 1)];
          u32 at = m.ring + stage * STAGE_BYTES, bar = m.full + 8 * stage, second = lane & 1;
          // A part's last page is read twice where it has no other to go with it.
          u64 number = (u64)__shfl_sync(ALL, page, least(2 * pair + second, pages - 1) % 32) * p.kv_heads + head;
          barrier_wait(m.empty + 8 * stage, parity);
          if (producer == 0 && lane == 0) barrier_expect(bar, STAGE_BYTES);
          __syncwarp();
          const bool levels = lane < 2;
          const u8* all = producer ? (levels ? p.values : (const u8*)p.value_scales)
            : (levels ? p.keys : (const u8*)p.key_scales);
          const u32 bytes = levels ? PAGE_BYTES : 64, kind = 2 * producer + second;
          if (lane < 4) bulk_load(at + kind * bytes + (levels ? 0 : 4 * PAGE_BYTES), all + number * bytes, bytes, bar);
          __syncwarp();
          if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
      };
      int ahead = 0;
      if (!waited) {
        // The kernel before may still write queries and the row's last page, but none before it, nor what parts are.
        ahead = least((pages - 1) / 2, STAGES);
        read(0, ahead);
        wait_for_previous();
        let_next_start();
        waited = true;
      }
      if (producer == 0) barrier_wait(m.taken + 8 * header, turn);
      if (producer == 0 && lane == 0) {
        u32 at = m.headers + header * HEADER_BYTES, bar = m.ready + 8 * header;
        write4(at + QUERY_BYTES, row, place, head, split);
        write4(at + QUERY_BYTES + 16, begin, end, pages, 0);
        barrier_expect(bar, QUERY_BYTES);
        bulk_load(at, p.q + (u64)(row * p.kv_heads + head) * QUERY_BYTES, QUERY_BYTES, bar);
      }
      if (++header == HEADERS) { header = 0; turn ^= 1; }
      read(ahead, (pages + 1) / 2);
    }
  }
  if (!waited) { wait_for_previous(); let_next_start(); }
  if (producer > 0) return;
  barrier_wait(m.taken + 8 * header, turn);
  if (lane == 0) {
    write4(m.headers + header * HEADER_BYTES + QUERY_BYTES, -1, 0, 0, 0);
    barrier_arrive_local(m.ready + 8 * header);
  }
}

// A number's bytes: the nearest level, and with `second` what that leaves, in STEPS of a level.
__device__ __forceinline__ u32 levels(float x0, float x1, float x2, float x3, bool second) {
#if INT8
  float x[4] = {x0, x1, x2, x3};
  u32 bits[4];
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    float sum = x[i] + ROUND;
    if (second) sum = (x[i] - (sum - ROUND)) * STEPS + ROUND;
    bits[i] = __float_as_uint(sum);
  }
  return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
#else
  u32 lo = e4m3_pair(x0, x1), hi = e4m3_pair(x2, x3);
  if (second) {
    float2 a = halves(e4m3_halves(lo)), b = halves(e4m3_halves(hi));
    lo = e4m3_pair(x0 - a.x, x1 - a.y);
    hi = e4m3_pair(x2 - b.x, x3 - b.y);
  }
  return lo | hi << 16;
#endif
}
// Queries of head `lane / 4` as left operands: rows 0 to 7 first numbers, 8 to 15 the second. Returns a level's size.
__device__ __forceinline__ float read_queries(u32 (&queries)[D / 32][4], u32 at, int lane) {
  int head = least(lane / 4 % HEADS, G - 1);
  float x[D / 4], top = 1e-30f;
  #pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    uint4 v = read4(at + head * 2 * D + i / 2 * 128 + lane % 4 * 32 + i % 2 * 16);
    u32 words[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
#if HALF
      float2 both = halves(words[j]);
      x[8 * i + 2 * j] = both.x;
      x[8 * i + 2 * j + 1] = both.y;
#else
      x[8 * i + 2 * j] = bf16_low(words[j]);
      x[8 * i + 2 * j + 1] = bf16_high(words[j]);
#endif
      top = fmaxf(top, fmaxf(fabsf(x[8 * i + 2 * j]), fabsf(x[8 * i + 2 * j + 1])));
    }
  }
  top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
  top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
  float unit = top * (1 / TOP), over = __fdividef(TOP, top);
  #pragma unroll
  for (int i = 0; i < D / 4; ++i) x[i] *= over;
  #pragma unroll
  for (int i = 0; i < D / 32; ++i)
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* y = x + 8 * i + j / 2 * 4;
      queries[i][j] = levels(y[0], y[1], y[2], y[3], j & 1);
    }
  return unit;
}
__device__ __forceinline__ void store4(const Problem& p, int row, int head, int channel, float4 y) {
  u64 at = (u64)(row * p.kv_heads * G + head) * D + channel;
#if OUTPUT == 0
  *(uint2*)(p.out + 2 * at) = make_uint2(bf16_pair(y.x, y.y), bf16_pair(y.z, y.w));
#elif OUTPUT == 1
  *(uint2*)(p.out + 2 * at) = make_uint2(half_pair(y.x, y.y), half_pair(y.z, y.w));
#elif OUTPUT == 2
  float x[4] = {y.x, y.y, y.z, y.w};
  #pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = fminf(fmaxf(x[i], -127.0f), 127.0f);
  *(u32*)(p.out + at) = levels(x[0], x[1], x[2], x[3], false);
#else
  *(u32*)(p.out + at) = e4m3_pair(y.x, y.y) | e4m3_pair(y.z, y.w) << 16;
#endif
}
// Sums of weights times values, of tokens' weights, and the running maximum. In the registers that products have: a
// lane's values are of channels 16·i + lane/4 (+ 8) and columns 2·(lane % 4) (+ 1); its maximum of head lane/4 % HEADS.
struct State { float acc[D / 16][4], top, total; };

// Two pages: `tokens` from the first one on.
__device__ __forceinline__ void attend(
  State& s, const u32 (&queries)[D / 32][4], float factor, u32 at, int token, const Problem& p, int begin, int end,
  int lane
) {
  const int g = lane / 4, t = lane % 4;
  acc_t product[4][4];
  #pragma unroll
  for (int n = 0; n < 4; ++n)
    #pragma unroll
    for (int i = 0; i < 4; ++i) product[n][i] = 0;
  // Columns of a product are tokens in the order in which a lane gets 4·t to 4·t + 3 of each page from two of them.
  u32 keys = at + (4 * (g / 2) + g % 2) * D + t * 16;
  #pragma unroll
  for (int c = 0; c < D / 64; ++c)
    #pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint4 k = read4(keys + n / 2 * PAGE_BYTES + n % 2 * 2 * D + c * 64);
      multiply(product[n], queries[2 * c], k.x, k.y);
      multiply(product[n], queries[2 * c + 1], k.z, k.w);
    }
  float x[8], scale[8], above = s.top;
  bool visible[8];
  #pragma unroll
  for (int page = 0; page < 2; ++page) {
    u32 scales = at + 4 * PAGE_BYTES + page * 64 + t * 16;
    uint4 k = read4(scales), v = read4(scales + 128);
    u32 of_key[4] = {k.x, k.y, k.z, k.w}, of_value[4] = {v.x, v.y, v.z, v.w};
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      const acc_t* c = product[2 * page + j / 2];
      int i = 4 * page + j, seen = token + 16 * page + 4 * t + j;
#if INT8
      x[i] = (float)(c[j % 2] * 254 + c[2 + j % 2]);
#else
      x[i] = c[j % 2] + c[2 + j % 2];
#endif
      x[i] *= factor * __uint_as_float(of_key[j]);
      visible[i] = seen >= begin && seen < end;
      scale[i] = fmaxf(__uint_as_float(of_value[j]), 1e-30f);  // normal, for the logarithm
    }
  }
  if (p.cap != 0) {
    const float twice = __fdividef(2.0f, p.cap);
    #pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] = p.cap * 1.4426950408889634f * (1 - __fdividef(2.0f, exp2_(x[i] * twice) + 1));  // 0 where it overflows
  }
  #pragma unroll
  for (int i = 0; i < 8; ++i) above = visible[i] ? fmaxf(above, x[i] + log2_(scale[i])) : above;
  above = fmaxf(above, __shfl_xor_sync(ALL, above, 1));
  above = fmaxf(above, __shfl_xor_sync(ALL, above, 2));
  float fade = exp2_(s.top - above);
  s.top = above;
  s.total *= fade;
  #pragma unroll
  for (int i = 0; i < 8; ++i) {
    float weight = visible[i] ? exp2_(x[i] - above) : 0.0f;
    s.total += weight;
    x[i] = weight * scale[i] * TOP;
  }
  const float fade0 = __shfl_sync(ALL, fade, 8 * t), fade1 = __shfl_sync(ALL, fade, 8 * t + 4);
#if G <= 4
  u32 b0 = levels(x[0], x[1], x[2], x[3], g >= 4), b1 = levels(x[4], x[5], x[6], x[7], g >= 4);
#else
  u32 b0 = levels(x[0], x[1], x[2], x[3], false), b1 = levels(x[4], x[5], x[6], x[7], false);
  u32 d0 = levels(x[0], x[1], x[2], x[3], true), d1 = levels(x[4], x[5], x[6], x[7], true);
#endif
  u32 values = at + (2 + lane / 16) * PAGE_BYTES + lane % 16 * 16;
  #pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    u32 a[4];
    read_matrices(a, values + i * 256);
    float* acc = s.acc[i];
#if INT8
    const int zero = __float_as_int(ROUND);  // sums below 2^22 are read as floats
    int c[4] = {zero, zero, zero, zero};
    multiply(c, a, b0, b1);
#if G > 4
    int d[4] = {zero, zero, zero, zero};
    multiply(d, a, d0, d1);
#endif
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      float y = __int_as_float(c[j]) - ROUND;
#if G > 4
      y = fmaf(y, STEPS, __int_as_float(d[j]) - ROUND);
#endif
      acc[j] = fmaf(acc[j], j % 2 ? fade1 : fade0, y);
    }
#else
    #pragma unroll
    for (int j = 0; j < 4; ++j) acc[j] *= j % 2 ? fade1 : fade0;
    multiply(s.acc[i], a, b0, b1);
#if G > 4
    multiply(s.acc[i], a, d0, d1);
#endif
#endif
  }
}
// What the warps have of a part, in the order of warps, to the part's place, or as the row's result.
__device__ __forceinline__ void merge(
  const Problem& p, const Memory& m, const State& s, const Part& a, int warp, int lane
) {
  const int g = lane / 4, t = lane % 4;
  u32 to = m.merged + warp * HEADS * LINE * 4;
  float total = s.total + __shfl_xor_sync(ALL, s.total, 1);
  total += __shfl_xor_sync(ALL, total, 2);
  warps_sync();  // all have read the part before
  #pragma unroll
  for (int i = 0; i < D / 16; ++i) {
#if G <= 4
    // Columns of lanes 0 and 1 are first numbers, of 2 and 3 second ones: each adds up eight channels of both.
    const bool upper = t >= 2;
    float y0 = upper ? s.acc[i][2] : s.acc[i][0], y1 = upper ? s.acc[i][3] : s.acc[i][1];
    float z0 = __shfl_xor_sync(ALL, upper ? s.acc[i][0] : s.acc[i][2], 2);
    float z1 = __shfl_xor_sync(ALL, upper ? s.acc[i][1] : s.acc[i][3], 2);
    u32 at = to + ((t & 1) * 2 * LINE + 16 * i + g + 8 * upper) * 4;
    write1(at, upper ? fmaf(z0, STEPS, y0) : fmaf(y0, STEPS, z0));
    write1(at + 4 * LINE, upper ? fmaf(z1, STEPS, y1) : fmaf(y1, STEPS, z1));
#else
    #pragma unroll
    for (int j = 0; j < 4; ++j) write1(to + ((2 * t + j % 2) * LINE + 16 * i + g + j / 2 * 8) * 4, s.acc[i][j]);
#endif
  }
  if (t == 0 && g < HEADS) {
    write1(m.states + (warp * HEADS + g) * 8, s.top);
    write1(m.states + (warp * HEADS + g) * 8 + 4, total);
  }
  warps_sync();
  for (int i = threadIdx.x; i < G * D / 4; i += 32 * WARPS) {
    int head = i / (D / 4), channel = i % (D / 4) * 4;
    float top = -1e30f, sum = 0;
    float4 y = make_float4(0, 0, 0, 0);
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, read2(m.states + (w * HEADS + head) * 8).x);
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float2 state = read2(m.states + (w * HEADS + head) * 8);
      uint4 v = read4(m.merged + ((w * HEADS + head) * LINE + channel) * 4);
      float share = exp2_(state.x - top);
      sum = fmaf(share, state.y, sum);
      y.x = fmaf(share, __uint_as_float(v.x), y.x);
      y.y = fmaf(share, __uint_as_float(v.y), y.y);
      y.z = fmaf(share, __uint_as_float(v.z), y.z);
      y.w = fmaf(share, __uint_as_float(v.w), y.w);
    }
    const int query = a.head * G + head;
    const float unit = 1 / (TOP * STEPS);
    y = make_float4(y.x * unit, y.y * unit, y.z * unit, y.w * unit);
    if (p.reach > 1) {
      u64 at = (u64)(a.place * p.kv_heads * G + query) * p.reach + a.split;
      *(float4*)(p.partials + at * D + channel) = y;
      if (channel == 0) { p.largest[at] = top; p.sums[at] = sum; }
      continue;
    }
    sum = fmaxf(sum, 1e-30f);  // as parts are combined: the same bits as if there could be more
    y = make_float4(divided(y.x, sum), divided(y.y, sum), divided(y.z, sum), divided(y.w, sum));
    if (p.inverse) {
      float4 b = *(const float4*)(p.inverse + query * D + channel);
      y = make_float4(y.x * b.x, y.y * b.y, y.z * b.z, y.w * b.w);
    }
    store4(p, a.row, query, channel, y);
  }
}
__device__ __forceinline__ void consume(const Problem& p, const Memory& m, int warp, int lane) {
  u32 header = 0, turn = 0, before = 0;  // before: pairs of pages of all parts until now
  #pragma unroll 1
  for (;;) {
    u32 at = m.headers + header * HEADER_BYTES;
    barrier_wait(m.ready + 8 * header, turn);
    uint4 v = read4(at + QUERY_BYTES), w = read4(at + QUERY_BYTES + 16);
    Part a{(int)v.x, (int)v.y, (int)v.z, (int)v.w, 0, (int)w.x, (int)w.y, (int)w.z};
    if (a.row < 0) break;
    u32 queries[D / 32][4];
    float factor = read_queries(queries, at, lane) * (p.scale * (1 / STEPS));
    __syncwarp();
    if (lane == 0) barrier_arrive_local(m.taken + 8 * header);
    if (++header == HEADERS) { header = 0; turn ^= 1; }
    State s;
    s.top = -1e30f;  // finite: of parts behind the window
    s.total = 0;
    #pragma unroll
    for (int i = 0; i < D / 16; ++i)
      #pragma unroll
      for (int j = 0; j < 4; ++j) s.acc[i][j] = 0;
    const int pairs = (a.pages + 1) / 2;
    #pragma unroll 1
    for (int pair = warp; pair < pairs; pair += WARPS) {
      u32 number = before + pair, stage = number % STAGES;
      barrier_wait(m.full + 8 * stage, number / STAGES & 1);
      const int token = (a.begin / 16 + 2 * pair) * 16;
      attend(s, queries, factor, m.ring + stage * STAGE_BYTES, token, p, a.begin, a.end, lane);
      __syncwarp();
      if (lane == 0) barrier_arrive_local(m.empty + 8 * stage);
    }
    before += pairs;
    merge(p, m, s, a, warp, lane);
  }
}
extern "C" __global__ void __launch_bounds__(32 * (WARPS + PRODUCERS), RESIDENT)
NAME(const __grid_constant__ Problem p) {
  extern __shared__ __align__(128) u8 memory[];
  const Memory m = layout(shared_address(memory));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) { barrier_init(m.full + 8 * i, 1); barrier_init(m.empty + 8 * i, 1); }
    for (int i = 0; i < HEADERS; ++i) { barrier_init(m.ready + 8 * i, 1); barrier_init(m.taken + 8 * i, WARPS); }
    barrier_publish();
  }
  __syncthreads();
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp >= WARPS) produce(p, m, warp - WARPS, lane); else consume(p, m, warp, lane);
}
"""
