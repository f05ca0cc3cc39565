"""What is measured, one program a question."""
