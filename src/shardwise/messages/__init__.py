"""What users read: safe names, readable numbers, and hints for names of other libraries."""
