"""Breakpoints: a worker's pdb at the launcher's terminal, or at that of ``zrpc debug``.

While a worker's program stands at one, no deadline of a call passes anywhere in the mesh.
"""
