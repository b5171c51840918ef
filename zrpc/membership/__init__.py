"""Who the workers of a mesh are, where they listen, and whether they are alive.

What other rooms may import:

- ``worker_info``: a worker's name and rank, torch's type
- ``peer_record``: all that a worker publishes about itself
- ``view``: the members of the mesh, as one worker sees them
- ``rendezvous``, ``store``, ``signed_store``, ``secret``, ``init_method``: how workers meet
- ``endpoints``: where each of them can be reached
- ``failure_detector``, ``liveness``: which of them are lost, and why
- ``hooks``: the functions of a program that are called when a worker joins or is lost

``store_server`` is a program that ``zrpc launch`` starts.
"""
