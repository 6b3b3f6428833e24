"""Formats text for users: safe names, readable numbers, and hints about other libraries' names."""
