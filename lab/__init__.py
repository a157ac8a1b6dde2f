"""The laboratory: it measures, simulates, trains and judges. Nothing of the product imports it."""
