"""Meshes that other systems start: `zrpc.integrations.ray` for Ray.

A module of this room imports the system that it is named after, so import it only if that is
installed.
"""
