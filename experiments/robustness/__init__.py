"""The study of robust rules under attacks."""
