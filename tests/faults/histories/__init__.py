"""Histories in the manner of Jepsen: clients write down every answer, faults come at random, a checker judges."""
