"""Embeds and reads the invisible watermark of SDXL's reference implementation: `dwtDct` of the invisible-watermark
package (Cox et al., Digital Watermarking and Steganography, 2007), with the message that Stability AI's code embeds.

The chroma U of an image is transformed by a Haar wavelet. Of each 4×4 block of its approximation the coefficient of the
largest magnitude, without the first, is moved to where its remainder by `_SCALE` says the block's bit: blocks carry the
message's bits in turn. U is that of whole numbers around 128, as that package's readers compute it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MESSAGE = tuple(map(int, f"{0b101100111110110010010000011110111011000110011110:b}"))
LEAST = 256 * 256
"""Pixels of the smallest image that holds it, as in the package: smaller ones have too few blocks for a bit."""

_SCALE, _BLOCK = 36.0, 4
_MARGIN = 4.0  # for rounding
_U = np.array([-0.14714119, -0.28886916, 0.43601035], np.float32)  # of R, G and B (BT.601)
_OF_U = np.array([0.0, -0.39465, 2.03211], np.float32)  # what one of U adds to R, G and B

Pixels = NDArray[np.uint8]


def embed(pixels: Pixels) -> Pixels:
    """Return pixels, uint8 [h, w, 3], with the message; smaller images as they are."""
    if pixels.shape[0] * pixels.shape[1] < LEAST:
        return pixels
    blocks, moved = _blocks(pixels), _blocks(pixels)
    at = _largest(blocks)
    values = np.take_along_axis(blocks, at, -1)
    bits = np.resize(np.array(MESSAGE, np.float32), len(blocks))[:, None]
    magnitudes = (np.abs(values) // _SCALE + 0.25 + 0.5 * bits) * _SCALE
    # It has to stay the largest, or its reader takes another one. The package's encoder leaves that to chance.
    np.put_along_axis(moved, at, 0.0, -1)
    rivals = np.abs(moved[:, 1:]).max(1, keepdims=True)
    magnitudes += _SCALE * (magnitudes <= rivals + _MARGIN)
    np.put_along_axis(moved, at, np.where(values >= 0, magnitudes, -magnitudes), -1)
    # A change of the approximation by d adds d / 2 to each of its four pixels.
    height, width = (side // 4 * 4 for side in pixels.shape[:2])
    rows, columns = height // 2 // _BLOCK, width // 2 // _BLOCK
    change = (moved - blocks).reshape(rows, columns, _BLOCK, _BLOCK).swapaxes(1, 2)
    change = change.reshape(rows * _BLOCK, columns * _BLOCK).repeat(2, 0).repeat(2, 1) / 2
    marked = pixels.copy()
    part = marked[: change.shape[0], : change.shape[1]]
    part[:] = np.clip(np.rint(part + change[..., None] * _OF_U), 0, 255)
    return marked


def read(pixels: Pixels) -> tuple[int, ...]:
    """Return the bits that pixels, uint8 [h, w, 3], most likely hold, whether or not they hold a message."""
    blocks = _blocks(pixels)
    values = np.abs(np.take_along_axis(blocks, _largest(blocks), -1)[:, 0])
    scores = values % _SCALE > _SCALE / 2
    return tuple(int(scores[bit :: len(MESSAGE)].mean() > 0.5) for bit in range(len(MESSAGE)))


def _blocks(pixels: Pixels) -> NDArray[np.float32]:
    """The approximation of U in blocks, in the order of rows: [blocks, 16]."""
    height, width = (side // 4 * 4 for side in pixels.shape[:2])
    u = np.rint(pixels[:height, :width].astype(np.float32) @ _U + 128)
    approximation = (u[::2, ::2] + u[1::2, ::2] + u[::2, 1::2] + u[1::2, 1::2]) / 2
    rows, columns = (side // _BLOCK for side in approximation.shape)
    blocks = approximation[: rows * _BLOCK, : columns * _BLOCK].reshape(rows, _BLOCK, columns, _BLOCK)
    return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(rows * columns, _BLOCK * _BLOCK)


def _largest(blocks: NDArray[np.float32]) -> NDArray[np.intp]:
    """The place of each block's largest magnitude, without the first: [blocks, 1]."""
    places: NDArray[np.intp] = np.abs(blocks[:, 1:]).argmax(1, keepdims=True) + 1
    return places
