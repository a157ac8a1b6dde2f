"""CUDA C++ source of the 8-bit matrix product and convolution for Hopper, compiled by NVRTC, one variant at a time.

A producer warp feeds a ring of shared-memory stages with TMA, two consumer warpgroups multiply with `wgmma`, and the
epilogue (scales, bias, residual, GEGLU) works on the accumulators. `gemm.py` prepares the arguments.

Three ideas give it its speed:
* Consumers may take tiles of their own, by turns: while one is in its epilogue the other has the tensor cores for
  itself, so that a short K (640, 1280) does not leave them idle. Together on one tile they move fewer bytes, which is
  better once K is long.
* TMA permutes the weight's rows (a five-dimensional box) so that the columns which one thread holds after the
  product are neighbours in the output: 16-byte loads and stores straight from registers.
* Two blocks of a cluster share the rows of A; each fetches one half and TMA delivers it to both.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.kernels.cuda.device_source import DEVICE
from core.kernels.cuda.epilogue_source import ACTIVATE, EPILOGUE, ROWS
from core.kernels.cuda.share_source import SHARE, SHARERS


@dataclass(frozen=True, slots=True)
class GemmVariant:
    """Compile-time parameters of the kernel.

    `blocks`: 64-row products per consumer (tile rows: 128 × blocks). `columns`: of a tile. `cluster`: blocks that share
    A. `stages`: depth of the ring. `fp8`: E4M3 operands and fp32 accumulators instead of int8 and int32. `geglu`: gate
    and quantize; with `silu`, SwiGLU; with `added`, what the residual has is added to hidden and gate before. `half`:
    fp16 output instead of bf16. `turns`: each consumer has tiles of its own (64 × blocks rows). `group`: so many rows
    of tiles are computed side by side, column after column. `shares`: slots through which adapters' shares come, if
    any are added.
    """

    blocks: int
    columns: int
    cluster: int
    stages: int
    fp8: bool = False
    geglu: bool = False
    half: bool = False
    turns: bool = False
    silu: bool = False
    group: int = 1
    added: bool = False
    shares: int = 0

    @property
    def rows(self) -> int:
        return (64 if self.turns else 128) * self.blocks

    @property
    def name(self) -> str:
        """The kernel's name, as profilers show it."""
        marks = "_fp8" * self.fp8 + ("_swiglu" if self.silu else "_geglu") * self.geglu + "_fp16" * self.half
        marks += "_added" * self.added + "_shares" * (self.shares > 0)
        order = "_turns" * self.turns + f"_group{self.group}" * (self.group > 1)
        return f"product_{self.rows}x{self.columns}_cluster{self.cluster}{marks}{order}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring, its barriers, two consumers' scales and biases, room to align it all."""
        ring = self.stages * ((self.rows + self.columns) * 128 + 16)
        return ring + share_bytes(self.columns, self.shares, self.turns) + 16 * self.columns + 1024


def share_bytes(columns: int, slots: int, turns: bool) -> int:
    """Shared memory of so many slots for adapters' shares, for each consumer that has tiles of its own."""
    return slots * (1 + turns) * (columns * 32 + 32)


def product(columns: int, fp8: bool) -> str:
    """The C++ wrapper of one `wgmma` of 64 rows × `columns` × 32 bytes of K."""
    count = columns // 2
    kind, letter, tail = ("f32.e4m3.e4m3", "f", ", 1, 1") if fp8 else ("s32.s8.s8", "r", "")
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    return f"""
__device__ __forceinline__ void product(acc_t (&d)[{count}], u64 a, u64 b, int keep) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}k32.{kind} {{{registers}}}, %{count}, %{count + 1}, p{tail};\\n}}\\n"
    : {operands} : "l"(a), "l"(b), "r"(keep));
}}
"""


def source(variant: GemmVariant) -> str:
    """The whole program of one variant."""
    defines = {
        "NAME": variant.name,
        "WM": variant.blocks,
        "BN": variant.columns,
        "CLUSTER": variant.cluster,
        "STAGES": variant.stages,
        "FP8": int(variant.fp8),
        "GEGLU": int(variant.geglu),
        "SILU": int(variant.silu),
        "ADDED": int(variant.added),
        "HALF": int(variant.half),
        "TURNS": int(variant.turns),
        "GROUP": variant.group,
        "SHARES": variant.shares,
        "SHARERS": SHARERS,
    }
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    wgmma = product(variant.columns, variant.fp8)
    return head + DEVICE + TYPES + LOCATE + wgmma + _LOADS + PACK + ROWS + ACTIVATE + EPILOGUE + SHARE + _KERNEL


TYPES = r"""
#if FP8
typedef float acc_t;
#define FENCE_REG(x) asm volatile("" : "+f"(x) :: "memory")
#define BITS(x) (x)
#define FLOAT(x) (x)
#else
typedef int acc_t;
#define FENCE_REG(x) asm volatile("" : "+r"(x) :: "memory")
#define BITS(x) __float_as_int(x)  // fp32 in an accumulator's register, once the product is done
#define FLOAT(x) __int_as_float(x)
#endif
#if TURNS
#define CONSUMERS 1  // of one tile
#else
#define CONSUMERS 2
#endif
#define BM (64 * WM * CONSUMERS)
#define A_BYTES (BM * 128)
#define STAGE_BYTES ((BM + BN) * 128)
#define RINGS (3 - CONSUMERS)  // of slots for adapters' shares: one for each tile under way
#define SLOT_BYTES (BN * 32)
#define PRODUCER_REGISTERS (SHARES ? 56 : 40)  // of 168 that a thread has at the start; consumers get what it leaves

// The order and types of these fields are repeated in gemm.py.
struct Problem {
  void* out; const void* residual;
  const float* scale; const float* bias; const float* row_bias; const float* row_scale; const float* out_inv_scale;
  const u64* adapters; const void* low;       // adapters' shares: their tables' addresses, [images, uses]; down(x)
  long long out_stride, residual_stride, row_bias_stride;
  int columns, column_tiles, phases;          // output channels and tiles of them, per phase
  int images, tiles_h, tiles_w, log_tile_w;   // tiles of BM pixels: 2^log_tile_w wide
  int box_dh, box_dw;                         // where the second block's half of A begins
  int channels, taps, tap_w;                  // the K loop: taps × channels, 128 at a time
  int stride, pad_h, pad_w;
  int height, width, up;                      // pixels that the tiles cover; the output is `up` times as large
  int inverse_step;                           // 0: out_inv_scale is one number, 1: one a column
  int uses, ranks, low_stride, layer;         // of an image; of a use, and of a row, in down(x); in adapters' tables
  int tokens;                                 // rows of each image where they follow one another; 0: maps
};
"""

LOCATE = r"""
struct Where { int image, h, w, phase, n; };  // a tile: its first pixel, and its first column within the phase
__device__ __forceinline__ Where locate(const Problem& p, int tile, u32 rank) {
  int pairs = p.phases * p.column_tiles / CLUSTER;
#if GROUP > 1
  int first = tile / (GROUP * pairs) * GROUP, within = tile - first * pairs;
  int left = p.images * p.tiles_h * p.tiles_w - first, side = left < GROUP ? left : GROUP;
  int m = first + within % side, column = within / side * CLUSTER + rank;
#else
  int m = tile / pairs, column = (tile - m * pairs) * CLUSTER + rank;
#endif
  Where t;
  t.phase = column / p.column_tiles;
  t.n = (column - t.phase * p.column_tiles) * BN;
  int row = m / p.tiles_w;
  t.w = (m - row * p.tiles_w) << p.log_tile_w;
  t.image = row / p.tiles_h;
  t.h = (row - t.image * p.tiles_h) * (BM >> p.log_tile_w);
  return t;
}
"""

_LOADS = r"""
__device__ __forceinline__ void load_a(u32 to, const Map* map, u32 bar, int c, int w, int h, int image) {
#if CLUSTER > 1
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
    :: "r"(to), "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(image), "h"((unsigned short)((1 << CLUSTER) - 1))
    : "memory");
#else
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%3, %4, %5, %6}], [%2];"
    :: "r"(to), "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(image) : "memory");
#endif
}
__device__ __forceinline__ void load_b(u32 to, const Map* map, u32 bar, int k, int group) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%3, %4, %4, %4, %5}], [%2];"
    :: "r"(to), "l"(map), "r"(bar), "r"(k), "r"(0), "r"(group) : "memory");
}
"""

PACK = r"""
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
  return r;
}
__device__ __forceinline__ void add_pair(float& lo, float& hi, u32 pair) {
#if HALF
  float a, b;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
    : "=f"(a), "=f"(b) : "r"(pair));
  lo += a; hi += b;
#else
  lo += __uint_as_float(pair << 16); hi += __uint_as_float(pair & 0xFFFF0000u);
#endif
}
"""

_KERNEL = r"""
__device__ __forceinline__ void produce(const Problem& p, const Map* map_a, const Map* map_b, u32 ring, u32 full,
                                        u32 empty, int first, int step, int tiles, u32 rank) {
  u32 stage = 0, parity = 0;
  for (int tile = first; tile < tiles; tile += step) {
    Where t = locate(p, tile, rank);
    int w0 = t.w * p.stride - p.pad_w + (t.phase & 1), h0 = t.h * p.stride - p.pad_h + (t.phase >> 1);
    w0 += rank * p.box_dw * p.stride; h0 += rank * p.box_dh * p.stride;
#if GEGLU
    int group = t.n / 64;
#else
    int group = (t.phase * p.columns + t.n) / 32;
#endif
    for (int tap = 0; tap < p.taps; ++tap) {
      int dh = tap / p.tap_w, dw = tap - dh * p.tap_w;
      #pragma unroll 1
      for (int c = 0; c < p.channels; c += 128) {
        barrier_wait(empty + 8 * stage, parity ^ 1);
        u32 bar = full + 8 * stage, a = ring + stage * STAGE_BYTES;
        barrier_expect(bar, STAGE_BYTES);
        load_a(a + rank * (A_BYTES / CLUSTER), map_a, bar, c, w0 + dw, h0 + dh, t.image);
        load_b(a + A_BYTES, map_b, bar, tap * p.channels + c, group);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
      }
    }
  }
}

template <int STEPS>
__device__ __forceinline__ void products(acc_t (&acc)[WM][BN / 2], u64 a, u64 b, int keep) {
  #pragma unroll
  for (int k = 0; k < STEPS; ++k)
    #pragma unroll
    for (int m = 0; m < WM; ++m) product(acc[m], a + 2 * k + m * 512, b + 2 * k, k ? 1 : keep);
}
__device__ __forceinline__ void skip(u32& stage, u32& parity, u32 count) {
  stage += count; parity ^= stage / STAGES & 1; stage %= STAGES;
}

extern "C" __global__ void __launch_bounds__(384, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
NAME(const __grid_constant__ Map map_a, const __grid_constant__ Map map_b, const __grid_constant__ Problem p) {
  extern __shared__ u8 memory[];
  u32 ring = (shared_address(memory) + 1023) & ~1023u;
  u32 slots = ring + STAGES * STAGE_BYTES, full = slots + RINGS * SHARES * (SLOT_BYTES + 32), empty = full + 8 * STAGES;
  float* kept = (float*)(memory + (empty + 8 * STAGES - shared_address(memory)));
#if SHARES
  Ring shares = {memory + (slots - shared_address(memory)), RINGS > 1 && threadIdx.x >= 256 ? SHARES : 0, 0};
#endif
  u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, CONSUMERS * CLUSTER);
    }
#if SHARES
    for (int s = 0; s < RINGS * SHARES; ++s) {
      barrier_init(shares.full() + 8 * s, SHARERS);
      barrier_init(shares.empty() + 8 * s, CONSUMERS * 4);  // a consumer's warps
    }
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#if CLUSTER > 1
  cluster_sync();
#else
  __syncthreads();
#endif
  int tiles = p.images * p.tiles_h * p.tiles_w * (p.phases * p.column_tiles / CLUSTER);
  int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
    if (threadIdx.x == 0) produce(p, &map_a, &map_b, ring, full, empty, first, step, tiles, rank);
#if SHARES
    if (threadIdx.x >= 128 - SHARERS) fill(p, shares.memory, first, step, tiles, rank);
#endif
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"((3 * 168 - PRODUCER_REGISTERS) / 2));
    // Taken from lane 0 so that the assembler sees one path for a whole warp: it serializes products on others.
    int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128 - 1, 0), thread = threadIdx.x & 127;
    u32 stage = 0, parity = 0;
#if TURNS
    const int consumer = 0;
    u32 others = p.taps * ((p.channels + 127) / 128);  // stages of the other's tile
    if (group == 1) {
      skip(stage, parity, others);
      asm volatile("bar.arrive 1, 256;" ::: "memory");
    }
    for (int tile = first + group * step; tile < tiles; tile += 2 * step) {
#else
    int consumer = group;
    for (int tile = first; tile < tiles; tile += step) {
#endif
      Where t = locate(p, tile, rank);
      Rows rows = rows_of(p, t, consumer);
#if !GEGLU
      if (p.residual) {
        int ahead = (threadIdx.x & 3) * 64;
        #pragma unroll
        for (int i = 0; i < 2 * WM; ++i) if (rows.valid[i] && ahead < BN && t.n + ahead < p.columns)
          asm volatile("prefetch.global.L2 [%0];" :: "l"((const u8*)p.residual +
            (rows.pixel[i] * p.residual_stride + t.n + ahead) * 2));
      }
#endif
      Columns mine = columns_of(p, t);
      acc_t acc[WM][BN / 2];
      int keep = 0, previous = -1;
#if TURNS
      asm volatile("bar.sync %0, 256;" :: "r"(1 + group) : "memory");
#endif
      for (int tap = 0; tap < p.taps; ++tap) {
        for (int c = 0; c < p.channels; c += 128) {
          barrier_wait(full + 8 * stage, parity);
          u64 a = operand(ring + stage * STAGE_BYTES + consumer * WM * 8192);
          u64 b = operand(ring + stage * STAGE_BYTES + A_BYTES);
          #pragma unroll
          for (int m = 0; m < WM; ++m)
            #pragma unroll
            for (int i = 0; i < BN / 2; ++i) FENCE_REG(acc[m][i]);
          product_fence();
          if (p.channels - c > 64) {
            products<4>(acc, a, b, keep);
          } else {  // half of the last chunk: what lies beyond the channels was filled with zeros
            products<2>(acc, a, b, keep);
          }
          keep = 1;
          product_commit();
          if (previous >= 0) {
            product_wait<1>();
            if (thread < CLUSTER) barrier_arrive(empty + 8 * previous, thread);
          }
          previous = stage;
          if (++stage == STAGES) { stage = 0; parity ^= 1; }
        }
      }
#if TURNS
      asm volatile("bar.arrive %0, 256;" :: "r"(2 - group) : "memory");
      skip(stage, parity, others);
#endif
      keep_columns(kept + group * 2 * BN, mine, group);
      Residual residual;
#if SHARES
      Share share;
      take(share, p, rows, shares);
#elif AHEAD
      fetch(residual, p, t, rows, 0);
#endif
      product_wait<0>();
      #pragma unroll
      for (int m = 0; m < WM; ++m)
        #pragma unroll
        for (int i = 0; i < BN / 2; ++i) FENCE_REG(acc[m][i]);
      if (thread < CLUSTER) barrier_arrive(empty + 8 * previous, thread);
#if SHARES
      scale_sums(acc, p, rows, kept + group * 2 * BN);
      add_shares(acc, share, p, rows, shares);
#if AHEAD
      fetch(residual, p, t, rows, 0);
#endif
#endif
      epilogue(p, t, acc, rows, kept + group * 2 * BN, residual);
    }
  }
#if CLUSTER > 1
  cluster_sync();  // no block may end while its neighbour still signals it
#endif
}
"""
