"""What the papers' convergence theorems predict, measured on problems whose constants are known."""
