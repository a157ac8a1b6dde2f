"""The room of denoising: samplers as tables of seven numbers a step, a step of rows of many requests, and DeepCache's
features.
"""
