"""A job's request again: whatever came of chance, plans and defaults is said, and so comes once more."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contract.card import MAX_SEED, ImageDefaults, ImageOffer
from contract.errors import Invalid
from contract.image import Edit, ImageJob, ImageParameters
from contract.image_request import ImageRequest
from contract.plan import DeepCache, to_field

PLANS: dict[str, dict[str, Any]] = {
    "balanced": {"steps": 12, "guidance_interval": [0.0, 0.5], "deepcache": {"interval": 3}, "vae": "tiny"},
    "fast": {"steps": 8, "scheduler": "dpm++2m", "schedule_type": "karras", "guided_steps": [0, 3], "deepcache": "off"},
}
OFFERS = [
    ImageOffer(
        [(64, 64), (96, 64)],
        ("euler", "dpm++2m", "lcm", "tcd"),
        (64, 64),
        loras=("ink", "turbo"),
        plans=PLANS,
        plan=usual,
        vaes=("full", "tiny"),
        defaults=defaults,
    )
    for usual in ("", "balanced", "fast")
    for defaults in (ImageDefaults(), ImageDefaults(steps=4, scheduler="lcm", student="lcm", most_steps=8))
]
FIELDS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["a fox", 'a "red" fox\n: 🦊'])},
    optional={
        "n": st.integers(1, 3), "seed": st.integers(0, MAX_SEED), "steps": st.integers(1, 30),
        "size": st.sampled_from(["64x64", "96x64", "auto"]), "guidance_scale": st.floats(0, 20),
        "negative_prompt": st.sampled_from(["", "blurry"]), "scheduler": st.sampled_from(["euler", "dpm++2m", "tcd"]),
        "deterministic": st.booleans(), "preview_every": st.integers(0, 5), "lora": st.sampled_from(["ink:0.5", "ink"]),
        "plan": st.sampled_from(["off", "auto", "fast", "balanced"]), "vae": st.sampled_from(["full", "tiny"]),
        "deepcache": st.sampled_from(["off", "auto"]), "guidance_interval": st.just([0.25, 1.0]),
        "guided_steps": st.just([0]), "schedule_type": st.sampled_from(["karras", "trailing"]),
        "timesteps": st.just([900, 500, 100]), "sigmas": st.just([10.0, 3.0, 0.0]), "eta": st.just(0.3),
        "output_format": st.sampled_from(["png", "webp"]), "output_compression": st.integers(0, 100),
        "prompt_weighting": st.booleans(), "expand_prompt": st.booleans(),
        "refiner": st.sampled_from([{"model": "refiner"}, {"model": "refiner", "from": 0.5}]),
        "upscale": st.sampled_from([{"model": "x4"}, {"model": "x4", "scale": 2.5}]),
        "cascade": st.sampled_from([{"draft": "sketcher", "gate": 20.5}, {"draft": "sketcher", "gate": -1}]),
    },
)  # fmt: skip


@given(FIELDS, st.sampled_from(OFFERS), st.sampled_from(OFFERS), st.sampled_from([None, DeepCache(3, "resnet")]))
def test_the_request_makes_the_same_job_whatever_the_defaults_are_by_then(
    given_fields: dict[str, Any], offer: ImageOffer, later: ImageOffer, worker: DeepCache | None
) -> None:
    """Of plans and of the worker's DeepCache; the model's own are the model's."""
    try:
        job = ImageRequest(**given_fields).complete(offer)
    except Invalid:
        return
    drawn = ImageJob.read(json.loads(json.dumps(job.to_dict())))  # as its record has it
    pictures = drawn.pictures(worker)
    asked = json.loads(json.dumps(drawn.redraw("m", to_field(pictures[0].deepcache))))
    kind, model = asked.pop("type"), asked["model"]
    assert (kind, model) == ("image", "m")
    if later.defaults != offer.defaults:
        later = offer
    again = ImageRequest(**asked).complete(later)
    assert again.pictures(DeepCache(5)) == pictures
    assert (again.n, again.output_format, again.expand_prompt) == (job.n, job.output_format, job.expand_prompt)
    assert (again.output_compression, again.cascade) == (job.output_compression, job.cascade)
    assert again.redraw("m", again.deepcache) == {**asked, "type": kind}


def test_an_edits_source_is_not_told() -> None:
    job = ImageJob(ImageParameters("a", 1, 64, 64, edit=Edit("key")))
    assert job.redraw("m", "off") is None
