"""A first run on a GPU: whether all trains, what an update costs, where the host waits, what partial rollouts save."""
