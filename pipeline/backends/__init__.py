"""The backends: how an image model's phases run. One class each, behind the protocol of `backend.py`."""
