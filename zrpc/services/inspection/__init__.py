"""What the workers of a mesh are doing and what they wait for: warnings and ``zrpc stacks``.

In a worker, ``service`` warns of slow calls, reports full pools to callers, and
answers questions with a snapshot of the worker. Outside, ``discovery`` asks the workers of this
host, and ``report`` puts their snapshots together as text.
"""
