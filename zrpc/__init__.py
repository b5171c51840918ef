"""zrpc."""
