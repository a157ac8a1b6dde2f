"""Canny's edge detector (Canny, 1986), as OpenCV computes it: white edges on black, as ControlNets were trained on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.control import HIGH, LOW

TAN_22 = int(0.4142135623730950488016887242097 * (1 << 15) + 0.5)


def edges(pixels: NDArray[np.uint8], low: int = LOW, high: int = HIGH) -> NDArray[np.uint8]:
    """The edges of a picture [H, W, 3], RGB: [H, W, 3], 255 on an edge, else 0.

    As `cv2.Canny(picture, low, high)`, in either order, with its Sobel filter of 3 × 3, and at each pixel the channel
    of the largest gradient.
    """
    low, high = sorted((low, high))
    dx, dy = _sobel(pixels)
    norms = np.abs(dx) + np.abs(dy)
    channel = norms.argmax(axis=2)[..., None]
    dx, dy, norm = (np.take_along_axis(one, channel, axis=2)[..., 0] for one in (dx, dy, norms))
    peaks = _peaks(dx, dy, norm) & (norm > low)
    kept = _connected(peaks, peaks & (norm > high))
    return np.repeat((kept * np.uint8(255))[..., None], 3, axis=2)


def _sobel(pixels: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Derivatives [H, W, C] by columns and by rows, with the outermost pixels repeated."""
    wide = np.pad(pixels.astype(np.int32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = wide[:-2] + 2 * wide[1:-1] + wide[2:]
    columns = wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:]
    return rows[:, 2:] - rows[:, :-2], columns[2:] - columns[:-2]


def _peaks(dx: NDArray[np.int32], dy: NDArray[np.int32], norm: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return where the norm is largest along the gradient, of four directions; beyond the picture it is 0."""
    wide = np.pad(norm, 1)

    def at(row: int, column: int) -> NDArray[np.int32]:
        height, width = norm.shape
        return wide[1 + row : 1 + row + height, 1 + column : 1 + column + width]

    x, y = np.abs(dx).astype(np.int64), np.abs(dy).astype(np.int64) << 15
    flat = x * TAN_22
    steep = flat + (x << 16)
    across = (norm > at(0, -1)) & (norm >= at(0, 1))
    along = (norm > at(-1, 0)) & (norm >= at(1, 0))
    rising = (dx ^ dy) < 0
    diagonal = np.where(rising, (norm > at(-1, 1)) & (norm > at(1, -1)), (norm > at(-1, -1)) & (norm > at(1, 1)))
    return np.where(y < flat, across, np.where(y > steep, along, diagonal))


def _connected(weak: NDArray[np.bool_], strong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The weak pixels that a chain of neighbours, of eight each, connects with a strong one."""
    width = weak.shape[1] + 2
    open_ = np.pad(weak & ~strong, 1).ravel()
    reached = np.pad(strong, 1).ravel()
    around = np.array([row * width + column for row in (-1, 0, 1) for column in (-1, 0, 1) if row or column])
    front = np.flatnonzero(reached)
    while front.size:
        near = (front[:, None] + around).ravel()
        front = np.unique(near[open_[near]])
        open_[front], reached[front] = False, True
    return reached.reshape(-1, width)[1:-1, 1:-1]
