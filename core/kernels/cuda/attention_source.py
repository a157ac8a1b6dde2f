"""CUDA C++ source of attention for Hopper, heads of 64 or 128, with bf16, int8 or E4M3 output, compiled by NVRTC.

Follows FlashAttention-3 (Shah et al., 2024): a producer warp loads keys and values with TMA; each consumer warpgroup
owns 64 queries, and the product with one block's values overlaps the softmax of the next. From FlashAttention-4: the
running maximum is only raised, and the sums only rescaled, when it has grown by 2^8. A head of 128 lies in shared
memory as two slices of 64 dimensions. `attention.py` prepares the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.kernels.cuda.attention_output_source import OUTPUT
from core.kernels.cuda.device_source import DEVICE


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """Compile-time parameters of the kernel.

    `consumers`: warpgroups of 64 queries each (2 or 3). `keys`: per block. `stages`: blocks in flight. `output`: bf16,
    int8 or e4m3. `emulated`: how many of every 8 exponentials are computed on the FMA units instead of the special
    ones. `head`: 64 or 128 dimensions. `lengths`: each image has its own number of tokens; what lies beyond is not read
    as a key, and gets zeros as a query.
    """

    consumers: int
    keys: int
    stages: int
    output: str = "bf16"
    emulated: int = 0
    head: int = 64
    lengths: bool = False

    @property
    def name(self) -> str:
        """The kernel's name, as profilers show it."""
        marks = "_head128" * (self.head == 128) + "_lengths" * self.lengths
        return f"attention_{self.rows}x{self.keys}_{self.output}_emulated{self.emulated}{marks}"

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: two tiles' queries, the ring of keys and values, barriers, and room to align it."""
        return 4 * self.head * (self.rows + self.stages * self.keys) + 32 * self.stages + 32 + 1024


def scores(keys: int) -> str:
    """The C++ wrapper of S = Q·Kᵀ over 16 of the head's dimensions: 64 queries × `keys`."""
    count = keys // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    kind = f"wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.bf16.bf16"
    return f"""
__device__ __forceinline__ void scores(float (&d)[{count}], u64 a, u64 b, int keep) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "{kind} {{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}\\n"
    : {operands} : "l"(a), "l"(b), "r"(keep));
}}
"""


def values(head: int) -> str:
    """The C++ wrapper of O += P·V over 16 keys: 64 queries × the head's dimensions."""
    count = head // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    kind = f"wgmma.mma_async.sync.aligned.m64n{head}k16.f32.bf16.bf16"
    return f"""
__device__ __forceinline__ void values(float (&d)[{count}], const u32* a, u64 b) {{
  asm volatile("{kind} {{{registers}}}, {{{left}}}, %{count + 4}, 1, 1, 1, 1;"
    : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""


def source(variant: AttentionVariant) -> str:
    """The whole program of one variant."""
    producer, consumer = {2: (24, 240), 3: (32, 160)}[variant.consumers]
    defines = {
        "NAME": variant.name,
        "CONSUMERS": variant.consumers,
        "KEYS": variant.keys,
        "STAGES": variant.stages,
        "OUTPUT": {"bf16": 0, "int8": 1, "e4m3": 2}[variant.output],
        "EMULATED": variant.emulated,
        "HEAD": variant.head,
        "LENGTHS": int(variant.lengths),
        "PRODUCER_REGISTERS": f'"{producer}"',
        "CONSUMER_REGISTERS": f'"{consumer}"',
    }
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return head + DEVICE + _PROBLEM + scores(variant.keys) + values(variant.head) + _SOFTMAX + OUTPUT + _KERNEL


_PROBLEM = r"""
// The order and types of these fields are repeated in attention.py.
struct Problem {
  void* out; const float* out_inv_scale;
  long long out_image, out_row, out_head;      // strides of the output, in elements
  int images, heads, queries, keys;
  float scale;                                 // softmax scale · log2(e)
  int inverse_step;                            // 0: out_inv_scale is one number, 1: one a channel of [heads · HEAD]
#if LENGTHS
  const int* lengths;                          // tokens of each image, at most `queries`, which are as many as `keys`
#endif
};
#define ROWS (64 * CONSUMERS)
#define SLICES (HEAD / 64)
#define QUERY_BYTES (ROWS * SLICES * 128)
#define BLOCK_BYTES (KEYS * SLICES * 128)
// Values as an operand: beyond its first 64 dimensions lies the next slice.
#define VALUES(address) (operand(address) + ((u64)(SLICES == 1 ? 0 : KEYS * 8 - 1) << 16))
"""

_SOFTMAX = r"""
__device__ __forceinline__ float exp2_special(float x) {
  float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r;
}
// 2^x for x <= ~10 by Cody-Waite and a cubic (relative error 1e-4, below bf16's 2e-3): work for the FMA units.
__device__ __forceinline__ float exp2_polynomial(float x) {
  x = fmaxf(x, -126.0f);
  float shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);
  float p = fmaf(fmaf(fmaf(0.05500892f, f, 0.24221096f), f, 0.69328293f), f, 1.0f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}
struct State { float maximum[2], sum[2]; };

// Rows beyond the image's length have no say in when sums are rescaled: `rows` are left from this thread's first on.
#if LENGTHS
#define REAL(i) (8 * (i) < rows)
#else
#define REAL(i) true
#endif
// Scores of one block to probabilities in place. `rescale` receives what the sums so far must be multiplied by.
__device__ __forceinline__ bool softmax(float (&s)[KEYS / 2], State& state, float (&rescale)[2], float scale,
                                        int left, int rows, bool first) {
  int q = threadIdx.x & 3;
  if (left < KEYS) {
    #pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
      #pragma unroll
      for (int e = 0; e < 4; ++e) if (8 * j + 2 * q + (e & 1) >= left) s[4 * j + e] = -1e30f;
  }
  float top[2] = {-1e30f, -1e30f};
  #pragma unroll
  for (int j = 0; j < KEYS / 8; ++j) {
    top[0] = fmaxf(top[0], fmaxf(s[4 * j], s[4 * j + 1]));
    top[1] = fmaxf(top[1], fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    top[i] = fmaxf(top[i], __shfl_xor_sync(0xFFFFFFFFu, top[i], 1));
    top[i] = fmaxf(top[i], __shfl_xor_sync(0xFFFFFFFFu, top[i], 2));
  }
  bool grown = first || (REAL(0) && (top[0] - state.maximum[0]) * scale > 8.0f)
    || (REAL(1) && (top[1] - state.maximum[1]) * scale > 8.0f);
  grown = __any_sync(0xFFFFFFFFu, grown);
  if (grown) {
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      float now = first ? top[i] : fmaxf(top[i], state.maximum[i]);
      rescale[i] = first ? 0.0f : exp2_special((state.maximum[i] - now) * scale);
      state.maximum[i] = now;
      state.sum[i] *= rescale[i];
    }
  }
  float shift[2] = {state.maximum[0] * scale, state.maximum[1] * scale};
  float part[2][2] = {};
  #pragma unroll
  for (int j = 0; j < KEYS / 8; ++j)
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = fmaf(s[4 * j + e], scale, -shift[e >> 1]);
      float y = (4 * j + e) % 8 < EMULATED ? exp2_polynomial(x) : exp2_special(x);
      s[4 * j + e] = y;
      part[e >> 1][e & 1] += y;
    }
  state.sum[0] += part[0][0] + part[0][1];
  state.sum[1] += part[1][0] + part[1][1];
  return grown;
}
// Does nothing, but only once x is known: the assembler would otherwise let the softmax begin after the product that it
// is to run beside.
__device__ __forceinline__ void finish(float x) {
  asm volatile("{\n.reg .pred p;\nsetp.nan.f32 p, %0, %0;\n@p nanosleep.u32 0;\n}" :: "f"(x) : "memory");
}
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
"""

_KERNEL = r"""
template <int COUNT>  // of rows
__device__ __forceinline__ void load(u32 to, const Map* map, u32 bar, int head, int row, int image) {
  #pragma unroll
  for (int slice = 0; slice < SLICES; ++slice)
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" :: "r"(to + slice * COUNT * 128), "l"(map), "r"(bar), "r"(64 * slice),
      "r"(head), "r"(row), "r"(image) : "memory");
}
// S = Q·Kᵀ of one block: `q` and `k` are the operands of the first 16 dimensions.
__device__ __forceinline__ void all_scores(float (&s)[KEYS / 2], u64 q, u64 k) {
  #pragma unroll
  for (int step = 0; step < HEAD / 16; ++step)
    scores(s, q + (step >> 2) * (ROWS * 8) + 2 * (step & 3), k + (step >> 2) * (KEYS * 8) + 2 * (step & 3), step);
}
#define FENCE_ALL(x) \
  { _Pragma("unroll") for (int i_ = 0; i_ < sizeof(x) / 4; ++i_) asm volatile("" : "+f"(x[i_]) :: "memory"); }

// Barriers: full and empty of keys, full and empty of values (one each a stage), then full and empty of two
// tiles' queries.
extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
NAME(const __grid_constant__ Map map_q, const __grid_constant__ Map map_k, const __grid_constant__ Map map_v,
     const __grid_constant__ Problem p) {
  extern __shared__ u8 memory[];
  u32 queries = (shared_address(memory) + 1023) & ~1023u, ring = queries + 2 * QUERY_BYTES;
  u32 full_k = ring + STAGES * 2 * BLOCK_BYTES, empty_k = full_k + 8 * STAGES;
  u32 full_v = empty_k + 8 * STAGES, empty_v = full_v + 8 * STAGES, full_q = empty_v + 8 * STAGES;
  u32 empty_q = full_q + 16;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full_k + 8 * s, 1); barrier_init(empty_k + 8 * s, CONSUMERS);
      barrier_init(full_v + 8 * s, 1); barrier_init(empty_v + 8 * s, CONSUMERS);
    }
    for (int s = 0; s < 2; ++s) { barrier_init(full_q + 8 * s, 1); barrier_init(empty_q + 8 * s, CONSUMERS); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int keys = p.keys, limit = p.queries;
  int blocks = (keys + KEYS - 1) / KEYS, per_head = (p.queries + ROWS - 1) / ROWS;
  int tiles = p.images * p.heads * per_head;
  u32 stage = 0, parity = 0, turn = 0, parity_q = 0;
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " PRODUCER_REGISTERS ";");
    if (threadIdx.x == 0) {
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int pair = tile / per_head, row = (tile - pair * per_head) * ROWS;
        int image = pair / p.heads, head = pair - image * p.heads;
#if LENGTHS
        keys = p.lengths[image]; blocks = (keys + KEYS - 1) / KEYS;
        if (row >= keys) continue;
#endif
        barrier_wait(empty_q + 8 * turn, parity_q ^ 1);
        barrier_expect(full_q + 8 * turn, QUERY_BYTES);
        load<ROWS>(queries + turn * QUERY_BYTES, &map_q, full_q + 8 * turn, head, row, image);
        parity_q ^= turn; turn ^= 1;
        #pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
          u32 k = ring + stage * 2 * BLOCK_BYTES;
          barrier_wait(empty_k + 8 * stage, parity ^ 1);
          barrier_expect(full_k + 8 * stage, BLOCK_BYTES);
          load<KEYS>(k, &map_k, full_k + 8 * stage, head, block * KEYS, image);
          barrier_wait(empty_v + 8 * stage, parity ^ 1);
          barrier_expect(full_v + 8 * stage, BLOCK_BYTES);
          load<KEYS>(k + BLOCK_BYTES, &map_v, full_v + 8 * stage, head, block * KEYS, image);
          if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " CONSUMER_REGISTERS ";");
    // Taken from lane 0 so that the assembler sees one path for a whole warp: it serializes products on others.
    int consumer = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0);
    int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      int pair = tile / per_head, row = (tile - pair * per_head) * ROWS;
      int image = pair / p.heads, head = pair - image * p.heads;
#if LENGTHS
      keys = limit = p.lengths[image]; blocks = (keys + KEYS - 1) / KEYS;
      if (row + consumer * 64 >= keys) clear(p, image, head, row + consumer * 64 + warp * 16 + (lane >> 2));
      if (row >= keys) continue;
#endif
      if (row + consumer * 64 >= limit) {  // no queries are left for this consumer: the others get its share
        barrier_wait(full_q + 8 * turn, parity_q);
        for (int block = 0; block < blocks; ++block) {
          barrier_wait(full_k + 8 * stage, parity);
          if (thread == 0) barrier_arrive_local(empty_k + 8 * stage);
          barrier_wait(full_v + 8 * stage, parity);
          if (thread == 0) barrier_arrive_local(empty_v + 8 * stage);
          if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
        if (thread == 0) barrier_arrive_local(empty_q + 8 * turn);
        parity_q ^= turn; turn ^= 1;
        continue;
      }
      State state = {};
      float o[HEAD / 2], s[KEYS / 2], rescale[2];
      u32 probabilities[KEYS / 4];
      #pragma unroll
      for (int i = 0; i < HEAD / 2; ++i) o[i] = 0.0f;
      u64 q = operand(queries + turn * QUERY_BYTES + consumer * 8192);
      barrier_wait(full_q + 8 * turn, parity_q);
      barrier_wait(full_k + 8 * stage, parity);
      u64 k = operand(ring + stage * 2 * BLOCK_BYTES);
      FENCE_ALL(s);
      product_fence();
      all_scores(s, q, k);
      product_commit();
      product_wait<0>();
      FENCE_ALL(s);
      if (thread == 0) barrier_arrive_local(empty_k + 8 * stage);
      int rows = keys - (row + consumer * 64 + warp * 16 + (lane >> 2));
      softmax(s, state, rescale, p.scale, keys, rows, true);
      #pragma unroll
      for (int i = 0; i < KEYS / 4; ++i) probabilities[i] = pack(s[2 * i], s[2 * i + 1]);
      #pragma unroll 1
      for (int block = 1; block < blocks; ++block) {
        u32 before = stage, parity_before = parity;
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
        barrier_wait(full_k + 8 * stage, parity);
        k = operand(ring + stage * 2 * BLOCK_BYTES);
        FENCE_ALL(s);
        product_fence();
        all_scores(s, q, k);
        product_commit();
        barrier_wait(full_v + 8 * before, parity_before);
        u64 v = VALUES(ring + before * 2 * BLOCK_BYTES + BLOCK_BYTES);
        FENCE_ALL(o);
        #pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) values(o, probabilities + 4 * step, v + 128 * step);
        product_commit();
        product_wait<1>();
        FENCE_ALL(s);
        if (thread == 0) barrier_arrive_local(empty_k + 8 * stage);
        bool grown = softmax(s, state, rescale, p.scale, keys - block * KEYS, rows, false);
        finish(state.sum[0] + state.sum[1]);
        product_wait<0>();
        FENCE_ALL(o);
        if (thread == 0) barrier_arrive_local(empty_v + 8 * before);
        if (grown) {
          #pragma unroll
          for (int i = 0; i < HEAD / 2; ++i) o[i] *= rescale[(i >> 1) & 1];
        }
        #pragma unroll
        for (int i = 0; i < KEYS / 4; ++i) probabilities[i] = pack(s[2 * i], s[2 * i + 1]);
      }
      if (thread == 0) barrier_arrive_local(empty_q + 8 * turn);
      parity_q ^= turn; turn ^= 1;
      barrier_wait(full_v + 8 * stage, parity);
      u64 v = VALUES(ring + stage * 2 * BLOCK_BYTES + BLOCK_BYTES);
      FENCE_ALL(o);
      product_fence();
      #pragma unroll
      for (int step = 0; step < KEYS / 16; ++step) values(o, probabilities + 4 * step, v + 128 * step);
      product_commit();
      product_wait<0>();
      FENCE_ALL(o);
      if (thread == 0) barrier_arrive_local(empty_v + 8 * stage);
      if (++stage == STAGES) { stage = 0; parity ^= 1; }
      store(p, o, state, image, head, row + consumer * 64 + warp * 16 + (lane >> 2), keys);
    }
  }
}
"""
