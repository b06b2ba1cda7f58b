"""Generation with vLLM: a client for its server, recovery from failures, and checks that it has the latest weights."""
