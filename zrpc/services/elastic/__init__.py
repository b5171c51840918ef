"""Elastic meshes, which workers join and leave while they run: a log of membership in the store.

The rules, without I/O: ``records`` (the entries of the log), ``state`` (what they mean) and
``compaction`` (which of them are deleted). ``log`` reads and appends entries. ``join`` starts a
worker's agent with the ``service``, whose ``follower`` reads the log in a thread of its own.
"""
