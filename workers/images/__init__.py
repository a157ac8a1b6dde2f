"""Images: the handler of their jobs, their sources, files and cards."""
