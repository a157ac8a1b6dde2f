"""Types that cross package borders: requests, cards, plans, precisions and errors. Imports no torch and does no I/O."""
