"""The laboratory: benchmarks, the simulator, and the training of the embedded models."""
