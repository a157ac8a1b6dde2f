"""The APIs of other servers, each a translation to the same jobs."""
