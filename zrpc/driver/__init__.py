"""Meshes of a driver: a program, or a notebook, that starts the workers and is a member itself.

`zrpc.start_mesh` starts them on this machine. `zrpc.integrations.ray` has Ray start them, and uses
`place`.
"""
