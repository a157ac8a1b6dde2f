"""Random fault histories in the manner of Jepsen: clients record every answer, and a checker judges."""
