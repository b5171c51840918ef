"""A page with `zrpc.stats` for Prometheus, if the user asks for one."""
