"""How accurately the quadratic program is solved."""
