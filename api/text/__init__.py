"""Endpoints that write text and embed it, in OpenAI's shapes."""
