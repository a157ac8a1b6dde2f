"""Histories in the manner of Jepsen: clients write down every call and answer, faults come at random, a checker judges."""
