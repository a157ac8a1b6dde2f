"""The stages around the engine: what happens to a job before its requests run, and to what they came to."""
