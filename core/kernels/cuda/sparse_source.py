"""CUDA C++ source of the product of INT8 tokens with 2:4 sparse INT8 weights for Hopper, one variant at a time.

The program is built like that of `gemm_source.py`, with the operands' roles swapped: sparse tensor cores take the
sparse operand from the left, so that 64 rows of weights are a product's rows and tokens its columns, as few as 8. The
sums are those of the dense product of the same weights, and so is the epilogue's arithmetic: its bits are equal.

* A stage of the ring has 128 inputs: of tokens 128 bytes a row, of weights 64 bytes of values and 16 of metadata.
* TMA permutes the weights' rows so that a thread has two adjacent outputs of a token, or hidden and gate of one.
* The blocks of a cluster have the same tokens; each fetches a part, and TMA delivers it to all. Products take half the
  time of dense ones, and the L2 cache would be their limit.
* Of few tokens the depth is split, and int32 sums over its parts are left for the next kernel. Weights are fetched
  before the kernel waits for the one before (programmatic dependent launch).
"""

from __future__ import annotations

from dataclasses import dataclass

from core.kernels.cuda.device_source import DEVICE
from core.kernels.cuda.epilogue_source import ACTIVATE
from core.kernels.cuda.gemm_source import PACK

ROWS = 128  # of weights in a tile
DEPTH = 128  # inputs of a stage
_SHARED_BYTES = 227 * 1024  # per block on Hopper


@dataclass(frozen=True, slots=True)
class SparseVariant:
    """Compile-time parameters: `tokens` of a tile, a multiple of 8; `cluster`, the blocks that share them.

    `sums`: write int32 sums over parts of the depth. `gated`: gate and quantize; with `silu`, SwiGLU; `gate_first`: the
    gate's weights come first. `half`: fp16 output instead of bf16.
    """

    tokens: int
    cluster: int = 1
    sums: bool = False
    gated: bool = False
    silu: bool = False
    gate_first: bool = False
    half: bool = False

    @property
    def name(self) -> str:
        """The kernel's name, as profilers show it."""
        marks = "_sums" * self.sums + ("_swiglu" if self.silu else "_geglu") * self.gated + "_fp16" * self.half
        return f"sparse_product_{ROWS}x{self.tokens}_cluster{self.cluster}{marks}{'_gate_first' * self.gate_first}"

    @property
    def stage_bytes(self) -> int:
        """Tokens, values and metadata of a stage."""
        return self.tokens * DEPTH + ROWS * (DEPTH // 2 + DEPTH // 8)

    @property
    def stages(self) -> int:
        """The depth of the ring."""
        return min(16, (_SHARED_BYTES - 1024) // (self.stage_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring, its barriers, and room to align it."""
        return self.stages * (self.stage_bytes + 16) + 1024


def product(tokens: int) -> str:
    """The C++ wrapper of one `wgmma` of 64 rows × `tokens` × 64 inputs, half of which the weights have.

    Lane l of warp w gives the metadata of row 16·w + l / 4 + 8·(l % 2), of inputs 32·(l / 2 % 2) … +31.
    """
    count = tokens // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+r"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void product(int (&d)[{count}], u64 a, u64 b, u32 metadata, int keep) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 3}, 0;\\n"
    "wgmma.mma_async.sp.sync.aligned.m64n{tokens}k64.s32.s8.s8 {{{registers}}}, %{count}, %{count + 1}, "
    "%{count + 2}, 0, p;\\n}}\\n"
    : {operands} : "l"(a), "l"(b), "r"(metadata), "r"(keep));
}}
"""


def source(variant: SparseVariant) -> str:
    """The whole program of one variant."""
    defines = {
        "NAME": variant.name, "BN": variant.tokens, "CLUSTER": variant.cluster, "STAGES": variant.stages,
        "SUMS": int(variant.sums), "GATED": int(variant.gated), "SILU": int(variant.silu), "HALF": int(variant.half),
        "GATE_FIRST": int(variant.gate_first), "FP8": 0,
    }  # fmt: skip
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return head + DEVICE + _TYPES + product(variant.tokens) + PACK + ACTIVATE + _EPILOGUE + _KERNEL


_TYPES = r"""
#define B_BYTES (BN * 128)
#define A_BYTES (128 * 64)
#define STAGE_BYTES (B_BYTES + A_BYTES + 128 * 16)
#define TOGETHER 8  // tiles of tokens computed side by side, so that weights are read from memory once for them
#define AHEAD (BN < 64 ? BN / 8 : 8)  // so many times eight tokens of the residual are read before they are added
#define FENCE_REG(x) asm volatile("" : "+r"(x) :: "memory")

// The order and types of these fields are repeated in sparse_gemm.py.
struct Problem {
  void* out; const void* residual;
  const float* scale; const float* bias; const float* row_scale; const float* out_inv_scale;
  long long out_stride, residual_stride;
  int columns, tokens, steps;              // outputs; rows; stages of the whole depth
  int column_tiles, token_tiles, splits;   // column tiles: of a whole cluster
  int inverse_step;                        // 0: out_inv_scale is one number, 1: one a column
};
struct Where { int n, t, split; };         // a tile: its first row of 16 (or 8, gated) weights, its first token
__device__ __forceinline__ Where locate(const Problem& p, int tile, u32 rank) {
  Where w;
  int all = p.token_tiles * p.column_tiles;
  w.split = tile / all; tile -= w.split * all;
  int first = tile / (TOGETHER * p.column_tiles) * TOGETHER, within = tile - first * p.column_tiles;
  int left = p.token_tiles - first, side = left < TOGETHER ? left : TOGETHER;
  w.t = (first + within % side) * BN;
  w.n = (within / side * CLUSTER + rank) * 8;
  return w;
}
// An operand of `wgmma` in rows of 64 bytes, swizzled over 64 bytes; eight rows are 512 bytes apart.
__device__ __forceinline__ u64 values(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)32 << 32) | ((u64)2 << 62);
}
__device__ __forceinline__ void load_weights(u32 to, const Map* map, u32 bar, int byte, int row) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%3, %4, %4, %5}], [%2];"
    :: "r"(to), "l"(map), "r"(bar), "r"(byte), "r"(0), "r"(row) : "memory");
}
__device__ __forceinline__ void fetch(u32 stage, u32 bar, const Map* map_values, const Map* map_metadata, int k,
                                      int n) {
  barrier_expect(bar, STAGE_BYTES);
  load_weights(stage + B_BYTES, map_values, bar, 64 * k, n);
  load_weights(stage + B_BYTES + A_BYTES, map_metadata, bar, 16 * k, n);
}
__device__ __forceinline__ void load_tokens(u32 to, const Map* map, u32 bar, int k, int token) {
#if CLUSTER > 1
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [%0], [%1, {%3, %4}], [%2], %5;"
    :: "r"(to), "l"(map), "r"(bar), "r"(k), "r"(token), "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
#else
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%3, %4}], [%2];" :: "r"(to), "l"(map), "r"(bar), "r"(k), "r"(token) : "memory");
#endif
}
"""

_EPILOGUE = r"""
// Thread t of a consumer holds rows 16·warp + lane/4 (+8), and of every eight tokens two. The rows were permuted on
// their way in: these two are neighbouring outputs, or the first and second half's row of one output.
struct Rows { int column; float scale[2], bias[2]; };
__device__ __forceinline__ Rows rows_of(const Problem& p, const Where& w, int consumer) {
  Rows r;
  int lane = threadIdx.x & 31, at = consumer * 4 + ((threadIdx.x >> 5) & 3);
#if GATED
  r.column = (w.n + at) * 8 + (lane >> 2);
  int from[2] = {r.column, p.columns + r.column};
#else
  r.column = (w.n + at) * 16 + 2 * (lane >> 2);
  int from[2] = {r.column, r.column + 1};
#endif
#if !SUMS
  bool valid = r.column < p.columns;
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    r.scale[i] = valid ? p.scale[from[i]] : 0.0f;
    r.bias[i] = valid && p.bias ? p.bias[from[i]] : 0.0f;
  }
#if GATED
  float inverse = valid ? p.out_inv_scale[p.inverse_step * r.column] : 1.0f;
  r.scale[GATE_FIRST] *= inverse; r.bias[GATE_FIRST] *= inverse;
#endif
#endif
  return r;
}
__device__ __forceinline__ void epilogue(const Problem& p, const Where& w, int (&acc)[BN / 2], const Rows& r) {
  if (r.column >= p.columns) return;
  int first = w.t + 2 * (threadIdx.x & 3);
  #pragma unroll
  for (int at = 0; at < BN / 8; at += AHEAD) {
#if !GATED && !SUMS
    // Loads before any store, which the assembler does not move them over.
    u32 more[2 * AHEAD];
    float factor[2 * AHEAD];
    #pragma unroll
    for (int i = 0; i < 2 * AHEAD; ++i) {
      long long token = min(first + 8 * (at + i / 2) + i % 2, p.tokens - 1);
      factor[i] = p.row_scale ? p.row_scale[token] : 1.0f;
      more[i] = p.residual ? *(const u32*)((const u8*)p.residual + (token * p.residual_stride + r.column) * 2) : 0;
    }
#endif
    #pragma unroll
    for (int i = 0; i < 2 * AHEAD; ++i) {
      long long token = first + 8 * (at + i / 2) + i % 2;
      if (token >= p.tokens) continue;
      int one = acc[4 * (at + i / 2) + i % 2], two = acc[4 * (at + i / 2) + 2 + i % 2];
#if SUMS
      *(int2*)((int*)p.out + ((long long)w.split * p.tokens + token) * p.columns + r.column) = make_int2(one, two);
#elif GATED
      float a = fmaf((float)one, r.scale[0], r.bias[0]), b = fmaf((float)two, r.scale[1], r.bias[1]);
      float v = GATE_FIRST ? activate(b, a) : activate(a, b);
      *((u8*)p.out + token * p.out_stride + r.column) = (u8)quantize4(v, v, v, v);
#else
      float a = fmaf((float)one * factor[i], r.scale[0], r.bias[0]);
      float b = fmaf((float)two * factor[i], r.scale[1], r.bias[1]);
      if (p.residual) add_pair(a, b, more[i]);
      *(u32*)((u8*)p.out + (token * p.out_stride + r.column) * 2) = pack(a, b);
#endif
    }
  }
}
"""

_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(384, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
NAME(const __grid_constant__ Map map_values, const __grid_constant__ Map map_metadata,
     const __grid_constant__ Map map_tokens, const __grid_constant__ Problem p) {
  extern __shared__ u8 memory[];
  u32 ring = (shared_address(memory) + 1023) & ~1023u;
  u32 full = ring + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
  u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 2 * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#if CLUSTER > 1
  cluster_sync();
#else
  __syncthreads();
#endif
  int tiles = p.token_tiles * p.column_tiles * p.splits;
  int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  u32 stage = 0, parity = 0;
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int ahead = 0;  // stages of the first tile whose weights are fetched before the kernel before has ended
      if (first < tiles) {
        Where w = locate(p, first, rank);
        int start = w.split * p.steps / p.splits, stop = (w.split + 1) * p.steps / p.splits;
        for (; ahead < STAGES && start + ahead < stop; ++ahead)
          fetch(ring + ahead * STAGE_BYTES, full + 8 * ahead, &map_values, &map_metadata, start + ahead, w.n);
      }
      asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
      for (int tile = first; tile < tiles; tile += step) {
        Where w = locate(p, tile, rank);
        int stop = (w.split + 1) * p.steps / p.splits;
        #pragma unroll 1
        for (int k = w.split * p.steps / p.splits; k < stop; ++k) {
          u32 bar = full + 8 * stage, to = ring + stage * STAGE_BYTES;
          if (--ahead < 0) {
            barrier_wait(empty + 8 * stage, parity ^ 1);
            fetch(to, bar, &map_values, &map_metadata, k, w.n);
          }
          load_tokens(to + rank * (B_BYTES / CLUSTER), &map_tokens, bar, 128 * k, w.t + rank * (BN / CLUSTER));
          if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    // Taken from lane 0 so that the assembler sees one path for a whole warp: it serializes products on others.
    int consumer = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0), thread = threadIdx.x & 127;
    int row = consumer * 64 + (thread >> 5) * 16 + ((thread & 31) >> 2) + 8 * (thread & 1);
    u32 described = B_BYTES + A_BYTES + row * 16 + 4 * (thread >> 1 & 1);  // this thread's metadata within a stage
    for (int tile = first; tile < tiles; tile += step) {
      Where w = locate(p, tile, rank);
      Rows rows = rows_of(p, w, consumer);
      int acc[BN / 2];
      int keep = 0, previous = -1, stop = (w.split + 1) * p.steps / p.splits;
      // Tensor cores read metadata from its registers while they multiply: those of a product in flight must stay, so
      // that two sets take turns.
      u32 metadata[2][2] = {};
      auto multiply = [&](u32 (&now)[2], u32 (&before)[2]) {
        barrier_wait(full + 8 * stage, parity);
        u32 from = ring + stage * STAGE_BYTES;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(now[0]) : "r"(from + described) : "memory");
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(now[1]) : "r"(from + described + 8) : "memory");
        u64 a = values(from + B_BYTES + consumer * 4096), b = operand(from);
        #pragma unroll
        for (int i = 0; i < BN / 2; ++i) FENCE_REG(acc[i]);
        product_fence();
        product(acc, a, b, now[0], keep);
        product(acc, a + 2, b + 4, now[1], 1);
        keep = 1;
        product_commit();
        if (previous >= 0) {
          product_wait<1>();
          asm volatile("" :: "r"(before[0]), "r"(before[1]) : "memory");
          if (thread < CLUSTER) barrier_arrive(empty + 8 * previous, thread);
        }
        previous = stage;
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
      };
      #pragma unroll 1
      for (int k = w.split * p.steps / p.splits; k < stop; k += 2) {
        multiply(metadata[0], metadata[1]);
        if (k + 1 < stop) multiply(metadata[1], metadata[0]);
      }
      product_wait<0>();
      asm volatile("" :: "r"(metadata[0][0]), "r"(metadata[0][1]), "r"(metadata[1][0]), "r"(metadata[1][1]) : "memory");
      #pragma unroll
      for (int i = 0; i < BN / 2; ++i) FENCE_REG(acc[i]);
      if (thread < CLUSTER) barrier_arrive(empty + 8 * previous, thread);
      epilogue(p, w, acc, rows);
    }
  }
#if CLUSTER > 1
  cluster_sync();  // no block may end while its neighbour still signals it
#endif
}
"""
