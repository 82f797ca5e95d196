"""What the studies of all papers share: how one is declared, run and reported."""
