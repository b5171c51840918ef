"""Names of actors, unique in the mesh, and actors that are made again after their worker restarts.

``registry`` has the rules of names, without I/O, and ``messages`` what they send. ``service`` plugs
both into an agent.
"""
