"""What plugs into an agent: each service has its own rules, messages and types.

The agent knows none of them; the face chooses which services an agent has. Rooms above may import
the modules that SURFACE in tests/test_imports.py lists: they hold the service classes and their
public types. Of the services only autograd and inspection may know a neighbour: the references.
"""
