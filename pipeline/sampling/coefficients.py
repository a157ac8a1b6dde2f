"""The coefficients of samplers' steps, in float64, from the timesteps and sigmas of diffusers' schedulers.

Each function returns columns by the names of `pipeline.sampling.sigmas.COLUMNS`, and `signal` and `noise`, all [steps].
"""

from __future__ import annotations

from typing import Any

import torch


def _x0(scheduler: Any, alpha: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a_x and a_m, [S], for a variance-preserving x = alpha · x0 + sigma · eps, by prediction type."""
    kind = scheduler.config["prediction_type"]
    if kind == "epsilon":
        return 1 / alpha, -sigma / alpha
    if kind == "v_prediction":
        return alpha, -sigma
    return torch.zeros_like(alpha), torch.ones_like(alpha)


def _sigmas(scheduler: Any, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (alpha, sigma, next sigma), [S] float64: signal and noise level at each step, and the level it steps to.

    The sigmas are noise over signal (the sigma of Karras et al. 2022). The object may hold more sigmas
    than steps + 1 (log_linear interpolation); diffusers reads the first of them.
    """
    sigmas = scheduler.sigmas[: steps + 1].double()
    sigma, sigma_next = sigmas[:-1], sigmas[1:]
    return 1 / (sigma**2 + 1).sqrt(), sigma, sigma_next


def flow_euler(scheduler: Any, steps: int) -> dict[str, torch.Tensor]:
    """Compute Euler steps of a rectified flow x = (1 - sigma) · x0 + sigma · eps, whose model returns x0 - eps."""
    sigmas = scheduler.sigmas[: steps + 1].double()
    sigma, ratio = sigmas[:-1], sigmas[1:] / sigmas[:-1]
    return {
        "a_x": torch.ones_like(sigma),
        "a_m": sigma,
        "b_x": ratio,
        "b_0": 1 - ratio,
        "signal": 1 - sigma,
        "noise": sigma,
    }


def euler(scheduler: Any, steps: int) -> dict[str, torch.Tensor]:
    alpha, sigma, sigma_next = _sigmas(scheduler, steps)
    a_x, a_m = _x0(scheduler, alpha, sigma * alpha)
    ratio = sigma_next / sigma
    # Euler's x is x0 + sigma · eps, so 1 / alpha times the variance-preserving one.
    levels = {"signal": torch.ones_like(sigma), "noise": sigma}
    return {"c_in": alpha, "a_x": a_x * alpha, "a_m": a_m, "b_x": ratio, "b_0": 1 - ratio, **levels}


def edm_euler(scheduler: Any, steps: int) -> dict[str, torch.Tensor]:
    """Compute Euler steps of x = x0 + sigma · eps with the preconditioning of Karras et al. 2022, table 1."""
    _, sigma, sigma_next = _sigmas(scheduler, steps)
    data = float(scheduler.config["sigma_data"])
    variance = sigma**2 + data**2
    sign = -1 if scheduler.config["prediction_type"] == "v_prediction" else 1
    ratio = sigma_next / sigma
    return {
        "c_in": variance.rsqrt(), "a_x": data**2 / variance, "a_m": sign * sigma * data * variance.rsqrt(),
        "b_x": ratio, "b_0": 1 - ratio, "signal": torch.ones_like(sigma), "noise": sigma,
    }  # fmt: skip


def euler_ancestral(scheduler: Any, steps: int) -> dict[str, torch.Tensor]:
    _, sigma, sigma_next = _sigmas(scheduler, steps)
    ratio = sigma_next / sigma
    # sigma_down = next² / now, sigma_up = next · sqrt(1 - ratio²): diffusers', without the cancellation.
    up = sigma_next * (1 - ratio**2).sqrt()
    return {**euler(scheduler, steps), "b_x": ratio**2, "b_0": 1 - ratio**2, "b_n": up}


def dpm(scheduler: Any, steps: int, begin: int) -> dict[str, torch.Tensor]:
    """Compute DPM-Solver++ of order 1 or 2, or its SDE (Lu et al. 2022, section 5), by the scheduler's algorithm."""
    alpha, sigma, sigma_next = _sigmas(scheduler, steps)
    a_x, a_m = _x0(scheduler, alpha, sigma * alpha)
    alpha_next = 1 / (sigma_next**2 + 1).sqrt()
    config = scheduler.config
    sde = config["algorithm_type"] == "sde-dpmsolver++"
    ratio = sigma_next / sigma  # exp(-h)
    decay = ratio**2 if sde else ratio  # of x0's share
    first = alpha_next * (1 - decay)
    lower_at_end = (
        config["euler_at_final"]
        or (config["lower_order_final"] and steps < 15)
        or config["final_sigmas_type"] == "zero"  # h is infinite there
    )
    last = steps - 1 if lower_at_end else steps
    # The first step has no history.
    second = slice(begin + 1, last if config["solver_order"] == 2 else begin + 1)
    h = (sigma / sigma_next)[second].log()
    h_previous = (sigma[:-1] / sigma[1:]).log()[begin : begin + len(h)]
    # Written without h in a denominator: it is 0 where Karras sigmas end in final_sigmas_type sigma_min.
    if config["solver_type"] == "heun":
        scale = 2 if sde else 1
        slope = alpha_next[second] * (decay[second] - 1 + scale * h) / (scale * h_previous)
    else:
        slope = 0.5 * first[second] * h / h_previous
    correction = torch.zeros_like(first)
    correction[second] = slope
    columns = {
        "a_x": a_x,
        "a_m": a_m,
        "b_x": alpha_next * sigma_next / (alpha * sigma) * (ratio if sde else 1),
        "b_0": first + correction,
        "b_p": 0 - correction,  # not -correction: no negative zeros
        "signal": alpha,
        "noise": sigma * alpha,
    }
    return columns | ({"b_n": alpha_next * sigma_next * (1 - decay).sqrt()} if sde else {})


def lcm(scheduler: Any, steps: int) -> dict[str, torch.Tensor]:
    alpha_prod = scheduler.alphas_cumprod.double()[scheduler.timesteps]  # [S]
    alpha, sigma = alpha_prod.sqrt(), (1 - alpha_prod).sqrt()
    a_x, a_m = _x0(scheduler, alpha, sigma)
    scaled = scheduler.timesteps.double() * scheduler.config["timestep_scaling"]
    sigma_data = 0.5
    c_skip = sigma_data**2 / (scaled**2 + sigma_data**2)
    c_out = scaled / (scaled**2 + sigma_data**2).sqrt()
    end = torch.ones(1, dtype=torch.float64)
    return {
        "a_x": c_out * a_x + c_skip,  # the boundary condition folds into x0
        "a_m": c_out * a_m,
        "b_x": torch.zeros(steps, dtype=torch.float64),
        "b_0": torch.cat([alpha[1:], end]),
        "b_n": torch.cat([sigma[1:], 0 * end]),
        "signal": alpha,
        "noise": sigma,
    }


def tcd(scheduler: Any, steps: int, eta: float) -> dict[str, torch.Tensor]:
    """Compute trajectory consistency (Zheng et al., 2024): a step goes to timestep s, and noise to the next one."""
    alphas_cumprod = scheduler.alphas_cumprod.double()
    next_timesteps = torch.cat([scheduler.timesteps[1:], torch.zeros(1, dtype=torch.long)])
    alpha_prod, alpha_prod_next = alphas_cumprod[scheduler.timesteps], alphas_cumprod[next_timesteps]
    alpha_prod_s = alphas_cumprod[((1 - eta) * next_timesteps).floor().long()]
    alpha, sigma = alpha_prod.sqrt(), (1 - alpha_prod).sqrt()
    a_x, a_m = _x0(scheduler, alpha, sigma)
    alpha_ratio = alpha_prod_next / alpha_prod_s if eta > 0 else torch.ones(steps, dtype=torch.float64)
    alpha_ratio[-1] = 1  # the last step adds no noise
    carried = (alpha_ratio * (1 - alpha_prod_s)).sqrt() / sigma  # of eps = (x - alpha · x0) / sigma
    return {
        "a_x": a_x,
        "a_m": a_m,
        "b_x": carried,
        "b_0": (alpha_ratio * alpha_prod_s).sqrt() - carried * alpha,
        "b_n": (1 - alpha_ratio).sqrt(),
        "signal": alpha,
        "noise": sigma,
    }
