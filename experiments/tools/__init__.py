"""What makes a file of the package."""
