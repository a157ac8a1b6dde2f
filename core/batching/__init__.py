"""Requests, slots, the scheduler and the engine: batching one iteration at a time, for any model.

Free of torch: what an iteration computes is left to its runner.
"""
