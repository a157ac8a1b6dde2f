"""Measures image quality: distances between sets of images, and how well images match their captions."""
