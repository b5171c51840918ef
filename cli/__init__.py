"""The zrpc command line."""
