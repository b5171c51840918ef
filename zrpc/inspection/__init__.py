"""What the workers of a mesh do just now, and what they wait for: warnings and ``zrpc stacks``."""
