"""What ``task=`` can be, and what a task is given."""
