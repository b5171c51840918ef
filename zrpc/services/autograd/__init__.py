"""Distributed autograd: contexts, backward passes, and the gradients that travel.

Other rooms may import ``service``, which plugs into an agent; the face is ``zrpc.autograd``. Of
the other services this one knows ``rref`` only.
"""
