"""The pytest plugin: meshes of zrpc workers as fixtures.

pytest imports this module in every run on a machine where zrpc is installed, so it imports
neither torch nor zmq, nor zrpc's core: the fixtures do, when a test first asks for one.
"""
