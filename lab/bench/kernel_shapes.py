"""The shapes at which `lab.bench.kernels` measures the GPU kernels, and the variants of attention that it tries."""

from __future__ import annotations

from typing import NamedTuple


class ProductShape(NamedTuple):
    """A product of `rows` rows an image: N columns over K; of a convolution Cout, Cin, side of the input, stride."""

    kernel: str
    columns: int
    depth: int
    rows: int = 0
    side: int = 0
    stride: int = 1


def _convs(kernel: str, *shapes: tuple[int, int, int, int]) -> list[ProductShape]:
    return [ProductShape(kernel, n, c, side=side, stride=stride) for n, c, side, stride in shapes]


PRODUCTS: dict[str, tuple[tuple[int, ...], list[ProductShape]]] = {
    "sdxl": ((16, 8, 4, 2), [
        *(ProductShape(*one) for one in (
            ("linear", 1920, 640, 4096), ("linear", 640, 640, 4096), ("geglu", 5120, 640, 4096),
            ("linear", 640, 2560, 4096), ("linear", 3840, 1280, 1024), ("linear", 1280, 1280, 1024),
            ("geglu", 10240, 1280, 1024), ("linear", 1280, 5120, 1024),
        )),
        *_convs("conv", (320, 320, 128, 1), (320, 640, 128, 1), (320, 960, 128, 1), (320, 320, 128, 2)),
        *_convs("conv", (640, 320, 64, 1), (640, 640, 64, 1), (640, 960, 64, 1), (640, 1280, 64, 1)),
        *_convs("conv", (640, 1920, 64, 1), (640, 640, 64, 2), (1280, 640, 32, 1), (1280, 1280, 32, 1)),
        *_convs("conv", (1280, 1920, 32, 1), (1280, 2560, 32, 1)),
        *_convs("upsample", (1280, 1280, 32, 1), (640, 640, 64, 1)),
    ]),
    "zimage": ((1, 2, 4, 8), [ProductShape(*one) for one in (  # 1024 × 1024 pixels and a prompt of 128 tokens
        ("linear", 11520, 3840, 4224), ("linear", 3840, 3840, 4224), ("swiglu", 20480, 3840, 4224),
        ("linear", 3840, 10240, 4224),
    )]),
    "llama": ((1, 16, 64, 128, 256), [ProductShape(*one) for one in (
        ("stream", 6144, 4096, 1), ("stream", 4096, 4096, 1), ("gated", 28672, 4096, 1), ("stream", 4096, 14336, 1),
    )]),
}  # fmt: skip
"""By model the numbers of images (of rows, while decoding), and its products."""
SMALL = [
    ProductShape("linear", 96, 64, 64), ProductShape("geglu", 128, 64, 64), ProductShape("swiglu", 128, 64, 64),
    ProductShape("conv", 32, 32, side=8), ProductShape("conv", 32, 32, side=8, stride=2),
    ProductShape("upsample", 32, 32, side=4),
    ProductShape("stream", 96, 64, 4), ProductShape("gated", 128, 64, 4),
]  # fmt: skip
ATTENTION = {  # queries, keys, heads, dimensions of a head, whether images have lengths, images
    "sdxl": [(*shape, 64, False, images) for shape in ((4096, 4096, 10), (1024, 1024, 20), (4096, 77, 10))
             for images in (16, 2)],
    "zimage": [(4224, 4224, 30, 128, True, images) for images in (1, 4)],
}  # fmt: skip
VARIANTS = {  # by head and whether keys are few: consumers, keys, stages, emulated
    (64, False): ((3, 128, 2, 0), (3, 128, 3, 0), (2, 128, 3, 0), (3, 128, 3, 1), (3, 64, 4, 0)),
    (64, True): ((2, 80, 2, 0), (2, 80, 4, 0), (3, 80, 2, 0), (3, 80, 4, 0)),
    (128, False): ((2, 128, 2, 0), (2, 128, 2, 1), (2, 144, 2, 0), (2, 160, 2, 0), (3, 64, 3, 0), (3, 80, 2, 0)),
}
DECODE = ((64, 1500), (256, 192))  # rows and tokens of each
MEMORY: dict[str, list[tuple[str, tuple[int, ...]]]] = {  # function, and shape of what it reads
    "sdxl": [
        *((name, shape) for shape in ((65536, 640), (16384, 1280))
          for name in ("copy", "layer_norm", "quantize", "quantize_rows")),
        *(("group_norm", (16, side, side, c)) for side, c in (
            (128, 320), (128, 640), (128, 960), (64, 640), (64, 1920), (32, 1280), (32, 2560))),
    ],
    "zimage": [(name, (images * 4224, 3840)) for images in (1, 4) for name in ("rms_norm", "residual_norm", "rotate")],
}  # fmt: skip
