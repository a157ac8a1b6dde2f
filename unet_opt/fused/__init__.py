"""UNet and VAE decoder on a GPU, with everything between two matrix products in one kernel."""
