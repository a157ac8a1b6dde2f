"""CUDA C++ source of int8 products of few rows with large weights for Hopper, compiled by NVRTC, one variant at a time.

Decode is bound by reading the weights once, so all that counts is that reads never pause. A producer warp fetches rows
of 128 bytes of weights and of x into a ring by TMA; one or two warpgroups multiply with `wgmma`, weights as the left
operand (64 rows of them at a time), tokens as the right one (as few as 8). Weights depend on no earlier kernel: the
ring is filled with them before the kernel waits for the previous one (programmatic dependent launch). The depth is
split over the blocks of a cluster, which sum their parts through each other's shared memory, or of few tokens over
blocks that leave their parts to the next kernel: integers, so that the result does not depend on the split. `stream.py`
prepares the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.kernels.cuda.device_source import DEVICE
from core.kernels.cuda.gemm_source import product

SHARED_BYTES = 227 * 1024  # per multiprocessor on Hopper
_RESERVED = 1024  # of it per block
_MOST_STAGES = 12


@dataclass(frozen=True, slots=True)
class StreamVariant:
    """Compile-time parameters of the kernel.

    `tokens`: of a tile, at least those of x. `blocks`: 64-row products of weights per tile. `splits`: blocks of a
    cluster, which split the depth. `resident`: blocks per multiprocessor. `gated`: act(gate) · up, half of the tile's
    weight rows each; with `gelu` GELU by tanh, else SiLU. `dtype`: of the gated output, "s8" or "bf16"; and "f32" of
    a product whose sums are scaled by row and by column, where others leave them as integers. `apart`: the splits are
    no cluster, and leave a part of the sums each.
    """

    tokens: int
    blocks: int = 1
    splits: int = 1
    resident: int = 2
    gated: bool = False
    gelu: bool = False
    dtype: str = "s8"
    apart: bool = False

    @property
    def name(self) -> str:
        """The kernel's name, as profilers show it."""
        kind = "_scaled" if self.scaled else ""
        kind = ("_geglu" if self.gelu else "_swiglu") + f"_{self.dtype}" if self.gated else kind
        kind += "_apart" if self.apart else ""
        return f"stream_{64 * self.blocks}x{self.tokens}_splits{self.splits}_resident{self.resident}{kind}"

    @property
    def scaled(self) -> bool:
        """Return whether sums are scaled."""
        return self.dtype == "f32"

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply, each its share of the tokens: a thread holds at most 128 sums."""
        return 2 if self.tokens * self.blocks > 256 else 1

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32

    @property
    def stage_bytes(self) -> int:
        return (64 * self.blocks + self.tokens) * 128

    @property
    def stages(self) -> int:
        """The depth of the ring."""
        room = SHARED_BYTES // self.resident - 2 * _RESERVED - 16 * _MOST_STAGES
        return min(_MOST_STAGES, room // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring, in which the sums are laid out at the end, its barriers, room to align."""
        sums = self.tokens * (64 * self.blocks + 4) * 4
        return max(self.stages * self.stage_bytes, sums) + 16 * self.stages + 1024


def source(variant: StreamVariant) -> str:
    """The whole program of one variant."""
    defines = {
        "NAME": variant.name,
        "TOKENS": variant.tokens,
        "WM": variant.blocks,
        "SPLITS": variant.splits,
        "CLUSTER": 1 if variant.apart else variant.splits,
        "STAGES": variant.stages,
        "RESIDENT": variant.resident,
        "CONSUMERS": variant.consumers,
        "RING_BYTES": variant.shared_bytes - 16 * variant.stages - 1024,
        "GATED": int(variant.gated),
        "GELU": int(variant.gelu),
        "OUT_INT8": int(variant.dtype == "s8"),
        "SCALED": int(variant.scaled),
    }
    head = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    wgmma = product(variant.tokens // variant.consumers, fp8=False)
    return head + DEVICE + "typedef int acc_t;\n" + wgmma + _KERNEL


_KERNEL = r"""
#define BN (TOKENS / CONSUMERS)  // tokens of one consumer
#define W_BYTES (WM * 8192)
#define STAGE_BYTES (W_BYTES + TOKENS * 128)
#define LINE (64 * WM + 4)       // words from one token's sums to the next one's: no two threads meet in a bank

// The order and types of these fields are repeated in stream.py.
struct Problem {
  void* out; const float* scale; const float* bias;        // [N]; of a gated product 2N
  const float* inverse;                                    // [N] of a gated product; of a scaled one rows' scales [T]
  int rows, columns, steps;                                // tokens, columns of the output, 128 bytes of depth a block
};

__device__ __forceinline__ void load(u32 to, const Map* map, u32 bar, int k, int row, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    " [%0], [%1, {%3, %4}], [%2], %5;"
    :: "r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "l"(policy) : "memory");
}
__device__ __forceinline__ void load_weights(u32 to, const Map* map, u32 bar, int k, int n, const Problem& p) {
  const u64 once = 0x12F0000000000000ull;  // evicted first: weights are read once
#if GATED
  load(to, map, bar, k, n, once);
  load(to + W_BYTES / 2, map, bar, k, p.columns + n, once);
#else
  load(to, map, bar, k, n, once);
#endif
}
__device__ __forceinline__ int4 sums_of(u32 at, u32 rank) {  // four words of another block's shared memory
  int4 v;
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
    "ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [remote];\n}"
    : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at), "r"(rank) : "memory");
  return v;
}
__device__ __forceinline__ int4 summed(u32 at, u32 rank) {
#if CLUSTER > 1
  int4 v = sums_of(at, 0);
  #pragma unroll
  for (u32 r = 1; r < CLUSTER; ++r) {
    int4 w = sums_of(at, r);
    v.x += w.x; v.y += w.y; v.z += w.z; v.w += w.w;
  }
  return v;
#else
  int4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
    : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
#endif
}
__device__ __forceinline__ float scaled(int sum, float row, float column, float bias) {  // nothing is contracted
  return __fadd_rn(__fmul_rn(__fmul_rn((float)sum, row), column), bias);
}
#if GATED
__device__ __forceinline__ float activated(float x) {
#if GELU
  float y = fmaxf(1.5957691216057308f * (x + 0.044715f * x * x * x), -80.0f);
#else
  float y = x;
#endif
  float e;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * y));
  return __fdividef(x, 1.0f + e);  // 0 where e overflows
}
__device__ __forceinline__ float finished(int g, int u, const Problem& p, int n) {
  float gate = (float)g * p.scale[n], up = (float)u * p.scale[p.columns + n];
  if (p.bias) { gate += p.bias[n]; up += p.bias[p.columns + n]; }
  float y = activated(gate) * up;
  return p.inverse ? y * p.inverse[n] : y;
}
__device__ __forceinline__ u32 level(float x) {
  return (u32)__float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f)) & 255u;
}
__device__ __forceinline__ u32 pair(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
#endif

extern "C" __global__ void __launch_bounds__(128 * CONSUMERS + 32, RESIDENT)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
NAME(const __grid_constant__ Map map_w, const __grid_constant__ Map map_x, const __grid_constant__ Problem p) {
  extern __shared__ u8 memory[];
  u32 ring = (shared_address(memory) + 1023) & ~1023u, full = ring + RING_BYTES, empty = full + 8 * STAGES;
  u32 part = blockIdx.x % SPLITS, rank = CLUSTER > 1 ? part : 0;  // of the depth; of the blocks that share sums
  int n = blockIdx.x / SPLITS * (GATED ? 32 * WM : 64 * WM), first = part * p.steps * 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) { barrier_init(full + 8 * s, 1); barrier_init(empty + 8 * s, CONSUMERS); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 128 * CONSUMERS) {
    if (threadIdx.x == 128 * CONSUMERS) {
      const u64 often = 0x14F0000000000000ull;  // evicted last
      int ahead = p.steps < STAGES ? p.steps : STAGES;
      for (int s = 0; s < ahead; ++s) {
        barrier_expect(full + 8 * s, STAGE_BYTES);
        load_weights(ring + s * STAGE_BYTES, &map_w, full + 8 * s, first + 128 * s, n, p);
      }
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      for (int s = 0; s < ahead; ++s)
        load(ring + s * STAGE_BYTES + W_BYTES, &map_x, full + 8 * s, first + 128 * s, 0, often);
      u32 stage = 0, parity = 0;
      #pragma unroll 1
      for (int s = ahead; s < p.steps; ++s) {
        u32 bar = full + 8 * stage, at = ring + stage * STAGE_BYTES;
        barrier_wait(empty + 8 * stage, parity);
        barrier_expect(bar, STAGE_BYTES);
        load_weights(at, &map_w, bar, first + 128 * s, n, p);
        load(at + W_BYTES, &map_x, bar, first + 128 * s, 0, often);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
      }
    }
    __syncwarp();
  } else {
    int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0), thread = threadIdx.x & 127;
    acc_t acc[WM][BN / 2];
    u32 stage = 0, parity = 0;
    int previous = -1;
    #pragma unroll 1
    for (int s = 0; s < p.steps; ++s) {
      barrier_wait(full + 8 * stage, parity);
      u64 a = operand(ring + stage * STAGE_BYTES);
      u64 b = operand(ring + stage * STAGE_BYTES + W_BYTES + group * BN * 128);
      #pragma unroll
      for (int m = 0; m < WM; ++m)
        #pragma unroll
        for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+r"(acc[m][i]) :: "memory");
      product_fence();
      #pragma unroll
      for (int k = 0; k < 4; ++k)
        #pragma unroll
        for (int m = 0; m < WM; ++m) product(acc[m], a + 2 * k + m * 512, b + 2 * k, k ? 1 : s);
      product_commit();
      if (previous >= 0) {
        product_wait<1>();
        if (thread == 0) barrier_arrive_local(empty + 8 * previous);
      }
      previous = stage;
      if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
    product_wait<0>();
    #pragma unroll
    for (int m = 0; m < WM; ++m)
      #pragma unroll
      for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+r"(acc[m][i]) :: "memory");
    asm volatile("bar.sync 1, %0;" :: "n"(128 * CONSUMERS) : "memory");  // nobody reads the ring any more
    u32 to = ring + 4 * ((group * BN + (thread & 3) * 2) * LINE + thread / 32 * 16 + (thread & 31) / 4);
    #pragma unroll
    for (int m = 0; m < WM; ++m)
      #pragma unroll
      for (int i = 0; i < BN / 2; ++i)
        asm volatile("st.shared.b32 [%0], %1;" :: "r"(to + 4 * ((i / 4 * 8 + (i & 1)) * LINE + m * 64 + (i & 2) * 4)),
          "r"(acc[m][i]) : "memory");
    asm volatile("bar.sync 1, %0;" :: "n"(128 * CONSUMERS) : "memory");
  }
#if CLUSTER > 1
  __syncwarp();
  cluster_sync();
#endif
  if (threadIdx.x < 128 * CONSUMERS) {
    const int WIDE = GATED ? 8 * WM : 16 * WM;  // words of four columns that a token has
    for (int i = rank * 128 * CONSUMERS + threadIdx.x; i < p.rows * WIDE; i += CLUSTER * 128 * CONSUMERS) {
      int token = i / WIDE, c = i % WIDE * 4;
      u32 at = ring + 4 * (token * LINE + c);
#if GATED
      int4 g = summed(at, rank), u = summed(at + 4 * 32 * WM, rank);
      float y0 = finished(g.x, u.x, p, n + c), y1 = finished(g.y, u.y, p, n + c + 1);
      float y2 = finished(g.z, u.z, p, n + c + 2), y3 = finished(g.w, u.w, p, n + c + 3);
#if OUT_INT8
      *(u32*)((u8*)p.out + (u64)token * p.columns + n + c) =
        level(y0) | level(y1) << 8 | level(y2) << 16 | level(y3) << 24;
#else
      *(uint2*)((u8*)p.out + ((u64)token * p.columns + n + c) * 2) = make_uint2(pair(y0, y1), pair(y2, y3));
#endif
#elif SCALED
      int4 v = summed(at, rank);
      float4 s = *(const float4*)(p.scale + n + c), b = p.bias ? *(const float4*)(p.bias + n + c) : float4{};
      float r = p.inverse[token];
      *(float4*)((float*)p.out + (u64)token * p.columns + n + c) = make_float4(
        scaled(v.x, r, s.x, b.x), scaled(v.y, r, s.y, b.y), scaled(v.z, r, s.z, b.z), scaled(v.w, r, s.w, b.w));
#else
      u64 row = token + (SPLITS > CLUSTER ? (u64)part * p.rows : 0);
      *(int4*)((int*)p.out + row * p.columns + n + c) = summed(at, rank);
#endif
    }
  }
#if CLUSTER > 1
  __syncwarp();
  cluster_sync();  // no block may end while another still reads its sums
#endif
}
"""
