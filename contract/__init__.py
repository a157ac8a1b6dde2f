"""What crosses rooms: requests, cards, plans, precisions and errors, as types. Imports no torch and does no I/O."""
