"""Remote references: values that stay on their worker, counted across the mesh.

``rref`` has the class that users see and ``service`` what plugs into an agent; other rooms may
import these two. ``protocol`` has the rules of the reference count, without I/O, and ``messages``
what they send.
"""
