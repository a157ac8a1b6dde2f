"""Runs one text model on several devices: ranks, their processes, and their parts of the model."""
