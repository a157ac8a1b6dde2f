"""Simulates a fleet of engines under a virtual clock: the real scheduler, simulated devices, measured costs."""
