"""HTTP: the protocol, middlewares, bodies of requests and bytes of responses, and connections to clients' URLs."""
