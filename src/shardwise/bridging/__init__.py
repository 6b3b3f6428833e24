"""What the bridges to other libraries have in common: joining a run, and engines by parameters."""
