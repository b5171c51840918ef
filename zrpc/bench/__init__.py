"""Measures zrpc beside ``torch.distributed.rpc`` in one run: what ``zrpc bench`` does.

`rows` says what is measured and `run` does it: for each round and each group of rows it starts
a fresh mesh of processes of either library in turn, and of neither for the limit. The same
workload runs on all meshes; `library` is the only place that knows which is which.

Importing this package imports neither torch nor zmq. Only the processes that are measured do.
"""
