"""Writes prompts files: the text model generates captions, which are screened and stored row by row."""
