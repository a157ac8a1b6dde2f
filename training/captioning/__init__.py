"""Writes prompts files: the text model is asked for captions, which are screened and kept row by row."""
