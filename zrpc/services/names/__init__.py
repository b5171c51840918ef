"""Names of actors, unique in the mesh.

``registry`` has the rules, without I/O, and ``messages`` what they send. ``service`` plugs both
into an agent, and ``claims`` is what a program calls.
"""
