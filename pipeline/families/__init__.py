"""The model families: what is particular to each kind of diffusion model that the pipeline runs."""
