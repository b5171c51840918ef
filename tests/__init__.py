"""The tests: a folder for each room of zrpc/, and `behaviour` for what programs see of calls."""
