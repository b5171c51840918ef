"""Batches at the callee: calls of a function that arrive together become one call of it.

See `zrpc.functions.batched`. `gathering` has the rules, without I/O; `service` has the rest.
"""
