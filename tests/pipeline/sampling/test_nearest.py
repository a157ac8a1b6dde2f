"""Schedulers of diffusers without a sampler of ours: each is drawn by the nearest, on its authors' noise schedule."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import diffusers.schedulers
import pytest
import torch
from diffusers.utils import is_torchsde_available

from pipeline.sampling import samplers, sigmas
from pipeline.sampling.nearest import nearest
from pipeline.sampling.samplers import FLOW_SCHEDULERS, SAMPLERS, SCHEDULERS

pytestmark = pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")  # of diffusers, by numpy 2

BASE: dict[str, Any] = {
    "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "num_train_timesteps": 1000,
    "steps_offset": 1, "set_alpha_to_one": False, "skip_prk_steps": True, "clip_sample": False, "trained_betas": None,
}  # fmt: skip
CLASSES = sorted(
    name for name in dir(diffusers.schedulers) if name.endswith("Scheduler") and not name.startswith("Flax")
)
UNBUILT = set() if is_torchsde_available() else {"DPMSolverSDEScheduler"}  # diffusers needs torchsde for it
FLOW = {"FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler"}
REFUSED = {  # of other data, other noise, inversions, or a video model's own
    "AmusedScheduler", "BlockRefinementScheduler", "CMStochasticIterativeScheduler", "CogVideoXDDIMScheduler",
    "CogVideoXDPMScheduler", "ConsistencyDecoderScheduler", "CosineDPMSolverMultistepScheduler",
    "DDIMInverseScheduler", "DDPMWuerstchenScheduler", "DPMSolverMultistepInverseScheduler", "DiscreteDDIMScheduler",
    "EntropyBoundScheduler", "FlowMapEulerDiscreteScheduler", "HeliosDMDScheduler", "HeliosScheduler",
    "IPNDMScheduler", "KarrasVeScheduler", "LTXEulerAncestralRFScheduler", "MiniMaxH3Scheduler", "PiflowScheduler",
    "RFD4ProteinaScheduler", "RePaintScheduler", "SCMScheduler", "ScoreSdeVeScheduler", "ScoreSdeVpScheduler",
    "UnCLIPScheduler", "VQDiffusionScheduler",
}  # fmt: skip


def default(config: dict[str, Any], names: tuple[str, ...] = SCHEDULERS) -> tuple[str, dict[str, Any], str]:
    """Return the default sampler of a model with this config, the config that its table reads, and the reason."""
    scheduler = nearest(config, names)
    name = samplers.default_name(scheduler.config, samplers.offered(scheduler.config, names))
    return name, scheduler.config, scheduler.reason


@pytest.mark.parametrize("class_name", CLASSES)
def test_every_class_of_diffusers_is_drawn_or_refused_by_name(class_name: str) -> None:
    config = BASE | {"_class_name": class_name}
    for names, refused in ((SCHEDULERS, REFUSED | FLOW), (FLOW_SCHEDULERS, set(CLASSES) - FLOW)):
        if class_name in refused:
            with pytest.raises(ValueError, match=f"_class_name='{class_name}' is not a supported scheduler"):
                default(config, names)
            continue
        name, result, reason = default(config, names)
        assert result["_class_name"] == SAMPLERS[name].class_name
        assert (reason == "") == (class_name == SAMPLERS[name].class_name)
        assert not reason or (class_name in reason and name in reason)
        for steps in (1, 2, 4, 20, 30):
            assert sigmas.table(result, name, steps).coefficients.isfinite().all()


@pytest.mark.quick
@pytest.mark.parametrize("class_name", sorted(set(CLASSES) - REFUSED - FLOW - UNBUILT - {"EDMEulerScheduler"}))
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"beta_schedule": "linear", "beta_start": 0.0002, "beta_end": 0.03},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"trained_betas": [0.001 + 0.00001 * n for n in range(1000)]},
        {"rescale_betas_zero_snr": True},
        {"num_train_timesteps": 500},
    ],
)
def test_the_noise_schedule_is_the_authors(class_name: str, changed: dict[str, Any]) -> None:
    config = BASE | {"_class_name": class_name} | changed
    original = getattr(diffusers.schedulers, class_name).from_config(config)
    if not hasattr(original, "alphas_cumprod"):
        assert class_name == "EDMDPMSolverMultistepScheduler"
        return
    name, result, _ = default(config)
    expected = original.alphas_cumprod.double()
    assert torch.allclose(
        SAMPLERS[name].load().from_config(result).alphas_cumprod.double()[:-1], expected[:-1], rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    ("class_name", "spacing"),
    [
        (class_name, spacing)
        for class_name in ("DDIMScheduler", "DDPMScheduler", "UniPCMultistepScheduler", "DEISMultistepScheduler")
        for spacing in (None, "leading", "trailing", "linspace")
        if (class_name, spacing) != ("DDPMScheduler", "linspace")  # which it rounds, and ours has fractions
    ],
)
def test_timesteps_are_spaced_as_the_class_says(class_name: str, spacing: str | None) -> None:
    config = BASE | {"_class_name": class_name} | ({} if spacing is None else {"timestep_spacing": spacing})
    original = getattr(diffusers.schedulers, class_name).from_config(config)
    name, result, _ = default(config)
    assert result["timestep_spacing"] == original.config["timestep_spacing"]
    for steps in (4, 20, 30):
        original.set_timesteps(steps)
        found = sigmas.table(result, name, steps).timesteps
        assert (found - original.timesteps.float()).abs().max() < 1  # fractions, where diffusers' class has them


@pytest.mark.parametrize(
    ("config", "expected", "said"),
    [
        ({"_class_name": "UniPCMultistepScheduler", "solver_order": 3}, "dpm++2m", "UniPC"),
        ({"_class_name": "DPMSolverSinglestepScheduler", "algorithm_type": "dpmsolver"}, "dpm++2m", "Singlestep"),
        ({"_class_name": "DPMSolverMultistepScheduler", "solver_order": 3}, "dpm++2m", "solver_order=3 by 2"),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver"},
            "dpm++2m-sde", "algorithm_type='sde-dpmsolver' by 'sde-dpmsolver++'",
        ),
        ({"_class_name": "KDPM2AncestralDiscreteScheduler", "use_karras_sigmas": True}, "dpm++2m-sde", "KDPM2"),
        ({"_class_name": "DDPMScheduler", "beta_schedule": "sigmoid"}, "euler-ancestral", "DDPM"),
        ({"_class_name": "DDIMScheduler", "thresholding": True, "clip_sample": True}, "euler", "and thresholding"),
        ({"_class_name": "HeunDiscreteScheduler", "use_exponential_sigmas": True}, "dpm++2m", "Heun"),
    ],
)  # fmt: skip
def test_settings_without_a_table_become_the_nearest_and_are_named(
    config: dict[str, Any], expected: str, said: str
) -> None:
    name, result, reason = default(BASE | config)
    assert name == expected and said in reason
    table = sigmas.table(result, name, 8)
    if config.get("use_karras_sigmas") or config.get("use_exponential_sigmas"):
        plain = sigmas.table(result | dict.fromkeys(("use_karras_sigmas", "use_exponential_sigmas"), False), name, 8)
        assert not torch.equal(table.levels, plain.levels)


@pytest.mark.parametrize(
    "class_name", ["UniPCMultistepScheduler", "DEISMultistepScheduler", "DPMSolverMultistepScheduler"]
)
def test_a_solver_of_flows_is_for_models_of_flows(class_name: str) -> None:
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    config = {"_class_name": class_name, **flow}
    name, result, reason = default(config, FLOW_SCHEDULERS)
    assert name == "flow-euler" and class_name in reason
    own = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    assert torch.equal(sigmas.table(result, name, 8).coefficients, sigmas.table(own, name, 8).coefficients)
    with pytest.raises(ValueError, match=f"_class_name='{class_name}' for flow matching is not a supported scheduler"):
        default(config)


def test_a_live_config_leaves_what_it_was_never_given_to_its_class() -> None:
    live = diffusers.schedulers.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False)
    _, result, _ = default({**live.config, "_class_name": "DDIMScheduler"})
    assert result["timestep_spacing"] == "leading" and "_use_default_values" not in result


def saved(class_name: str, **settings: Any) -> dict[str, Any]:
    """Return the config that the class saves."""
    try:
        live = getattr(diffusers.schedulers, class_name).from_config(settings)
    except (ImportError, NotImplementedError):  # without torchsde, and for a solver's algorithm_type
        return {**settings, "_class_name": class_name}
    config: dict[str, Any] = json.loads(live.to_json_string())
    return config


@pytest.mark.quick
@pytest.mark.parametrize("class_name", sorted(set(CLASSES) - REFUSED - {"FlowMatchEulerDiscreteScheduler"}))
@pytest.mark.parametrize(
    "source", ["", "DDPMScheduler", "DDIMScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler"]
)
def test_each_offered_sampler_draws_from_each_saved_config(class_name: str, source: str) -> None:
    """Also where the config was another class's before, whose settings it keeps."""
    settings = {"solver_order": 3} if source.endswith("MultistepScheduler") else {"clip_sample": False}
    config = saved(class_name, **(saved(source, **settings) if source and not class_name.startswith("EDM") else {}))
    names = FLOW_SCHEDULERS if class_name in FLOW else SCHEDULERS
    result = nearest(config, names).config
    offered = samplers.offered(result, names)
    assert offered if class_name in FLOW or class_name.startswith("EDM") else {"euler", "dpm++2m"} <= {*offered}
    for name in offered:
        assert sigmas.table(result, name, 20).coefficients.isfinite().all()


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        *itertools.product(
            ("DDPMScheduler", "EulerAncestralDiscreteScheduler", "LCMScheduler"),
            ({"variance_type": "fixed_small"}, {"variance_type": "fixed_large_log"}),
        ),
        *itertools.product(
            ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "TCDScheduler"),
            ({"solver_order": 3}, {"algorithm_type": "dpmsolver"}),
        ),
    ],
)
def test_settings_of_another_class_are_not_this_ones(class_name: str, settings: dict[str, Any]) -> None:
    """DDPM's variance is of no other sampler, and a solver's settings are for the solver."""
    name, result, reason = default(BASE | {"_class_name": class_name} | settings)
    own = class_name != "DDPMScheduler"
    assert "variance" not in reason and (reason == "") is own
    assert not own or SAMPLERS[name].class_name == class_name
    assert "dpm++2m" in samplers.offered(result, SCHEDULERS)
    sigmas.table(result, "dpm++2m", 20)


@pytest.mark.parametrize("settings", [{"clip_sample": True}, {"thresholding": True}, {"prediction_type": "sample"}])
def test_samplers_that_do_not_support_a_setting_are_not_offered(settings: dict[str, Any]) -> None:
    config = nearest(BASE | {"_class_name": "EulerDiscreteScheduler"} | settings, SCHEDULERS).config
    offered = samplers.offered(config, SCHEDULERS)
    assert "euler" in offered and {*offered} < {*SCHEDULERS}
    for name in SCHEDULERS:
        if name in offered:
            sigmas.table(config, name, 20)
        else:
            with pytest.raises(ValueError, match="is not supported by"):
                sigmas.table(config, name, 20)


@pytest.mark.parametrize("class_name", sorted(FLOW))
@pytest.mark.parametrize(
    "settings",
    [{"use_flow_sigmas": True}, {"prediction_type": "flow_prediction"}, {"flow_shift": 1.0, "use_flow_sigmas": True}],
)
def test_flow_classes_keep_their_shift_beside_a_solvers_settings(class_name: str, settings: dict[str, Any]) -> None:
    """As in a config that was a solver's of flows before."""
    config = {"_class_name": class_name, "shift": 3.0}
    plain, mixed = (default(config | more, FLOW_SCHEDULERS)[1] for more in ({}, settings))
    tables = [sigmas.table(one, "flow-euler", 8).coefficients for one in (plain, mixed)]
    assert plain["shift"] == mixed["shift"] == 3.0 and torch.equal(*tables)


def test_defaults_of_a_class_that_cannot_be_imported_are_its_own() -> None:
    """Read from its source, which needs no torchsde."""
    path = Path(inspect.getfile(diffusers.schedulers)).with_name("scheduling_dpmsolver_sde.py")
    functions = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef))
    init = [node.args for node in functions if node.name == "__init__"][-1]
    defaults = zip([argument.arg for argument in init.args[1:]], map(ast.literal_eval, init.defaults), strict=True)
    result = nearest({"_class_name": "DPMSolverSDEScheduler"}, SCHEDULERS).config
    for name, value in defaults:
        assert value is None or name == "noise_sampler_seed" or result[name] == value, name


@pytest.mark.parametrize("class_name", ["DDIMScheduler", "DDIMParallelScheduler"])
@pytest.mark.parametrize("spacing", [None, "leading", "trailing", "linspace"])
def test_ddim_takes_the_same_steps_at_whole_timesteps(class_name: str, spacing: str | None) -> None:
    settings = {} if spacing is None else {"timestep_spacing": spacing}
    _, _, reason = default(BASE | {"_class_name": class_name} | settings)
    assert ("takes the same steps" in reason) == (spacing in (None, "leading"))
