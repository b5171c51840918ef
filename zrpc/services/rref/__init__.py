"""Remote references: values that stay on their worker, counted across the mesh.

``rref`` has the class that users see; ``service``, and ``orders`` for actors, plug into an agent.
Other rooms may import these three. ``protocol`` has the rules of the reference count, without I/O,
and ``messages`` what they send.
"""
