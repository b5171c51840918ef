"""Measures zrpc beside ``torch.distributed.rpc`` in one run: what ``zrpc bench`` does.

`rows` lists what is measured, and `run` measures it. In each round, each group of rows gets fresh
meshes of processes: one of each library, and one of neither for the limit. All meshes run the same
workload; only `library` knows which library is which.

Importing this package imports neither torch nor zmq. Only the measured processes import them.
"""
