"""Formats text for users: safe names, readable numbers, and hints for names of other libraries."""
