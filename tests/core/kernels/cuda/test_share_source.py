"""What adapters add inside the Hopper product: its code compiled for the CPU; tensor core and barriers are in C++."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from core.kernels.branches import BranchPart
from core.kernels.cuda import gemm
from core.kernels.cuda.driver import compile_program, compiler_unsupported_reason
from core.kernels.cuda.epilogue_source import ROWS
from core.kernels.cuda.gemm_source import LOCATE, TYPES, GemmVariant, source
from core.kernels.cuda.low_rank import ENTRY, pack
from core.kernels.cuda.share_source import CHUNKS, RING, SHARERS
from core.kernels.cuda.tiles import SHAPES, Tile
from tests.core.quant.stage import CACHE

COMPILER = shutil.which("g++")
ROOM = 128  # ranks of a use in down(x)
HOST = r"""
#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
typedef unsigned char u8; typedef unsigned int u32; typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static thread_local struct { int x; } threadIdx;
static float __int_as_float(int bits) { float f; memcpy(&f, &bits, 4); return f; }
static int __float_as_int(float f) { int bits; memcpy(&bits, &f, 4); return bits; }
static float upper(u32 bits) { float f; bits &= 0xFFFF0000u; memcpy(&f, &bits, 4); return f; }
static float value(u32 pair, int odd) { return upper(odd ? pair : pair << 16); }
static u32 bf16(float f) { u32 b; memcpy(&b, &f, 4); return (b + 0x7FFFu + (b >> 16 & 1)) >> 16; }
static u32 scaled_pair(u32 pair, float by) { return bf16(value(pair, 0) * by) | bf16(value(pair, 1) * by) << 16; }
"""
# The product of 16×8×16 by its definition: which lane holds what of A, B and of the sums. `sums` [M, columns of `up`].
TENSOR_CORE = r"""
extern "C" void shares(const Problem* given, float* sums, int columns) {
  const Problem& p = *given;
  int tiles = p.images * p.tiles_h * p.tiles_w * p.phases * p.column_tiles;
  std::vector<u8> slot(SLOT_BYTES);
  for (int tile = 0; tile < tiles; ++tile) {
    Where t = locate(p, tile, 0);
    each_chunk(p, t, [&](const Adapter& a, int at, const Chunk& chunk) {
      for (int row = 0; row < BN; ++row) put(p, t, sixteen_of(p, t, a, at, row), slot.data(), row);
      for (int consumer = 0; consumer < CONSUMERS; ++consumer)
        for (int warp = 0; warp < 4; ++warp)
          for (int m = 0; m < WM; ++m) {
            float left[16][16];
            for (int lane = 0; lane < 32; ++lane) {
              threadIdx.x = 128 * (1 + consumer) + 32 * warp + lane;
              Rows r = rows_of(p, t, consumer);
              for (int i = 0; i < 2; ++i) {
                uint2 v = low_of(p, chunk, r.pixel[2 * m + i], r.valid[2 * m + i]);
                int row = lane / 4 + 8 * i, k = 2 * (lane % 4);
                left[row][k] = value(v.x, 0); left[row][k + 1] = value(v.x, 1);
                left[row][k + 8] = value(v.y, 0); left[row][k + 9] = value(v.y, 1);
              }
            }
            for (int block = 0; block < BN / 8; ++block) {
              float right[16][8];
              for (int lane = 0; lane < 32; ++lane) {
                const u32* b = (const u32*)(slot.data() + block / 2 * 512 + lane * 16) + 2 * (block % 2);
                for (int half = 0; half < 2; ++half)
                  for (int e = 0; e < 2; ++e) right[8 * half + 2 * (lane % 4) + e][lane / 4] = value(b[half], e);
              }
              for (int lane = 0; lane < 32; ++lane) {
                threadIdx.x = 128 * (1 + consumer) + 32 * warp + lane;
                Rows r = rows_of(p, t, consumer);
                int q = lane % 4;
                for (int i = 0; i < 2; ++i)
                  for (int e = 0; e < 2; ++e) {
#if GEGLU
                    int n = t.n / 2 + 32 * (block / 8) + 8 * q + block % 8, column = n + e * p.columns;
#else
                    int n = t.n + 32 * (block / 4) + 8 * q + 2 * (block % 4) + e, column = n;
#endif
                    if (!r.valid[2 * m + i] || n >= p.columns) continue;
                    float sum = 0;
                    for (int k = 0; k < 16; ++k) sum += left[lane / 4 + 8 * i][k] * right[k][2 * q + e];
                    sums[(long long)r.pixel[2 * m + i] * columns + column] += sum;
                  }
              }
            }
          }
    });
  }
}
"""
# A block of threads: barriers of shared memory, and a warp's own, by those of C++.
THREADS = r"""
struct State { u32 count; std::atomic<u32> pending, phase; };
struct Warp { std::barrier<> all{32}; int value; u32 left[32][4], right[32][2]; };
static std::unique_ptr<u8[]> shared;
static std::unique_ptr<State[]> states;
static std::unique_ptr<Warp[]> warps;
static u32 shared_address(const void* p) { return (const u8*)p - shared.get(); }
static void barrier_init(u32 bar, u32 count) {
  State& s = states[bar / 8];
  s.count = count; s.pending = count; s.phase = 0;
}
static void barrier_arrive_local(u32 bar) {
  State& s = states[bar / 8];
  if (--s.pending == 0) { s.pending = s.count; ++s.phase; s.phase.notify_all(); }
}
static void barrier_wait(u32 bar, u32 parity) {
  std::atomic<u32>& phase = states[bar / 8].phase;
  for (u32 now = phase; (now & 1) == parity; now = phase) phase.wait(now);
}
static void __syncwarp() { warps[threadIdx.x / 32].all.arrive_and_wait(); }
static int __shfl_sync(u32, int value, int lane) {
  Warp& w = warps[threadIdx.x / 32];
  if (threadIdx.x % 32 == lane) w.value = value;
  __syncwarp();
  value = w.value;
  __syncwarp();
  return value;
}
static void add_product(acc_t* sums, const u32 (&a)[4], u32 b0, u32 b1) {
  Warp& w = warps[threadIdx.x / 32];
  int lane = threadIdx.x % 32;
  memcpy(w.left[lane], a, sizeof a); w.right[lane][0] = b0; w.right[lane][1] = b1;
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    float c = FLOAT(sums[i]);
    for (int k = 0; k < 16; ++k) {
      u32 left = w.left[lane / 4 * 4 + k % 8 / 2][i / 2 + 2 * (k / 8)];
      u32 right = w.right[(2 * (lane % 4) + i % 2) * 4 + k % 8 / 2][k / 8];
      c += value(left, k % 2) * value(right, k % 2);
    }
    sums[i] = BITS(c);
  }
  __syncwarp();
}
"""
# One block's: its producer's other warps and its consumers, as `gemm_source.py` starts them.
BLOCK = r"""
static void consume(const Problem& p, u8* memory, int tiles, float* sums, int columns) {
  int group = threadIdx.x / 128 - 1, consumer = TURNS ? 0 : group, q = threadIdx.x % 4;
  Ring ring = {memory, RINGS > 1 && threadIdx.x >= 256 ? SHARES : 0u, 0};
  for (int tile = TURNS ? group : 0; tile < tiles; tile += TURNS ? 2 : 1) {
    Where t = locate(p, tile, 0);
    Rows rows = rows_of(p, t, consumer);
    acc_t acc[WM][BN / 2] = {};
    Share share;
    take(share, p, rows, ring);
    add_shares(acc, share, p, rows, ring);
    for (int i = 0; i < 2 * WM; ++i)
      for (int at = 2 * (i & 1); at < BN / 2; at += at % 2 ? 3 : 1) {
        int block = at / 4, e = at % 2;
#if GEGLU
        int n = t.n / 2 + 32 * (block / 8) + 8 * q + block % 8, column = n + e * p.columns;
#else
        int n = t.n + 32 * (block / 4) + 8 * q + 2 * (block % 4) + e, column = n;
#endif
        if (rows.valid[i] && n < p.columns)
          sums[(long long)rows.pixel[i] * columns + column] = FLOAT(acc[i >> 1][at]);
      }
  }
}
extern "C" void block(const Problem* p, float* sums, int columns) {
  int tiles = p->images * p->tiles_h * p->tiles_w * p->phases * p->column_tiles;
  int size = RINGS * SHARES * (SLOT_BYTES + 32);
  shared.reset(new u8[size]); states.reset(new State[size / 8]); warps.reset(new Warp[12]);
  Ring ring = {shared.get(), 0, 0};
  for (int s = 0; s < RINGS * SHARES; ++s) {
    barrier_init(ring.full() + 8 * s, SHARERS);
    barrier_init(ring.empty() + 8 * s, CONSUMERS * 4);
  }
  std::vector<std::thread> threads;
  for (int thread = 128 - SHARERS; thread < 384; ++thread)
    threads.emplace_back([=] {
      threadIdx.x = thread;
      if (thread < 128) fill(*p, shared.get(), 0, 1, tiles, 0);
      else consume(*p, shared.get(), tiles, sums, columns);
    });
  for (auto& one : threads) one.join();
}
"""


@cache
def compiled() -> ctypes.CDLL:
    """The code of all variants in one library, each in a namespace of its own: headers cost more than a variant."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    text = HOST
    for blocks, columns, turns, geglu in sorted({case.variant for case in (*CASES.values(), *IN_THREADS.values())}):
        suffix = suffix_of((blocks, columns, turns, geglu))
        defines: dict[str, int | str] = {
            "WM": blocks, "BN": columns, "CLUSTER": 1, "FP8": 0, "GEGLU": int(geglu), "TURNS": int(turns), "GROUP": 1,
            "SHARES": 2, "SHARERS": SHARERS,
        }  # fmt: skip
        defines |= {entry: entry + suffix for entry in ("shares", "block")}
        text += "".join(f"#undef {name}\n#define {name} {value}\n" for name, value in defines.items())
        text += f"namespace variant{suffix} {{\n{TYPES}{LOCATE}{ROWS}{CHUNKS}{TENSOR_CORE}{THREADS}{RING}{BLOCK}\n}}\n"
    flags = ["-O1", "-w", "-shared", "-fPIC", "-pthread", "-std=c++20"]
    digest = hashlib.sha256("\0".join((text, COMPILER, *flags)).encode()).hexdigest()
    library = CACHE / f"shares-{digest[:16]}.so"  # kept between runs
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            file, made = Path(folder) / "shares.cpp", Path(folder) / "shares.so"
            file.write_text(text)
            subprocess.run([COMPILER, *flags, file, "-o", made], check=True)
            made.rename(library)
    return ctypes.CDLL(str(library))


def suffix_of(variant: tuple[int, int, bool, bool]) -> str:
    return "".join(f"_{int(value)}" for value in variant)


class Case(NamedTuple):
    """Maps [images, height, width] in tiles of rows × columns pixels; `tokens`: one long row of images instead."""

    tile: tuple[int, int, bool]
    columns: int
    height: int = 1
    width: int = 1
    tokens: int = 0
    phases: int = 1
    geglu: bool = False

    @property
    def variant(self) -> tuple[int, int, bool, bool]:
        """Of the code that its tile runs."""
        return *self.tile, self.geglu


CASES = {
    "tokens": Case((2, 128, False), 192, tokens=48),
    "tokens in turns": Case((2, 160, True), 320, tokens=256),
    "few tokens": Case((1, 64, False), 96, tokens=21),
    "vectors": Case((1, 128, False), 160, tokens=1),
    "wide": Case((1, 256, False), 640, tokens=40),
    "gated": Case((2, 128, False), 96, tokens=70, geglu=True),
    "gated, wide": Case((1, 256, False), 160, tokens=33, geglu=True),
    "gated in turns": Case((2, 128, True), 64, tokens=130, geglu=True),
    "maps": Case((1, 160, False), 320, 9, 13),
    "maps, doubled": Case((2, 160, False), 160, 9, 10, phases=4),
}
IN_THREADS = {
    "few tokens": Case((1, 64, False), 96, tokens=21),
    "gated in turns": Case((1, 64, True), 64, tokens=70, geglu=True),
    "maps in turns": Case((1, 64, True), 64, 5, 7),
}


def adapter(seed: int, columns: int, ranks: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Its table, `up` [columns, ranks] of small whole numbers, and what the table points to."""
    g = torch.Generator().manual_seed(seed)
    whole, parts = torch.zeros(columns, 0), []
    for rank, start, end in ranks:
        up = torch.randint(-3, 4, (end - start, rank), generator=g).float()
        parts.append(BranchPart(start, torch.zeros(rank, 1, 8), up))
        padded = torch.zeros(columns, rank + -rank % 8)
        padded[start:end, :rank] = up
        whole = torch.cat([whole, padded], dim=1)
    factors = pack(parts, columns, torch.bfloat16)
    table = torch.zeros(3, ENTRY, dtype=torch.int64)
    table[1] = torch.tensor([*(t.data_ptr() for t in factors[:3]), factors.ranks])
    return table, whole, list(factors[:3])


@pytest.mark.quick("maps in turns")
@pytest.mark.parametrize("name", IN_THREADS)
def test_a_block_of_threads_passes_slots_on(name: str) -> None:
    rows_get_their_own(IN_THREADS[name], "block")


@pytest.mark.parametrize("name", CASES)
def test_rows_get_their_own(name: str) -> None:
    rows_get_their_own(CASES[name], "shares")


def rows_get_their_own(case: Case, run: str) -> None:
    """One adapter, none, two, one of layers side by side; in tiles of several images, and at their ends. Chunk by chunk
    (`shares`), and through the ring of slots by all threads of a block (`block`).
    """
    blocks, wide, turns = case.tile
    columns = case.columns * (2 if case.geglu else 1)  # of the weights
    g = torch.Generator().manual_seed(3)
    third = columns // 3 // 32 * 32
    made = [
        adapter(1, columns, [(4, 0, columns)]),
        adapter(2, columns, [(16, 0, third), (24, third, columns)]),
        adapter(3, columns, [(70, 0, columns)]),
        adapter(4, columns, [(8, 0, 64), (8, 64, columns)]),
    ]
    uses = [[0, None], [None, None], [1, 2], [None, 3], [2, None]]
    images, up = len(uses), 2 if case.phases == 4 else 1
    addresses = torch.tensor([[0 if u is None else made[u][0].data_ptr() for u in row] for row in uses])
    height, width = (1, case.tokens) if case.tokens else (case.height, case.width)
    pixels = height * width * up * up
    low = torch.full((images * pixels, 2, ROOM), float("nan"), dtype=torch.bfloat16)
    wanted = torch.zeros(images, pixels, columns)
    inverse = torch.tensor([0.5, 2.0])[torch.arange(case.columns) % 2]
    for image, row in enumerate(uses):
        for place, use in enumerate(row):
            if use is not None:
                whole = made[use][1]
                own = torch.randint(-3, 4, (pixels, whole.shape[1]), generator=g).float()
                low.view(images, pixels, 2, ROOM)[image, :, place, : whole.shape[1]] = own.bfloat16()
                wanted[image] += own @ whole.t()
    if case.geglu:
        wanted[..., : case.columns] *= inverse
    tile = Tile(blocks, wide, 1, int(turns))
    tall, across = (1, images * width) if case.tokens else (height, width)
    tile_h, tile_w = (1, tile.rows) if case.tokens else gemm._pixels(tile.rows, 1, tall, across)
    arguments = gemm.GemmArguments(
        inverse=inverse.data_ptr(), adapters=addresses.data_ptr(), low=low.data_ptr(), columns=case.columns,
        column_tiles=-(-columns // wide), phases=case.phases, images=1 if case.tokens else images,
        tiles_h=-(-tall // tile_h), tiles_w=-(-across // tile_w), log_tile_w=tile_w.bit_length() - 1, height=tall,
        width=across, up=up, inverse_step=1, uses=2, ranks=ROOM, low_stride=2 * ROOM, layer=1, tokens=case.tokens,
    )  # fmt: skip
    found = torch.zeros(images * pixels, columns)
    getattr(compiled(), run + suffix_of(case.variant))(
        ctypes.byref(arguments), ctypes.c_void_p(found.data_ptr()), ctypes.c_int(columns)
    )
    assert torch.equal(found.view_as(wanted), wanted)


@pytest.mark.skipif(compiler_unsupported_reason() is not None, reason="there is no NVRTC")
@pytest.mark.quick("fp8-shape3", "fp8-shape7", "int8-shape5")  # all take a minute
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_it_compiles_for_hopper(shape: tuple[int, int, int], kind: str) -> None:
    blocks, columns, turns = shape
    tile = Tile(blocks, columns, 2, turns)
    taken = gemm.share_bytes(columns, gemm.slots(tile), bool(turns))
    for geglu in (False, True) if columns % 64 == 0 else (False,):
        variant = GemmVariant(
            blocks, columns, 2, gemm.stages(tile.rows, columns, taken), fp8=kind == "fp8", geglu=geglu,
            turns=bool(turns), shares=gemm.slots(tile),
        )  # fmt: skip
        assert variant.shared_bytes <= 227 * 1024
        assert compile_program(source(variant))
