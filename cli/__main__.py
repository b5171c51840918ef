"""Runs the command line as ``python -m zrpc.cli``."""

from . import main

main(prog_name="zrpc")
