"""What `tierstore doctor` looks at, what it says, and when it is not content."""
