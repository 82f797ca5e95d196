"""What makes a file of the package, or times its import."""
