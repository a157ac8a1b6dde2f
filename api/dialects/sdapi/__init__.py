"""AUTOMATIC1111's API, a translation of its requests to image jobs: on where the setting `sdapi` is."""
