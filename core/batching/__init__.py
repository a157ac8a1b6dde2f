"""Requests, slots, the scheduler and the engine: batching one iteration at a time, for any model.

Knows neither images nor text nor torch; what an iteration computes is its runner's business.
"""
