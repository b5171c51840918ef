"""Large tensors between workers of one host, in segments of shared memory that are reused.

``segments`` is the sender's side and ``borrowed`` the receiver's: neither sends anything.
``service`` puts them together.
"""
