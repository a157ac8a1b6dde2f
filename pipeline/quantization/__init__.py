"""The room of models in 8 bits: calibration on prompts, SmoothQuant's variants on disk, sensitivity of layers."""
