"""Models as files: found, downloaded, checked, converted, loaded, and random ones of the same shapes."""
