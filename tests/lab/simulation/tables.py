"""Cost tables for tests: curves that are known by their formula."""

from __future__ import annotations

from lab.simulation.costs import ANY, DEEP, ENCODE, SHALLOW, VAE, Costs

SIZE, OTHER = (64, 64), (96, 64)
WIDTHS = (1, 2, 4, 8, 16, 32)


def affine(fixed: float = 0.02, each: float = 0.01) -> Costs:
    """Every phase costs `fixed` and `each` a row, at two sizes, by a factor of its own."""
    factors = {ENCODE: 0.5, DEEP: 1.0, VAE: 0.8, SHALLOW["block"]: 0.3, SHALLOW["resnet"]: 0.1}
    measured = {
        (phase, size): {rows: factor * scale * (fixed + each * rows) for rows in WIDTHS}
        for phase, factor in factors.items()
        for size, scale in (((ANY, 1.0),) if phase == ENCODE else ((SIZE, 1.0), (OTHER, 1.5)))
    }
    held = {size: {"request": 1, "row": 10, "shallow": 5, "shallow-resnet": 2} for size in (SIZE, OTHER)}
    return Costs("affine", measured, device="a formula", source="a formula", held_bytes=held)
