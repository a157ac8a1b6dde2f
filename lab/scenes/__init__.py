"""Checks pictures of scenes of emoji against their captions: subject, count, colour and place."""
