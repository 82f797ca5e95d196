"""Clients that exist: Shakespeare's roles, and what the papers say of them."""
